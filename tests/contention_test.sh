#!/usr/bin/env bash
# Two GPUs: matmuls beside an all-reduce of NCCL's kernels take longer than alone, and longer than
# beside copy engines.   usage: contention_test.sh BUILD
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
if [[ $(nvidia-smi --list-gpus 2>/dev/null | grep -c GPU) -lt 2 ]]; then
  echo "skipped: this needs two GPUs"
  exit 0
fi
export LOCKSTEP_PROGRAMS=$1
slower() {
  local words
  words=$("$root/lockstep" mpirun -n 2 "$1/08_kernels/contention" --device cuda --by "$2")
  echo "$words" >&2
  awk '/times as long/ { print $(NF - 3) }' <<<"$words"
}
kernels=$(slower "$1" kernels)
copies=$(slower "$1" copies)
awk -v k="$kernels" -v c="$copies" 'BEGIN { exit !(k > 1.02 && c < k) }' ||
  { echo "FAILED: $kernels times as long beside kernels, $copies beside copies" && exit 1; }
