#!/usr/bin/env bash
# TRL: a reward of NaN.
# Expected: it spoils the update or is refused, or, since a reward of None is written as NaN inside,
# it counts as 0 in the sum of the rewards.
# So: the completion is left out of its group in silence, if no other reward function scored it. A
# warning calls it None.
set -euo pipefail
PINS=(trl==1.16.0 transformers==5.19.0 torch==2.13.0 datasets==5.2.0 numpy==2.3.5)
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
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(["<eos>", *letters])}, []))
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<eos>")


def first_of_group_is_nan(completions, **others):
    return [float("nan"), *[1.0] * (len(completions) - 1)]


torch.manual_seed(0)
model = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=257, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=1, num_key_value_heads=1, eos_token_id=0, pad_token_id=0))
trainer = GRPOTrainer(
    model, first_of_group_is_nan,
    args=GRPOConfig("run", use_cpu=True, bf16=False, per_device_train_batch_size=8,
                    num_generations=8, max_completion_length=4, max_steps=1, logging_steps=1,
                    report_to="none", save_strategy="no", disable_tqdm=True),
    train_dataset=Dataset.from_dict({"prompt": ["ab"]}), processing_class=tokenizer)
trainer.remove_callback(PrinterCallback)
trainer.train()
metrics = {name: value for name, value in trainer.state.log_history[0].items()
           if name in ("reward", "reward_std", "frac_reward_zero_std", "grad_norm")}
print("rewards nan, 1, 1, 1, 1, 1, 1, 1:", metrics)
assert metrics == {"reward": 1.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0,
                   "grad_norm": 0.0}, "the behaviour changed"
END

# Seen on 28 November 2026:
#   Python 3.11.7
#   datasets==5.2.0
#   numpy==2.3.5
#   torch==2.13.0+cpu
#   transformers==5.19.0
#   trl==1.16.0
#   rewards nan, 1, 1, 1, 1, 1, 1, 1: {'grad_norm': 0.0, 'reward': 1.0, 'reward_std': 0.0,
#     'frac_reward_zero_std': 1.0}
