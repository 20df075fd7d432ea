#!/usr/bin/env bash
# Pitfall 136: a machine without nvcc is configured without a word about CUDA or NCCL, and nothing
# of them is looked for. Such a machine is made here: a PATH with all of this one's programs but
# nvcc, and no other place to search.   usage: no_cuda_configure_test.sh CMAKE [cmake flags]
set -euo pipefail
source_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

mkdir "$tmp/bin"
IFS=: read -ra folders <<<"$PATH"
for folder in "${folders[@]}"; do
  find -L "$folder" -maxdepth 1 -type f -executable ! -name nvcc ! -name nvidia-smi -print0 \
    2>/dev/null | xargs -0 -r ln -s -t "$tmp/bin" 2>/dev/null || true # the first of a name stays
done

status=0
env -u CUDACXX -u CUDA_PATH -u CUDA_HOME PATH="$tmp/bin" "$1" -S "$source_root" -B "$tmp/build" \
  -G Ninja -DLOCKSTEP_CUDA=AUTO -DLOCKSTEP_CUDA_SEARCH_PATHS="$tmp" -DLOCKSTEP_TESTS=OFF "${@:2}" \
  --trace --trace-redirect="$tmp/trace" >"$tmp/out" 2>&1 || status=$?
if [[ $status != 0 ]]; then
  cat "$tmp/out"
  echo "FAILED: it does not configure without a CUDA compiler"
  exit 1
fi
if grep -iE 'cuda|nccl' "$tmp/out"; then
  echo "FAILED: the output of CMake mentions what this machine does not have"
  exit 1
fi
if grep -iE 'find_(package|library|path|file)\(.*(cuda|nccl|cublas)|check_language' "$tmp/trace"; then
  echo "FAILED: CMake looked for it"
  exit 1
fi
echo "not a word in $(wc -l <"$tmp/out") lines of output"
