#!/usr/bin/env bash
# The launcher in faked machines: a copy of it in an empty folder, and a PATH that holds only what
# the case allows. Stubs write what they were asked to do into $calls.
set -euo pipefail
source_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
calls=$tmp/calls
failures=0
unset LOCKSTEP_PROGRAMS LOCKSTEP_NO_INSTALL

expect() { # expect "what should be true" command...
  if ! "${@:2}"; then
    echo "FAILED: $1"
    sed 's/^/    output: /' "$tmp/out"
    sed 's/^/    called: /' "$calls"
    failures=$((failures + 1))
  fi
}
launch() { # launch FOLDER LAUNCHER args...: status and output in $status and $tmp/out
  : >"$calls"
  status=0
  (cd "$1" && PATH=$tmp/bin "${@:2}") >"$tmp/out" 2>&1 || status=$?
}
says() { grep -qE -- "$1" "$tmp/out"; }
called() { grep -qE -- "$1" "$calls"; }
not() { ! "$@"; }
status_is() { [[ $status == "$1" ]]; }
lines_are() { [[ $(wc -l <"$tmp/out") == "$1" ]]; }

stub() { # stub NAME 'what it does': a program in the faked PATH
  rm -f "$tmp/bin/$1"
  printf '#!/bin/bash\necho "%s $*" >>"%s"\n%s\n' "$1" "$calls" "$2" >"$tmp/bin/$1"
  chmod +x "$tmp/bin/$1"
}

# A machine where everything is installed, with one chapter whose program is a stub.
mkdir -p "$tmp/bin" "$tmp/root/01_first" "$tmp/root/build/01_first" "$tmp/elsewhere"
sed "s|/proc/|$tmp/proc/|g" "$source_root/lockstep" >"$tmp/root/lockstep"
chmod +x "$tmp/root/lockstep"
ln -s "$tmp/root/lockstep" "$tmp/elsewhere/link"
for tool in bash env sh dirname readlink true cat grep sed tail tee mkdir rm; do
  ln -s "$(type -P "$tool")" "$tmp/bin/$tool"
done
packages=()
eval "$(sed -n '/^packages=(/,/)/p' "$source_root/lockstep")"
install_all_but() {
  stub dpkg-query "for p in \"\${@:3}\"; do
    case \$p in $1) ;; *) echo \"installed \$p\" ;; esac
  done"
}
install_all_but nothing
stub nproc 'echo 2'
stub id 'echo 0'
stub apt-get ''
stub cmake ''
stub ctest ''
cat >"$tmp/root/build/01_first/train" <<'PROGRAM'
#!/bin/bash
echo "in $PWD with $# arguments:" "$@"
exit 7
PROGRAM
chmod +x "$tmp/root/build/01_first/train"
cp "$tmp/root/build/01_first/train" "$tmp/root/build/01_first/bench"

launch "$tmp/root" ./lockstep --help
expect "--help succeeds" status_is 0
for word in train test 'run NN' mpirun build; do
  expect "--help names $word" says "^ *$word "
done
expect "--help lists the chapters" says '01_first'
launch "$tmp/elsewhere" ./link --help
expect "works through a link and from another folder" eval 'status_is 0 && says 01_first'

launch "$tmp/root" ./lockstep nonsense
expect "an unknown command exits with 2" status_is 2
expect "and says so in one line with its name" eval 'lines_are 1 && says nonsense'
launch "$tmp/root" ./lockstep run 77
expect "an unknown chapter exits with 2" status_is 2
expect "and names the ones that there are" eval 'lines_are 1 && says "77.*01_first"'

launch "$tmp/elsewhere" ./link train --name 'two words'
expect "train is run where the user stands, with its flags whole" \
  says "^in $tmp/elsewhere with 2 arguments: --name two words"
expect "its exit status is handed on" status_is 7
expect "the plain program line can be typed again" \
  says "^\\$ $tmp/root/build/01_first/train --name two..?words"
expect "it was configured first" called '^cmake --preset release'
expect "and built, without the tests" called '^cmake --build .* --target chapter_01 '
expect "nothing was installed, since nothing is missing" not called apt-get
launch "$tmp/root" ./lockstep run 01 bench --steps 3
expect "run takes another program of the chapter" says "^\\$ build/01_first/bench --steps 3"
launch "$tmp/root" ./lockstep run 01 nonsense
expect "but not one that is not there" eval 'status_is 2 && says nonsense'
launch "$tmp/root" ./lockstep test -R Name
expect "test hands its flags to ctest" called '^ctest --preset release .*-R Name'

# Ranks as processes: the mpirun line, with what Open MPI needs to be told on this machine.
stub mpirun '[[ $1 != --version ]] || echo "mpirun (Open MPI) 4.1.4"'
mkdir -p "$tmp/proc/self" "$tmp/proc/sys/kernel/yama"
ptrace_is() { # ptrace_is SCOPE SECCOMP
  echo "$1" >"$tmp/proc/sys/kernel/yama/ptrace_scope"
  printf 'Name:\tx\nSeccomp:\t%s\n' "$2" >"$tmp/proc/self/status"
}
line_is() { says "^\\$ $1\$" && called "^$1\$"; }
ptrace_is 0 0
launch "$tmp/root" ./lockstep run 01 bench -n 2 --steps 3
expect "Pitfall 128: as root, mpirun is told that this is meant; no core is bound (129)" line_is \
  'mpirun -n 2 --allow-run-as-root --oversubscribe --bind-to none build/01_first/bench --steps 3'
launch "$tmp/root" ./lockstep run 01 --steps 3 -n 4
expect "-n may come later, and more ranks than cores share them" line_is \
  'mpirun -n 4 --allow.* --mca mpi_yield_when_idle 1 build/01_first/train --steps 3'
launch "$tmp/root" ./lockstep mpirun -n 2 some/program --flag
expect "any program can be run so" line_is 'mpirun -n 2 --allow.* none some/program --flag'
stub id 'echo 1000'
launch "$tmp/root" ./lockstep run 01 -n 2
expect "no user but root is said to be root" line_is \
  'mpirun -n 2 --oversubscribe --bind-to none build/01_first/train'
for restricted in '2 0' '0 2'; do
  ptrace_is $restricted
  launch "$tmp/root" ./lockstep run 01 -n 2
  expect "where ptrace is restricted, nothing is read from another process" line_is \
    'mpirun .* --mca btl_vader_single_copy_mechanism none build/01_first/train'
done
ptrace_is 1 0
stub mpirun 'echo "HYDRA build details"'
launch "$tmp/root" ./lockstep run 01 -n 2
expect "another MPI gets none of Open MPI's options" line_is 'mpirun -n 2 build/01_first/train'
stub other 'exit 3'
mkdir "$tmp/other"
mv "$tmp/bin/other" "$tmp/other/mpirun"
echo "MPIEXEC_EXECUTABLE:FILEPATH=$tmp/other/mpiexec" >>"$tmp/root/build/CMakeCache.txt"
launch "$tmp/root" ./lockstep run 01 -n 2
expect "Pitfall 133: the mpirun is the one of the build's MPI" eval \
  'says "^\\$ $tmp/other/mpirun -n 2 " && status_is 3'
rm "$tmp/root/build/CMakeCache.txt" "$tmp/bin/mpirun"
launch "$tmp/root" ./lockstep run 01 -n 3
expect "without mpirun it says the way out" eval \
  'status_is 1 && says "needs mpirun.*--ranks 3"'
launch "$tmp/root" ./lockstep run 01 -n --steps
expect "-n wants a number" eval 'status_is 2 && says "not .--steps."'
stub id 'echo 0'

install_all_but 'ninja-build|libcli11-dev'
launch "$tmp/root" ./lockstep train
expect "root installs exactly what is missing" \
  called '^apt-get .*install -y --no-install-recommends ninja-build libcli11-dev$'
expect "after an update" called '^apt-get .*update$'
LOCKSTEP_NO_INSTALL=1 launch "$tmp/root" ./lockstep train
expect "LOCKSTEP_NO_INSTALL installs nothing and goes on" eval 'not called apt-get && status_is 7'
stub apt-get 'exit 100'
launch "$tmp/root" ./lockstep train
expect "when apt-get fails it says so and goes on" eval 'says "could not install" && status_is 7'

stub apt-get ''
stub id 'echo 1000'
refuses_with_one_line() {
  status_is 1 && says '^sudo apt-get update && sudo apt-get install -y ninja-build libcli11-dev$'
}
launch "$tmp/root" ./lockstep train
expect "a user without sudo gets the one line to type" refuses_with_one_line
expect "and nothing is run" not called '^(apt-get|cmake)'
stub sudo 'exit 1'
launch "$tmp/root" ./lockstep train
expect "so does one whose sudo asks for a password" refuses_with_one_line
stub sudo 'shift; exec "$@"'
launch "$tmp/root" ./lockstep train
expect "a user with sudo installs through it" \
  called '^sudo -n env .*apt-get .*install .*ninja-build libcli11-dev$'
stub id 'echo 0'
rm "$tmp/bin/apt-get"
launch "$tmp/root" ./lockstep train
expect "a machine without apt gets the line too" refuses_with_one_line

install_all_but nothing
touch "$tmp/root/build/build.ninja"
echo "CMAKE_HOME_DIRECTORY:INTERNAL=$tmp/root" >"$tmp/root/build/CMakeCache.txt"
launch "$tmp/root" ./lockstep build
expect "a configuration is kept" eval 'called "^cmake --build" && not called "^cmake --preset"'
launch "$tmp/root" ./lockstep build -DLOCKSTEP_CUDA=OFF
expect "until options are named" called '^cmake --preset release -DLOCKSTEP_CUDA=OFF$'
echo "CMAKE_HOME_DIRECTORY:INTERNAL=/another/place" >"$tmp/root/build/CMakeCache.txt"
launch "$tmp/root" ./lockstep build
expect "or the checkout was moved or copied" called '^cmake --preset release --fresh$'
stub cmake 'printf "noise\nCMake Warning at x:\n  no GPU here\n\nnoise\n"'
launch "$tmp/root" ./lockstep build
expect "a warning of CMake is shown, and no more" eval 'says "no GPU here" && not says noise'
stub cmake 'echo "error: this is why"; exit 1'
launch "$tmp/root" ./lockstep build
expect "a failing build shows why" eval 'says "this is why" && status_is 1'
expect "all packages are asked for at once" grep -qF -- " ${packages[*]}" "$calls"

[[ $failures == 0 ]] || exit 1
echo "all expectations of the launcher hold"
