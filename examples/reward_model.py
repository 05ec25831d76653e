"""A reward model: a Hugging Face sequence classifier, in each reward worker, on the CPU.

    REWARD_MODEL=Skywork/Skywork-Reward-V2-Qwen3-0.6B python grpo.py --reward_timeout 60 \\
        --reward examples/reward_model.py:score

It is loaded once for each worker, when the file is, so a missing model is an error before anything
else starts. It must have one label: its logit is the reward, which has no fixed scale. A worker has
4 GiB of memory (MEMORY_GB in rewards.py) and one thread. See docs/use/data_and_rewards.md.
"""
import os

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

NAME = os.environ.get("REWARD_MODEL")
if not NAME:
    raise SystemExit("examples/reward_model.py needs the variable REWARD_MODEL: a folder or a hub "
                     "name.")
tokenizer = AutoTokenizer.from_pretrained(NAME)
model = AutoModelForSequenceClassification.from_pretrained(NAME, dtype=torch.float32).eval()
if model.config.num_labels != 1:
    raise SystemExit(f"REWARD_MODEL {NAME} has {model.config.num_labels} labels; a reward model "
                     f"has one.")


def score(completion, question=None, prompt=""):
    """The logit for the chat of the row's `question` (else of the whole prompt) and completion."""
    question = question or prompt
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": completion}]
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    else:
        inputs = tokenizer(question, completion, return_tensors="pt")
    with torch.inference_mode():
        return model(**inputs).logits.item()
