#!/usr/bin/env bash
# A rank on a GPU that throws, is killed or hangs ends all processes in time, with a sentence; one
# that is only late does not.   usage: nccl_failure_test.sh BUILD
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
build=$1 by=$2
if ! nvidia-smi --list-gpus 2>/dev/null | grep -q GPU; then
  echo "skipped: no GPU"
  exit 0
fi
export LOCKSTEP_PROGRAMS=$build
tmp=$(mktemp)
trap 'rm -f "$tmp"' EXIT

# expect HOW STATUS WORDS: STATUS is "ok" or "failed"; the output must hold WORDS.
expect() {
  local status=ok start=$SECONDS
  timeout -k 5 60 "$root/lockstep" mpirun -n 2 "$root/tests/nccl_hostid.sh" \
    "$build/tests/failing_gpu_rank" "$1" "$by" >"$tmp" 2>&1 || status=failed
  local seconds=$((SECONDS - start))
  # Starting NCCL takes a while; the time limit is 3 s, and everybody is gone 5 s later.
  if [[ $status != "$2" ]] || ! grep -q -- "$3" "$tmp" || [[ $seconds -gt 30 ]]; then
    cat "$tmp"
    echo "FAILED: $1: $status after $seconds s; expected $2 with: $3"
    exit 1
  fi
  echo "$1: $status after $seconds s"
}
expect late ok '^done'
expect throw failed 'rank 1 does not feel well'
expect kill failed 'signal 9'
expect hang failed 'error: rank 0 waited 3 s for all_reduce (number [0-9]* in "world")'
