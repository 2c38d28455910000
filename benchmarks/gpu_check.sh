#!/usr/bin/env bash
# gpu_check.sh DIR [STAGE ...] - check and measure this checkout on a machine with a GPU; needs no network.
#
#   build      the CUDA extension, in place
#   precompile the doctor's Triton kernels, in a process a core
#   probes     on Hopper, what its kernels are made of: TMA, barriers, the layouts of wgmma
#   tests      every other test file (the everyday tier; with FULL=1 the full one), each in a process of its own,
#              because a crash leaves a process without its GPU
#   sanitizer  compute-sanitizer (memory, races, barriers) over every CUDA kernel on small shapes
#   compare    the same shapes on the CPU through csrc/host and on the GPU
#   doctor     every backend against float64: DIR/doctor.json
#   report     the benchmarks: DIR/report/
#   tune       `python -m fastattn tune`: which backend is fastest for which calls: DIR/record.json
#
# All of them by default, in under ten minutes. Each stage has a time limit and a log in DIR and runs whatever happened
# to the others; the summary comes last, and is DIR/summary.txt. Exit status 1 if a stage failed. Without a GPU it is a
# rehearsal: stages that need one are skipped, the others run with four times the time.
#
# PYTHON names the interpreter (python). PYTHONPATH is kept, so packages may come from a folder:
#   python -m pip install --no-index --no-deps --target SITE WHEELS/*.whl
#   PYTHONPATH=SITE benchmarks/gpu_check.sh DIR
set -uo pipefail

ALL="build precompile probes tests sanitizer compare doctor report tune"
usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
[ $# -ge 1 ] && [[ $1 != -* ]] || usage
ROOT=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1" && DIR=$(cd "$1" && pwd) || exit 2
shift
STAGES=${*:-$ALL}
for name in $STAGES; do
  [[ " $ALL " == *" $name "* ]] || { echo "no such stage: $name" >&2; usage; }
done
export PYTHON=${PYTHON:-python} PYTHONPATH=$ROOT:$ROOT/benchmarks${PYTHONPATH:+:$PYTHONPATH} DIR
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
  "$PYTHON" benchmarks/precompile.py --seconds 110
}

one_test_file() { # a test that takes 100 seconds says where it is; after 160 they are all ended
  local log=$DIR/tests/${1//\//_}.log status
  mkdir -p "$DIR/tests"
  local pytest=("$PYTHON" -m pytest -q -o faulthandler_timeout=100 ${FULL:+--full})
  timeout --foreground --kill-after=5 160 "${pytest[@]}" "$1" > "$log" 2>&1
  status=$?
  echo "exit $status  $1: $(tail -n 1 "$log")"
  [ $status -eq 0 ] || [ $status -eq 5 ] # 5: no test
}

probes() {
  needs_gpu
  one_test_file tests/cuda/test_hopper.py
}

tests() {
  needs_gpu
  find tests -name "test_*.py" ! -name test_gpu_check.py ! -name test_hopper.py | sort |
    xargs -P "$(($(nproc) < 16 ? $(nproc) : 16))" -I{} bash -c 'one_test_file {} || exit 1'
}

one_tool() {
  local log=$DIR/sanitizer_$1.log status
  compute-sanitizer --tool "$1" --error-exitcode 86 "$PYTHON" benchmarks/host_device.py --only device > "$log" 2>&1
  status=$?
  echo "exit $status  $1: $(tail -n 1 "$log")"
  [ $status -eq 0 ]
}

sanitizer() {
  needs_gpu
  command -v compute-sanitizer > /dev/null || skip "compute-sanitizer is not installed"
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # every tensor its own allocation, so that a step outside is noticed
  printf '%s\n' memcheck racecheck synccheck | xargs -P 3 -I{} bash -c 'one_tool {} || exit 1'
}

compare() { "$PYTHON" benchmarks/host_device.py; }

doctor() { "$PYTHON" -m fastattn doctor --json > "$DIR/doctor.json" && echo "every usable backend is within bounds"; }

report() { "$PYTHON" benchmarks/report.py --out "$DIR/report" --minutes 3 $([ -n "$GPU" ] || echo --quick); }

tune() { "$PYTHON" -m fastattn tune --out "$DIR/record.json" --minutes $([ -n "$GPU" ] && echo 0.8 || echo 0.1); }

export -f skip needs_gpu one_test_file one_tool build precompile probes tests sanitizer compare doctor report tune

# run STAGE SECONDS: its output into DIR/STAGE.log, what came of it into DIR/STAGE.outcome
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
# Compiling needs cores and hardly a GPU. Then come those that share both; the report has the machine to itself.
run build 150 &
run precompile 120 &
run probes 120 &
wait
run tests 165 &
run sanitizer 165 &
run compare 165 &
run doctor 165 &
wait
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
