"""Correction: a wrong answer may be given again. See parts/turns/.

    python grpo.py --reply examples/again.py:reply --reward examples/again.py:right --max_turns 3
"""
import re


def correct(turn, answer):
    """Whether a turn ends with the answer, on its own or after ####."""
    said = turn["content"].rpartition("####")[2].strip()
    return said == re.split("####", str(answer))[-1].strip()


def reply(row, turns):
    """Says that it is wrong, and never what is right: a reward may read the whole episode."""
    if correct(turns[-1], row["answer"]):
        return None
    tries = sum(turn["role"] == "assistant" for turn in turns)
    return f"That is wrong (try {tries}). Try again."


def right(turns, answer, **row):
    """1 for a right first answer; each further try costs a quarter."""
    tries = sum(turn["role"] == "assistant" for turn in turns)
    return max(0.0, 1.25 - 0.25 * tries) if correct(turns[-1], answer) else 0.0
