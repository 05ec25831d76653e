#!/usr/bin/env bash
# transformers: several rows in one sequence, whose position_ids begin again at 0.
# Expected: rows are masked from each other, as with flash attention; or they never are.
# So: they are masked where there is neither a cache nor an attention_mask. A model in training
# makes a cache, and gradient checkpointing turns the cache off: a switch for memory changes the
# logits.
set -euo pipefail
PINS=(transformers==5.19.0 torch==2.13.0 numpy==2.3.5)
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
"${PYTHON:-python3}" -m venv "$FOLDER/venv"
cd "$FOLDER"
export PATH=$FOLDER/venv/bin:$PATH PYTHONWARNINGS=ignore
unset PYTHONPATH
pip install --quiet --no-compile "${PINS[@]}" 2>pip.txt || { cat pip.txt >&2; exit 1; }
python --version
pip freeze | grep -i "$(printf '^%s==\n' "${PINS[@]%%==*}")"
export HF_HOME=$FOLDER/hub
python - <<'END' 2>log.txt || { cat log.txt >&2; exit 1; }
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

torch.manual_seed(0)
model = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3)).train()
one, other = torch.arange(2, 12), torch.arange(30, 42)
places = torch.cat([torch.arange(10), torch.arange(12)])
right = model(other.unsqueeze(0)).logits[0]  # the second row by itself
inputs = {"input_ids": torch.cat([one, other]).unsqueeze(0), "position_ids": places.unsqueeze(0)}


def away(**options):
    """How far the second row's logits are from those of the row by itself."""
    return (model(**inputs, **options).logits[0, 10:] - right).abs().max().item()


found = {"as it is": away()}
found["with a mask of ones"] = away(use_cache=False, attention_mask=torch.ones(1, 22))
found["without a cache"] = away(use_cache=False)
model.gradient_checkpointing_enable()
found["with gradient checkpointing"] = away()
for name, value in found.items():
    print(f"{name}: the second row's logits are {value:.1f} away")
assert [value > 0.1 for value in found.values()] == [True, True, False, False], (
    "the behaviour changed")
END

# Seen on 29 November 2026:
#   Python 3.11.7
#   numpy==2.3.5
#   torch==2.13.0+cpu
#   transformers==5.19.0
#   as it is: the second row's logits are 6.2 away
#   with a mask of ones: the second row's logits are 6.2 away
#   without a cache: the second row's logits are 0.0 away
#   with gradient checkpointing: the second row's logits are 0.0 away
