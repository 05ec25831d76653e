"""Rewards for the form of a completion: thoughts, then an answer. They read no answer of the row.

    python grpo.py --model tiny:kk --data tiny:kk --reward kk01 format:0.1
"""
import re

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def format_tags(completion, prompt="", **row):
    """1 if TAGS are there, each once, in this order. A <think> that ends the prompt counts."""
    completion = with_think(completion, prompt)
    once = all(completion.count(tag) == 1 for tag in TAGS)
    places = [completion.find(tag) for tag in TAGS]
    return float(once and places == sorted(places))


def format_boxed(completion, prompt="", **row):
    r"""1 if it is <think>.*</think>.*\boxed{.*}.*, as EasyR1 asks for; else 0."""
    text = re.sub(r"([<>/])\s+", r"\1", with_think(completion, prompt))  # "< / think >" too
    text = re.sub(r"(?<!\s)\s+([<>/])", r"\1", text)
    box = text.partition("</think>")[2].partition(r"\boxed{")[2]
    return float(text.startswith("<think>") and "}" in box)


def with_think(completion: str, prompt: str) -> str:
    """With the <think> that ends the prompt."""
    if prompt.rstrip().endswith("<think>") and not completion.lstrip().startswith("<think>"):
        return "<think>" + completion
    return completion
