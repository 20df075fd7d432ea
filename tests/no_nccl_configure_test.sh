#!/usr/bin/env bash
# Pitfall 136: with CUDA, but without NCCL, configuring says in one line which variable to set, and
# goes on: GPUs of one process can still talk.   usage: no_nccl_configure_test.sh CMAKE [cmake flags]
set -euo pipefail
source_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

if ! "$1" -S "$source_root" -B "$tmp/build" -G Ninja -DLOCKSTEP_CUDA=ON -DLOCKSTEP_TESTS=OFF \
  -DLOCKSTEP_NCCL_ROOT="$tmp" "${@:2}" >"$tmp/out" 2>&1; then
  cat "$tmp/out"
  echo "FAILED: it does not configure without NCCL"
  exit 1
fi
if [[ $(grep -ic nccl "$tmp/out") != 1 ]] || ! grep -q 'DLOCKSTEP_NCCL_ROOT=' "$tmp/out"; then
  grep -i nccl "$tmp/out"
  echo "FAILED: there should be one line about NCCL, with the variable to set"
  exit 1
fi
grep nccl -i "$tmp/out"
