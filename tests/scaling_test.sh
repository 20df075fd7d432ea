#!/usr/bin/env bash
# scaling/scaling.py on two ranks of the CPU: does a table come out, and does every row of it train as
# one rank does? usage: scaling_test.sh BUILD
set -euo pipefail
command -v python3 >/dev/null || { echo "no python3 here" && exit 0; }
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
python3 "$(dirname "${BASH_SOURCE[0]}")/scaling/scaling.py" --tiny --gpus 2 --steps 3 --build "$1" \
  --only '^DP$|ZeRO-3|TP|1F1B' --out "$out"
[[ $(wc -l <"$out/scaling.csv") == 6 && -s $out/scaling.svg ]] || { echo "rows are missing" && exit 1; }
awk -F, 'NR > 1 && $9 + 0 > 1e-5 { print $1 " has other losses: " $9; bad = 1 } END { exit bad }' \
  "$out/scaling.csv"
