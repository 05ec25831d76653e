"""A guessing game: find a number from 1 to 15 in four guesses.

    python grpo.py --model tiny:guess --data tiny:guess --reply examples/guess.py:reply \\
        --reward examples/guess.py:won
"""
import re

LARGEST, GUESSES = 15, 4


def guess(turn):
    """The number of a turn. None: it is not one."""
    text = turn["content"].strip()
    return int(text) if re.fullmatch("[0-9]{1,3}", text) else None


def reply(row, turns):
    """The game has no memory but the turns: they say how many guesses are left."""
    last, secret = guess(turns[-1]), int(row["answer"])
    left = GUESSES - sum(turn["role"] == "assistant" for turn in turns)
    if last == secret or left == 0:
        return None
    if last is None:
        return f"say a number from 1 to {LARGEST}"
    return "higher" if last < secret else "lower"


def won(turns, answer, **row):
    """1 if the last guess is right."""
    return float(guess(turns[-1]) == int(answer))
