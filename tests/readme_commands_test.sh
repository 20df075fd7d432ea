#!/usr/bin/env bash
# Every command that a README tells the reader to type must work: each line of a bash block that
# starts with ./lockstep is run here, training with --dry-run. usage: readme_commands_test.sh BUILD
set -euo pipefail
source_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
export LOCKSTEP_PROGRAMS=$1
cd "$source_root"
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

commands_of() { # the commands in a README: bash blocks, lines joined at \, without comments
  sed -n '/^ *```\(bash\|sh\)$/,/^ *```$/p' "$1" | sed -e ':a' -e '/\\$/N; s/ *\\\n */ /; ta' |
    sed -n 's/^ *\(\$ \)\{0,1\}\(\.\/lockstep .*\)/\2/p' | sed 's/ *\( #.*\)\{0,1\}$//'
}

ran=0 failed=0
for readme in README.md [0-9][0-9]_*/README.md; do
  [[ -f $readme ]] || continue
  while IFS= read -r command; do
    case $command in
      "./lockstep test"*) continue ;; # it would run this test
      "./lockstep train --help" | "./lockstep run"*" --help") typed=$command ;;
      "./lockstep train"* | "./lockstep run"*)
        typed=$(sed -E 's/^(\.\/lockstep (train|run [0-9]+( [a-z][a-z0-9_]*)?))/\1 --dry-run/' \
          <<<"$command") ;;
      *) typed=$command ;;
    esac
    ran=$((ran + 1))
    if bash -c "$typed" >"$tmp/out" 2>&1; then
      echo "works: $typed"
    else
      echo "FAILED: $readme says: $command, which as '$typed' prints"
      sed 's/^/    /' "$tmp/out"
      failed=$((failed + 1))
    fi
  done < <(commands_of "$readme")
done
[[ $ran -gt 0 ]] || { echo "FAILED: no README names a command" && exit 1; }
[[ $failed == 0 ]] || exit 1
echo "$ran commands of the READMEs work"
