#!/usr/bin/env bash
# gpu_check.sh DIR [STAGE ...] - check and measure this checkout on a machine with a GPU; needs no network.
#
# Stages, in this order, all by default (docs/gpu.md describes each):
#   hello build precompile probes graphs doctor tests report before train sanitizer compare rest
#
# Each has a log in DIR and a time limit for 16 cores and an empty Triton cache, and runs even if another failed; only
# after a bad `hello` none does. The summary comes last, also as DIR/summary.txt. Exit status 1 if a stage failed. Without
# a GPU this is a rehearsal: stages that need one are skipped, the others have four times the time.
#
# FULL=1 runs the full tier of the tests. TEXT is a folder as the training example's --data takes. MATCH chooses what
# `report` measures (all), and `before` (the CUDA kernels), in this checkout and in the older one that BEFORE names.
# LIMIT is the number of seconds after which everything has ended (3600). After each stage DIR is packed into ARCHIVE
# (DIR.tar.gz), so a run that is cut off loses one stage at most. docs/gpu.md has calls of less than ten minutes.
# PYTHON names the interpreter (python, or python3). PYTHONPATH is kept, so packages may come from a folder.
set -uo pipefail

DEADLINE=$((EPOCHSECONDS + ${LIMIT:-3600} - 15)) # 15: a stage that ignores INT is killed after 10
ALL="hello build precompile probes graphs doctor tests report before train sanitizer compare rest"
usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
[ $# -ge 1 ] && [[ $1 != -* ]] || usage
ROOT=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1" && DIR=$(cd "$1" && pwd) || exit 2
shift
STAGES=${*:-$ALL}
for name in $STAGES; do
  [[ " $ALL " == *" $name "* ]] || { echo "no such stage: $name" >&2; usage; }
done
ARCHIVE=$(realpath "${ARCHIVE:-$DIR.tar.gz}") TEXT=${TEXT:+$(realpath -m "$TEXT")} BEFORE=${BEFORE:+$(realpath "$BEFORE")}
PYTHON=${PYTHON:-$(command -v python || command -v python3)}
export PYTHON PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} DIR TEXT BEFORE MATCH
export PATH=$PATH${CUDA_HOME:+:$CUDA_HOME/bin}:/usr/local/cuda/bin
unset NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE # with them, float32 on the GPU is not float32
cd "$ROOT" || exit 2
GPU=$("$PYTHON" -c "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')") || exit 2
PATIENCE=$([ -n "$GPU" ] && echo 1 || echo 4)
export COLUMNS=200 # pytest cuts the messages of its summary to this
# Matplotlib lists the fonts of a machine at its first plot, in 10 to 20 s that the report does not have.
export GPU MPLCONFIGDIR=${TMPDIR:-/tmp}/fastattn-matplotlib
[[ " $STAGES " != *" report "* ]] || "$PYTHON" -c "import matplotlib.pyplot" > /dev/null 2>&1 &

skip() { echo "skipped: $1"; exit 77; }
needs_gpu() { [ -n "$GPU" ] || skip "needs a GPU"; }
seconds_left() { echo $((STAGE_END - EPOCHSECONDS - $1)); } # until the stage ends, without its last $1 seconds

hello() {
  if [ -n "$GPU" ]; then "$PYTHON" tools/hello_gpu.py; else TRITON_INTERPRET=1 "$PYTHON" tools/hello_gpu.py; fi
}

build() { # without nvcc the build leaves the extension out; on a machine with a GPU that is a failure
  [ -z "$GPU" ] || export FASTATTN_FORCE_CUDA=1
  "$PYTHON" setup.py build_ext --inplace
}

precompile() {
  needs_gpu
  nice -n 10 "$PYTHON" tools/precompile.py --seconds "$(seconds_left 10)"
}

doctor() {
  printf '%s\n' triton cuda aten reference | xargs -P 4 -I{} bash -c 'one_backend {} || exit 1'
}

one_backend() {
  "$PYTHON" -m fastattn doctor --backend "$1" --json > "$DIR/doctor_$1.json" 2> "$DIR/doctor_$1.log"
  echo "exit $?  $1: $(tail -n 1 "$DIR/doctor_$1.log")" | tee "$DIR/doctor_$1.exit"
  grep -q "^exit 0 " "$DIR/doctor_$1.exit"
}

test_log() { echo "$DIR/tests/${1//\//_}.${2/\//_of_}.log"; }

# FILE or FOLDER, I/N. INT, so that pytest prints the failures that it has found. A test that runs for 100 seconds prints
# its stack.
one_test_run() {
  local log status limit
  log=$(test_log "$@") limit=$(seconds_left 20)
  rm -f "$log" # of an earlier call
  [ "$limit" -gt 0 ] || return 1 # the summary names it
  local pytest=("$PYTHON" -m pytest -q --only-gpu -o faulthandler_timeout=100 ${FULL:+--full} --part "$2")
  timeout --foreground --signal=INT --kill-after=15 "$limit" "${pytest[@]}" "$1" > "$log" 2>&1
  status=$?
  echo "exit $status  $1 $2: $(tail -n 1 "$log")"
  [ $status -eq 0 ] || [ $status -eq 5 ] # 5: no test
}

run_tests() { # STAGE: the runs in standard input, one for each core
  mkdir -p "$DIR/tests"
  tee "$DIR/$1.list" | xargs -P "$(nproc)" -L 1 bash -c 'one_test_run "$@" || exit 1' run
}

probes() {
  needs_gpu
  export OMP_NUM_THREADS=1
  echo tests/cuda/test_hopper.py 1/1 | nice -n 10 bash -c "run_tests probes"
}

graphs() {
  needs_gpu
  find tests -name "test_*.py" | grep graph | sort | sed "s|$| 1/1|" | run_tests graphs
}

FOLDERS="generate cuda ops masks nn models integrations" # what a GPU can change; first what never ran at all

tests() {
  needs_gpu
  local parts=$([ -z "${FULL:-}" ] && echo 16 || echo 96)
  for folder in $FOLDERS; do
    if [ "$folder" = ops ]; then
      seq -f "tests/ops %g/$parts" "$parts"
    else
      find "tests/$folder" -name "test_*.py" ! -name test_hopper.py ! -name "*graph*" | sort | sed "s|$| 1/1|"
    fi
  done | run_tests tests
}

rest() {
  needs_gpu
  find tests -name "test_*.py" ! -name test_gpu_check.py | grep -vE "^tests/(graphs|${FOLDERS// /|})/" | sort |
    sed "s|$| 1/1|" | run_tests rest
}

report() {
  local minutes=$(awk "BEGIN { print $(seconds_left 25) / 60 }")
  "$PYTHON" benchmarks/report.py --out "$DIR/report" --minutes "$minutes" \
    --match "${MATCH:-}" $([ -n "$GPU" ] || echo --quick)
}

before() {
  needs_gpu
  [ -n "${BEFORE:-}" ] || skip "BEFORE names no older checkout"
  (cd "$BEFORE" && FASTATTN_FORCE_CUDA=1 "$PYTHON" setup.py build_ext --inplace) || return 1
  local minutes=$(awk "BEGIN { print $(seconds_left 25) / 240 }") # of each of four runs
  for turn in 1 2; do
    for tree in "$BEFORE" "$ROOT"; do
      PYTHONPATH=$tree:$PYTHONPATH "$PYTHON" "$tree/benchmarks/report.py" --only attention add_layer_norm \
        --match "${MATCH:-: cuda}" --minutes "$minutes" \
        --out "$DIR/before/$([ "$tree" = "$ROOT" ] && echo after || echo before)_$turn" || return 1
    done
  done
}

train() {
  local bad=0 task="$([ -n "$GPU" ] && echo --amp --steps 400 || echo --steps 40)${TEXT:+ --data $TEXT}"
  one_training fused || bad=1
  one_training graph --graph || bad=1
  one_training shadow --shadow 20 || bad=1
  FASTATTN_BACKEND=reference one_training reference || bad=1
  return $bad
}

one_training() { # NAME OPTION ..: of train's task. Checkpoints are too large for DIR
  local log=$DIR/train_$1.log out status
  out=$(mktemp -d)
  "$PYTHON" examples/train_translation.py $task --out "$out" "${@:2}" > "$log" 2>&1
  status=$?
  rm -rf "$out"
  ! grep -qE "RuntimeWarning: step [0-9]+, " "$log" || status=1 # shadow warns of what differs
  echo "exit $status  $1: $(grep "tokens/s" "$log" | tail -n 2 | xargs -d "\n" printf "%s; ")"
  [ $status -eq 0 ]
}

sanitizer() { # one tool at a time, the most telling first
  needs_gpu
  # Only fastattn's kernels, by their mangled names: those in C++, and Triton's.
  export SANITIZER="compute-sanitizer --error-exitcode 86 --kernel-name regex=fastattn|^[a-z_]+_kernel$"
  $SANITIZER "$PYTHON" -c "import torch; torch.ones(9, device='cuda').cumsum(0).tolist()" > "$DIR/sanitizer.log" 2>&1 ||
    skip "compute-sanitizer does not work here: $(grep -m 1 -iE "error|not (supported|found)" "$DIR/sanitizer.log")"
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # every tensor has its own allocation, so an access outside is found
  printf '%s\n' memcheck synccheck racecheck | xargs -I{} bash -c 'one_tool {} || exit 1'
}

one_tool() {
  local log=$DIR/sanitizer_$1.log status limit
  limit=$(seconds_left 10)
  [ "$limit" -gt 0 ] || { echo "exit 124  $1: not started"; return 1; }
  local kernels=("$PYTHON" tools/compare_emulator.py --only device --backend cuda triton)
  [ "$1" != racecheck ] || kernels+=(--without-sm90) # it does not see what wgmma and TMA read
  timeout --foreground --signal=INT --kill-after=5 "$limit" $SANITIZER --tool "$1" "${kernels[@]}" > "$log" 2>&1
  status=$?
  if grep -q "Internal Sanitizer Error" "$log"; then # of the tool: racecheck of CUDA 13.0 on an H200
    echo "skipped  $1: the tool itself fails here"
    return 0
  fi
  echo "exit $status  $1: $(tail -n 1 "$log")"
  [ $status -eq 0 ]
}

compare() { "$PYTHON" tools/compare_emulator.py; }

export FOLDERS
export -f skip needs_gpu seconds_left test_log one_test_run run_tests one_backend one_training one_tool $ALL

archive() { # a file that changes meanwhile is packed as it was
  tar -C "$(dirname "$DIR")" -czf "$ARCHIVE.$BASHPID" "$(basename "$DIR")" 2> /dev/null
  mv "$ARCHIVE.$BASHPID" "$ARCHIVE"
}

# run STAGE SECONDS: its output goes to DIR/STAGE.log, its outcome to DIR/STAGE.outcome. INT ends it, because pytest, the
# doctor and report then keep what they have found.
run() {
  [[ " $STAGES " == *" $1 "* ]] || return 0
  local start=$SECONDS outcome limit=$(($2 * PATIENCE)) left=$((DEADLINE - EPOCHSECONDS))
  [ "$left" -ge "$limit" ] || limit=$left
  if [ "$limit" -lt 5 ]; then
    outcome="FAILED: not started, because no time was left"
  else
    STAGE_END=$((EPOCHSECONDS + limit)) timeout --signal=INT --kill-after=10 "$limit" bash -c "$1" > "$DIR/$1.log" 2>&1
    case $? in
      0) outcome="passed" ;;
      77) outcome=$(tail -n 1 "$DIR/$1.log") ;;
      124 | 137) outcome="FAILED: over its limit of $limit s" ;;
      *) outcome="FAILED" ;;
    esac
  fi
  echo "$outcome ($((SECONDS - start)) s; $1.log)" > "$DIR/$1.outcome"
  echo "$1: $(cat "$DIR/$1.outcome")"
  archive
}

echo "fastattn on ${GPU:-a machine without a GPU}: $STAGES -> $DIR"
rm -f "$DIR"/*.outcome "$DIR"/*.list # of an earlier call
run hello 90
if ! grep -qs "^FAILED" "$DIR/hello.outcome"; then
  # First what needs cores and hardly a GPU. What is measured has the machine to itself.
  run build 150 &
  run precompile 120 &
  run probes 120 &
  wait
  run graphs 150 &
  run doctor 300 &
  run tests "$([ -z "${FULL:-}" ] && echo 400 || echo 1500)" &
  wait
  run report 205
  run before 600
  run train 240
  run sanitizer 300
  run compare 150 &
  run rest 300 &
  wait
fi

# STAGE: of its list, the runs with a bad exit status, each with the tests that failed in it, and those without one.
not_passed() {
  [ -f "$DIR/$1.list" ] || { grep -s "^exit" "$DIR/$1.log" | grep -v "^exit 0 "; return; }
  while read -r file part; do
    local log line
    log=$(test_log "$file" "$part") line=$(grep "^exit [0-9]* *$file $part:" "$DIR/$1.log")
    case $line in
      "exit 0 "* | "exit 5 "*) ;;
      "") [ -f "$log" ] && echo "not finished  $file $part" || echo "not started  $file $part" ;;
      *) echo "$line" && grep -hE "^(FAILED|ERROR) " "$log" | head -n 20 | cut -c 1-200 | sed "s/^/    /" ;;
    esac
  done < "$DIR/$1.list"
}

summary() {
  printf '\n%s\n' "Summary: ${GPU:-no GPU}"
  for name in $STAGES; do
    printf '%-10s %s\n' "$name" "$(cat "$DIR/$name.outcome" 2> /dev/null || echo "not run, because hello failed")"
    not_passed "$name"
  done
}
summary | tee "$DIR/summary.txt"
archive
! grep -q "^[a-z]* *FAILED" "$DIR/summary.txt"
