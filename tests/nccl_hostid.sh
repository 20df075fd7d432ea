#!/usr/bin/env bash
# More ranks than GPUs over NCCL, which wants a GPU for each rank of a host: each set of ranks that
# covers the GPUs once is told that it is a host of its own. Right, and slow: between sets, messages
# take the network's way. Where there are GPUs enough, nothing is set.
#
#   mpirun -n 8 tests/nccl_hostid.sh program [flags]
set -euo pipefail
rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}
ranks=${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-1}}
if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
  gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .)
else
  gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c GPU) || gpus=0
fi
if [[ $gpus -gt 0 && $ranks -gt $gpus ]]; then
  export NCCL_HOSTID=set-$((rank / gpus))
fi
exec "$@"
