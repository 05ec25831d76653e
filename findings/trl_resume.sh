#!/usr/bin/env bash
# TRL: a run that is resumed in its second epoch.
# Expected: it goes on with the prompts that the epoch has left.
# So: it takes the first epoch's order again. Prompts of this epoch come twice, and others not at
# all.
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
seen = []


def reward(prompts, completions, **others):
    seen.extend(sorted({*prompts}))
    return [float(i % 2) for i, _ in enumerate(completions)]


def prompts_of(checkpoint=None):
    """The prompts that a run of two epochs meets, one a step."""
    seen.clear()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=257, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, eos_token_id=0, pad_token_id=0))
    trainer = GRPOTrainer(
        model, reward,
        args=GRPOConfig("run", use_cpu=True, bf16=False, per_device_train_batch_size=2,
                        gradient_accumulation_steps=1, num_generations=2, max_steps=12,
                        max_completion_length=2, save_steps=9, report_to="none", seed=1,
                        disable_tqdm=True),
        train_dataset=Dataset.from_dict({"prompt": list("abcdef")}), processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=checkpoint)
    return "".join(seen)


whole, resumed = prompts_of(), prompts_of("run/checkpoint-9")
print(f"first epoch {whole[:6]}, second {whole[6:9]} {whole[9:]}; resumed after 9 steps: {resumed}")
assert resumed != whole[9:] and resumed == whole[3:6], "the behaviour changed"
END

# Seen on 29 November 2026:
#   Python 3.11.7
#   datasets==5.2.0
#   numpy==2.3.5
#   torch==2.13.0+cpu
#   transformers==5.19.0
#   trl==1.16.0
#   first epoch bfcade, second bcd fea; resumed after 9 steps: ade
