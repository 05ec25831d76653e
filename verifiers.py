"""verifiers.py: the names of the built-in rewards, and what rewards read: answers and boxes.

A reward gets a completion, the answer of its row, and by name whatever else it asks for: the row's
columns, prompt, tokens (how many were sampled) and truncated. A completion is hostile text: parse
it, never evaluate it.
"""
import functools
import math
import re
from decimal import Decimal

# The names of --reward, and their places: MODULE:FUNCTION.
REWARDS = {
    "exact": "examples.numbers:exact", "math": "examples.mathematics:math_reward",
    "short": "verifiers:short",
    "format": "examples.formats:format_tags", "format_boxed": "examples.formats:format_boxed",
    "gsm8k": "examples.gsm8k:gsm8k", "kk": "examples.kk:kk",
    "kk01": "examples.kk:kk01", "countdown": "examples.countdown:countdown",
    "reasoning_gym": "examples.reasoning_gym_tasks:score"}
# Called first, in a worker: libraries that would evaluate what a model wrote.
GUARDS = {"math": "examples.mathematics:guard_math",
          "reasoning_gym": "examples.reasoning_gym_tasks:shut_eval"}


def answers_of(answer) -> list:
    """Returns the right answers of a row as a list of texts and numbers, of which any will do.
    Raises a ValueError if the answer is none of these.
    """
    if isinstance(answer, dict):  # Logic-RL's
        answer = answer.get("solution_text_format", answer)
    found = answer if isinstance(answer, list) else [answer]
    if not found or not all(map(is_answer, found)):
        raise ValueError("an answer is a text, a number, or a list of these "
                         f"(got {str(answer)[:100]!r})")
    return found


def is_answer(value) -> bool:
    """Returns whether a value is a text that is not blank, or a finite number."""
    if isinstance(value, str):
        return bool(value.strip())
    return type(value) is int or (type(value) in (float, Decimal) and math.isfinite(value))


def any_answer(reward):
    """Wraps a reward of one answer into a reward of all answers that a row may have: the best one
    counts.
    """
    @functools.wraps(reward)
    def best(completion, answer, **row):
        return max(reward(completion, one, **row) for one in answers_of(answer))
    return best


def last_boxed(text: str) -> str | None:
    r"""Returns what is in the last \boxed{...} or \fbox{...} of a text, or after a \boxed without
    braces up to a $ or the end of the line. None: there is no box. "": its brace is not closed.
    """
    *_, box = [None, *re.finditer(r"\\(?:boxed|fbox)(?:\s*(\{)|[ \t]([^$\n]*))", text)]
    if not box or not box[1]:
        return box and box[2].strip()
    depth, rest = 1, text[box.end():]
    for brace in re.finditer(r"\\.|[{}]", rest):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return rest[:brace.start()]
    return ""


def last_answer(text: str) -> str | None:
    """Returns what is in the last <answer>...</answer> of a text, or None."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>"):end].strip() if start >= 0 else None


def short(completion, tokens, **row):
    """A reward that makes completions short: with `short:0.1` a completion of 2,000 tokens costs
    0.2.
    """
    return -tokens / 1000
