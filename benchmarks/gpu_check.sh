#!/usr/bin/env bash
# gpu_check.sh DIR [STAGE ...] - check and measure this checkout on a machine with a GPU; needs no network.
#
#   build      the CUDA extension, in place
#   tests      every test file on the device, each in a process of its own, so that a crash stays in its file
#   sanitizer  compute-sanitizer (memory, races) over the CUDA kernels on the doctor's small problems
#   doctor     every backend against float64: DIR/doctor.json
#   bench      the benchmarks: DIR/bench_*.json and tables
#
# All of them by default, in under nine minutes. Each stage has a time limit and a log in DIR and runs whatever happened
# to the others; the summary comes last. Exit status 1 if a stage failed. Without a GPU, tests, sanitizer and the full
# benchmarks are skipped and say so, and the rest is run on the CPU: a rehearsal.
#
# PYTHON names the interpreter (python). PYTHONPATH is kept, so packages may come from a folder:
#   python -m pip install --no-index --no-deps --target SITE WHEELS/*.whl
#   PYTHONPATH=SITE benchmarks/gpu_check.sh DIR
set -uo pipefail

ALL="build tests sanitizer doctor bench"
usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
[ $# -ge 1 ] && [[ $1 != -* ]] || usage
ROOT=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1" && DIR=$(cd "$1" && pwd) || exit 2
shift
STAGES=${*:-$ALL}
for name in $STAGES; do
  [[ " $ALL " == *" $name "* ]] || { echo "no such stage: $name" >&2; usage; }
done
export PYTHON=${PYTHON:-python} PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} DIR
cd "$ROOT" || exit 2

GPU=$("$PYTHON" -c "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')") || exit 2
JOBS=$(($(nproc) < 8 ? $(nproc) : 8)) DEVICE=cuda QUICK=
[ -n "$GPU" ] || DEVICE=cpu QUICK=--quick
export GPU JOBS DEVICE QUICK

skip() { echo "$1" > "$DIR/$STAGE.skipped"; exit 77; } # 77: not run, for a reason
needs_gpu() { [ -n "$GPU" ] || skip "needs a GPU"; }
within() { timeout --foreground --kill-after=5 "$@"; } # a limit inside a stage; the stage's own reaches through it

build() { # without nvcc the build says so and leaves the extension out; on a machine with a GPU that is a failure
  [ -z "$GPU" ] || export FASTATTN_FORCE_CUDA=1
  "$PYTHON" setup.py build_ext --inplace
}

one_test_file() {
  local log=$DIR/tests/${1//\//_}.log status
  within 180 "$PYTHON" -m pytest -q "$1" > "$log" 2>&1
  status=$?
  echo "exit $status  $1: $(tail -n 1 "$log")"
  [ $status -eq 0 ] || [ $status -eq 5 ] # 5: the file has no test
}

tests() {
  needs_gpu
  mkdir -p "$DIR/tests"
  find tests -name "test_*.py" | sort | xargs -P "$JOBS" -I{} bash -c 'one_test_file "{}" || exit 1'
}

sanitizer() {
  needs_gpu
  command -v compute-sanitizer > /dev/null || skip "compute-sanitizer is not installed"
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # every tensor its own allocation, so that a step outside is seen
  for tool in memcheck racecheck; do
    compute-sanitizer --tool $tool --error-exitcode 86 "$PYTHON" -m fastattn doctor --backend cuda || return 1
  done
}

doctor() {
  "$PYTHON" -m fastattn doctor --json > "$DIR/doctor.json" && echo "every usable backend is within bounds"
}

bench() {
  local failed=0
  bench_one() { within "$2" "$PYTHON" benchmarks/bench_$1.py --device $DEVICE $QUICK --out "$DIR/bench_$1.json" || failed=1; }
  bench_one transformer 60
  bench_one attention 80
  bench_one add_layer_norm 45
  bench_one feed_forward 45
  return $failed
}
export -f skip needs_gpu within build one_test_file tests sanitizer doctor bench

# run STAGE SECONDS: into DIR/STAGE.log, and what came of it into DIR/STAGE.outcome
run() {
  [[ " $STAGES " == *" $1 "* ]] || return 0
  local start=$SECONDS outcome
  STAGE=$1 timeout --kill-after=5 "$2" bash -c "$1" > "$DIR/$1.log" 2>&1
  case $? in
    0) outcome="passed" ;;
    77) outcome="skipped: $(cat "$DIR/$1.skipped")" ;;
    124 | 137) outcome="FAILED: over its limit of $2 s" ;;
    *) outcome="FAILED" ;;
  esac
  echo "$outcome ($((SECONDS - start)) s; $1.log)" > "$DIR/$1.outcome"
  echo "$1: $(cat "$DIR/$1.outcome")"
}

echo "fastattn on ${GPU:-a machine without a GPU}: $STAGES -> $DIR"
run build 110
# Compiling Triton kernels is most of these three, so they share the cores; the benchmarks have the machine to themselves.
run tests 190 &
run sanitizer 190 &
run doctor 190 &
wait
run bench 230

printf '\n%s\n' "Summary"
failed=0
for name in $STAGES; do
  printf '%-10s %s\n' "$name" "$(cat "$DIR/$name.outcome")"
  ! grep -q ^FAILED "$DIR/$name.outcome" || failed=1
  [ "$name" != tests ] || grep "^exit" "$DIR/tests.log" | grep -v "^exit [05] " # the files that failed
done
exit $failed
