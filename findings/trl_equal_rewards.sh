#!/usr/bin/env bash
# TRL: a group with equal rewards.
# Expected: where all completions of a prompt have the same reward, the advantages are 0 and nothing
# is learned. TRL's own metric says so (frac_reward_zero_std is 1).
# So: the mean of float32 numbers is rounded, so each of eight rewards of 0.1 has an advantage of
# -7e-5, and Adam makes full steps of that. With rewards of 0.5 the weights stay.
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


def train(reward):
    """The metrics of the first step, and by how much three steps move the weights."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=257, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, eos_token_id=0, pad_token_id=0))
    before = [weight.clone() for weight in model.parameters()]
    trainer = GRPOTrainer(
        model, lambda completions, **others: [reward] * len(completions),
        args=GRPOConfig(
            "run", use_cpu=True, bf16=False, learning_rate=1e-3, per_device_train_batch_size=8,
            num_generations=8, max_completion_length=4, max_steps=3, logging_steps=1,
            report_to="none", save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant"),
        train_dataset=Dataset.from_dict({"prompt": ["ab", "cd", "ef"]}),
        processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    moved = max((new - old).abs().max().item()
                for new, old in zip(model.parameters(), before, strict=True))
    return trainer.state.log_history[0], moved


moves = []
for reward in 0.5, 0.1:
    metrics, moved = train(reward)
    moves.append(moved)
    print(f"all rewards {reward}: frac_reward_zero_std {metrics['frac_reward_zero_std']}, "
          f"loss {metrics['loss']:.1e}, after 3 steps of 1e-3 a weight moved by {moved:.1e}")
assert moves[0] == 0 and moves[1] > 1e-3, "the behaviour changed"
END

# Seen on 28 November 2026:
#   Python 3.11.7
#   datasets==5.2.0
#   numpy==2.3.5
#   torch==2.13.0+cpu
#   transformers==5.19.0
#   trl==1.16.0
#   all rewards 0.5: frac_reward_zero_std 1.0, loss 0.0e+00, after 3 steps of 1e-3 a weight
#     moved by 0.0e+00
#   all rewards 0.1: frac_reward_zero_std 1.0, loss 7.4e-05, after 3 steps of 1e-3 a weight
#     moved by 3.0e-03
