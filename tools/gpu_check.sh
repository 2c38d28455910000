#!/usr/bin/env bash
# gpu_check.sh DIR [STAGE ...] - check and measure this checkout on a machine with a GPU; needs no network.
#
#   build      the CUDA extension, in place
#   precompile the doctor's Triton kernels, in one process for each core
#   probes     on Hopper, the building blocks of its kernels: TMA, barriers, the layouts of wgmma
#   tests      every other test file (the everyday tier; with FULL=1 the full one), each in its own process, because a
#              crash leaves a process without its GPU; the tests of the ops, which compile most, in 32 (96) parts
#   sanitizer  compute-sanitizer on small shapes: memory and barriers of every CUDA kernel, and of the Triton kernels
#              whose warps share data in shared memory; races of the same kernels, except the CUDA kernels of sm_90
#   compare    the same shapes on the CPU through csrc/emulator and on the GPU
#   doctor     every backend against float64: DIR/doctor.json
#   choices    which of the CUDA kernels' open choices is faster: DIR/choices.json
#   report     the benchmarks: DIR/report/
#   tune       `python -m fastattn tune`, which measures the fastest backend for each call: DIR/record.json
#
# Default: all stages. Each has a time limit and a log in DIR, and runs even if another failed. The summary comes last,
# also as DIR/summary.txt. Exit status 1 if a stage failed. Without a GPU this is a rehearsal: stages that need one are
# skipped, the others have four times the time.
#
# The limits are for 16 cores and an empty Triton cache, with about 1,100 kernels to compile. build, precompile and
# probes run together, 150 s at most; then tests, sanitizer, compare and doctor, 300 s (with FULL=1 570 s); then report,
# 205 s, tune, 60 s, and choices, 150 s: 15 minutes in all. For a limit of ten minutes use two calls:
#   gpu_check.sh DIR build precompile probes tests sanitizer compare doctor
#   gpu_check.sh DIR choices report tune
# What decides about kernels, alone: gpu_check.sh DIR build probes choices
#
# PYTHON names the interpreter (python). PYTHONPATH is kept, so packages may come from a folder:
#   python -m pip install --no-index --no-deps --target SITE WHEELS/*.whl
#   PYTHONPATH=SITE tools/gpu_check.sh DIR
set -uo pipefail

ALL="build precompile probes tests sanitizer compare doctor choices report tune"
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
export PATH=$PATH${CUDA_HOME:+:$CUDA_HOME/bin}:/usr/local/cuda/bin
cd "$ROOT" || exit 2
GPU=$("$PYTHON" -c "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')") || exit 2
PATIENCE=$([ -n "$GPU" ] && echo 1 || echo 4)
export GPU

skip() { echo "skipped: $1"; exit 77; }
needs_gpu() { [ -n "$GPU" ] || skip "needs a GPU"; }

build() { # without nvcc the build leaves the extension out; on a machine with a GPU that is a failure
  [ -z "$GPU" ] || export FASTATTN_FORCE_CUDA=1
  "$PYTHON" setup.py build_ext --inplace
}

precompile() {
  needs_gpu
  "$PYTHON" tools/precompile.py --seconds 110
}

test_limit() { [ -z "${FULL:-}" ] && echo 300 || echo 570; }

one_test_run() { # FILE or FOLDER, I/N; a test that runs for 100 seconds prints its stack
  local log=$DIR/tests/${1//\//_}.${2/\//_of_}.log status
  mkdir -p "$DIR/tests"
  local pytest=("$PYTHON" -m pytest -q -o faulthandler_timeout=100 ${FULL:+--full} --part "$2")
  timeout --foreground --kill-after=5 $(($(test_limit) - 10)) "${pytest[@]}" "$1" > "$log" 2>&1
  status=$?
  echo "exit $status  $1 $2: $(tail -n 1 "$log")"
  [ $status -eq 0 ] || [ $status -eq 5 ] # 5: no test
}

probes() {
  needs_gpu
  one_test_run tests/cuda/test_hopper.py 1/1
}

tests() {
  needs_gpu
  local parts=$([ -z "${FULL:-}" ] && echo 32 || echo 96)
  {
    seq -f "tests/ops %g/$parts" "$parts"
    find tests -name "test_*.py" ! -path "tests/ops/*" ! -name test_gpu_check.py ! -name test_hopper.py | sort |
      sed "s|$| 1/1|"
  } | xargs -P "$(($(nproc) < 16 ? $(nproc) : 16))" -L 1 bash -c 'one_test_run "$@" || exit 1' run
}

one_tool() {
  local log=$DIR/sanitizer_$1.log status
  local kernels=("$PYTHON" tools/compare_emulator.py --only device --backend cuda triton)
  [ "$1" != racecheck ] || kernels+=(--without-sm90) # it does not see what wgmma and TMA read
  compute-sanitizer --tool "$1" --error-exitcode 86 "${kernels[@]}" > "$log" 2>&1
  status=$?
  echo "exit $status  $1: $(tail -n 1 "$log")"
  [ $status -eq 0 ]
}

sanitizer() {
  needs_gpu
  command -v compute-sanitizer > /dev/null || skip "compute-sanitizer is not installed"
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # every tensor has its own allocation, so an access outside is found
  printf '%s\n' memcheck racecheck synccheck | xargs -P 3 -I{} bash -c 'one_tool {} || exit 1'
}

compare() { "$PYTHON" tools/compare_emulator.py; }

doctor() { "$PYTHON" -m fastattn doctor --json > "$DIR/doctor.json" && echo "every usable backend is within bounds"; }

choices() {
  needs_gpu
  "$PYTHON" tools/measure_choices.py --out "$DIR/choices.json"
}

report() { "$PYTHON" benchmarks/report.py --out "$DIR/report" --minutes 3 $([ -n "$GPU" ] || echo --quick); }

tune() { "$PYTHON" -m fastattn tune --out "$DIR/record.json" --minutes $([ -n "$GPU" ] && echo 0.8 || echo 0.1); }

export -f skip needs_gpu test_limit one_test_run one_tool build precompile probes tests sanitizer compare doctor choices \
  report tune

# run STAGE SECONDS: its output goes to DIR/STAGE.log, its outcome to DIR/STAGE.outcome
run() {
  [[ " $STAGES " == *" $1 "* ]] || return 0
  local start=$SECONDS outcome limit=$(($2 * PATIENCE))
  timeout --kill-after=5 "$limit" bash -c "$1" > "$DIR/$1.log" 2>&1
  case $? in
    0) outcome="passed" ;;
    77) outcome=$(tail -n 1 "$DIR/$1.log") ;;
    124 | 137) outcome="FAILED: over its limit of $limit s" ;;
    *) outcome="FAILED" ;;
  esac
  echo "$outcome ($((SECONDS - start)) s; $1.log)" > "$DIR/$1.outcome"
  echo "$1: $(cat "$DIR/$1.outcome")"
}

echo "fastattn on ${GPU:-a machine without a GPU}: $STAGES -> $DIR"
# First what needs cores and hardly a GPU. Then the stages that share both. The report has the machine to itself.
run build 150 &
run precompile 120 &
run probes 120 &
wait
run tests "$(test_limit)" &
run sanitizer 300 &
run compare 300 &
run doctor 300 &
wait
run choices 150
run report 205
run tune 60

summary() {
  printf '\n%s\n' "Summary: ${GPU:-no GPU}"
  for name in $STAGES; do
    printf '%-10s %s\n' "$name" "$(cat "$DIR/$name.outcome")"
    case $name in probes | tests | sanitizer)
      grep -hs "^exit" "$DIR/$name.log" | grep -v "^exit [05] " ;; # what failed
    esac
  done
}
summary | tee "$DIR/summary.txt"
! grep -q "^[a-z]* *FAILED" "$DIR/summary.txt"
