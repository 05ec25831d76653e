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



def window():
    """The tokens that the model takes: the limit of the tokenizer, or of its positions. Those of
    RoBERTa begin behind that of padding."""
    positions = getattr(model.config, "max_position_embeddings", None) or 10**30
    pads = [getattr(module, "padding_idx", None) for name, module in model.named_modules()
            if name.endswith("position_embeddings")]
    positions -= max((pad + 1 for pad in pads if pad is not None), default=0)
    return min((n for n in (tokenizer.model_max_length, positions) if n > 0), default=10**30)


WINDOW = window()


def inputs_of(question, completion):
    """The tokens, (1, T), of a chat of both, or without a chat template of the pair."""
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": completion}]
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        return tokenizer(text, return_tensors="pt", add_special_tokens=False)
    return tokenizer(question, completion, return_tensors="pt")


def score(completion, question=None, prompt=""):
    """The logit for the chat of the row's `question` (else of the whole prompt) and completion.
    ValueError: they are longer than the model's window, where its number means nothing."""
    inputs = inputs_of(question or prompt, completion)
    length = inputs["input_ids"].shape[1]
    if length > WINDOW:
        raise ValueError(f"question and completion have {length:,} tokens, and {NAME} takes "
                         f"{WINDOW:,}. Would work: a smaller --max_tokens or --max_prompt_tokens")
    with torch.inference_mode():
        return model(**inputs).logits.item()
