#!/usr/bin/env bash
# gpu_check.sh DIR [--again] [STAGE ...] - check and measure this checkout on a machine with a GPU; needs no network.
#
#   build      the CUDA extension, in place
#   precompile the doctor's Triton kernels, in a process a core
#   gates      what the compilers make of every kernel, against benchmarks/results/compiled_kernels.json
#   tests      every other test file on the device, in processes of their own, so that a crash stays in its file
#   sanitizer  compute-sanitizer (memory, races, barriers) over every CUDA kernel on small shapes
#   compare    the same shapes on the CPU through csrc/host and on the GPU
#   doctor     every backend against float64: DIR/doctor.json
#   report     the benchmarks: DIR/report/
#
# All of them by default, in under nine minutes. Each stage has a time limit and a log in DIR and runs whatever happened
# to the others; the summary comes last, and is DIR/summary.txt. Exit status 1 if a stage failed. A stage or test file
# that passed is not run again for the same code, GPU and DIR, unless --again is given. Without a GPU it is a rehearsal:
# stages that need one say so, the others run, with four times the time.
#
# PYTHON names the interpreter (python). PYTHONPATH is kept, so packages may come from a folder:
#   python -m pip install --no-index --no-deps --target SITE WHEELS/*.whl
#   PYTHONPATH=SITE benchmarks/gpu_check.sh DIR
set -uo pipefail

ALL="build precompile gates tests sanitizer compare doctor report"
usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
[ $# -ge 1 ] && [[ $1 != -* ]] || usage
ROOT=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1" && DIR=$(cd "$1" && pwd) || exit 2
shift
AGAIN=
[ "${1:-}" != --again ] || { AGAIN=1; shift; }
STAGES=${*:-$ALL}
for name in $STAGES; do
  [[ " $ALL " == *" $name "* ]] || { echo "no such stage: $name" >&2; usage; }
done
export PYTHON=${PYTHON:-python} PYTHONPATH=$ROOT:$ROOT/benchmarks${PYTHONPATH:+:$PYTHONPATH} DIR AGAIN
export PATH=$PATH${CUDA_HOME:+:$CUDA_HOME/bin}:/usr/local/cuda/bin
cd "$ROOT" || exit 2

GPU=$("$PYTHON" -c "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')") || exit 2
JOBS=$(($(nproc) < 16 ? $(nproc) : 16)) SHARDS=$(($(nproc) < 8 ? 1 : 4)) PATIENCE=1
[ -n "$GPU" ] || PATIENCE=4
# What a stage passed for: the sources as they lie here, and the GPU.
CODE=$(find fastattn kernels csrc benchmarks tests examples setup.py pyproject.toml -type f \
  \( -name "*.py" -o -name "*.cu*" -o -name "*.h" -o -name "*.cpp" -o -name "*.sh" -o -name "*.toml" \) -print0 |
  sort -z | xargs -0 cat | cat - <(echo "$GPU") | sha256sum | cut -c1-16)
export GPU JOBS SHARDS PATIENCE CODE

skip() { echo "$1" > "$DIR/$STAGE.skipped"; exit 77; } # 77: not run, for a reason
needs_gpu() { [ -n "$GPU" ] || skip "needs a GPU"; }
within() { timeout --foreground --kill-after=5 "$(($1 * PATIENCE))" "${@:2}"; } # inside a stage, whose own limit reaches in
passed() { echo "$CODE" > "$1.passed"; }
passed_before() { [ -z "$AGAIN" ] && [ "$(cat "$1.passed" 2> /dev/null)" = "$CODE" ]; }

build() { # without nvcc the build says so and leaves the extension out; on a machine with a GPU that is a failure
  [ -z "$GPU" ] || export FASTATTN_FORCE_CUDA=1
  "$PYTHON" setup.py build_ext --inplace
}

gates() { "$PYTHON" -m pytest -q tests/compile tests/cuda/test_compile*.py tests/test_compiled_kernels.py; }

precompile() {
  needs_gpu
  "$PYTHON" benchmarks/precompile.py --seconds 110
}

one_test_job() { # FILE SHARD
  local log=$DIR/tests/${1//\//_}-${2/\//_of_}.log status
  if passed_before "$log"; then
    echo "exit 0  $1 $2: passed before"
    return
  fi
  within 160 "$PYTHON" -m pytest -q -p pytest_shard --shard "$2" "$1" > "$log" 2>&1
  status=$?
  echo "exit $status  $1 $2: $(tail -n 1 "$log")"
  [ $status -eq 0 ] || [ $status -eq 5 ] || return 1 # 5: no test
  passed "$log"
}

test_jobs() { # one a line; what compiles Triton kernels in many forms is cut into shards
  find tests -name "test_*.py" | sort | while read -r file; do
    case $file in
      tests/compile/* | tests/cuda/test_compile*.py | tests/test_compiled_kernels.py | tests/test_gpu_check.py) ;;
      tests/ops/* | tests/nn/* | tests/models/*) for i in $(seq $SHARDS); do echo "$file $i/$SHARDS"; done ;;
      *) echo "$file 1/1" ;;
    esac
  done
}

tests() {
  needs_gpu
  mkdir -p "$DIR/tests"
  test_jobs | xargs -P "$JOBS" -L 1 bash -c 'one_test_job "$@" || exit 1' _
}

one_tool() {
  local log=$DIR/sanitizer_$1.log
  compute-sanitizer --tool "$1" --error-exitcode 86 "$PYTHON" benchmarks/host_device.py --only device > "$log" 2>&1
  local status=$?
  echo "exit $status  $1: $(tail -n 1 "$log")"
  [ $status -eq 0 ] || return 1
}

sanitizer() {
  needs_gpu
  command -v compute-sanitizer > /dev/null || skip "compute-sanitizer is not installed"
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # every tensor its own allocation, so that a step outside is seen
  printf '%s\n' memcheck racecheck synccheck | xargs -P 3 -I{} bash -c 'one_tool {} || exit 1'
}

compare() { "$PYTHON" benchmarks/host_device.py; }

doctor() { "$PYTHON" -m fastattn doctor --json > "$DIR/doctor.json" && echo "every usable backend is within bounds"; }

report() {
  if [ -n "$GPU" ]; then
    "$PYTHON" benchmarks/report.py --out "$DIR/report" --minutes 3
  else
    "$PYTHON" benchmarks/report.py --out "$DIR/report" --quick --minutes 3
  fi
}
export -f skip needs_gpu within passed passed_before one_test_job test_jobs one_tool
export -f build gates precompile tests sanitizer compare doctor report

# run STAGE SECONDS: into DIR/STAGE.log, and what came of it into DIR/STAGE.outcome
run() {
  [[ " $STAGES " == *" $1 "* ]] || return 0
  local start=$SECONDS outcome limit=$(($2 * PATIENCE))
  if passed_before "$DIR/$1" && { [ "$1" != build ] || compgen -G "fastattn/_C*.so" > /dev/null; }; then
    outcome="passed before"
  else
    STAGE=$1 timeout --kill-after=5 "$limit" bash -c "$1" > "$DIR/$1.log" 2>&1
    case $? in
      0) outcome="passed" && passed "$DIR/$1" ;;
      77) outcome="skipped: $(cat "$DIR/$1.skipped")" ;;
      124 | 137) outcome="FAILED: over its limit of $limit s" ;;
      *) outcome="FAILED" ;;
    esac
  fi
  echo "$outcome ($((SECONDS - start)) s; $1.log)" > "$DIR/$1.outcome"
  echo "$1: $(cat "$DIR/$1.outcome")"
}

echo "fastattn on ${GPU:-a machine without a GPU}, code $CODE: $STAGES -> $DIR"
# Compiling needs cores and no GPU. Then come those that share both; the report has the machine to itself.
run build 150 &
run precompile 120 &
wait
run gates 165 &
run tests 165 &
run sanitizer 165 &
run compare 165 &
run doctor 165 &
wait
run report 205

summary() {
  printf '\n%s\n' "Summary: ${GPU:-no GPU}, code $CODE"
  for name in $STAGES; do
    printf '%-10s %s\n' "$name" "$(cat "$DIR/$name.outcome")"
    case $name in tests | sanitizer)
      grep -hs "^exit" "$DIR/$name.log" | grep -v "^exit [05] " ;; # what failed
    esac
  done
}
summary | tee "$DIR/summary.txt"
! grep -q "^[a-z]* *FAILED" "$DIR/summary.txt"
