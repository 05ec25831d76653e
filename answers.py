"""answers.py: the names of the built-in rewards, and how rewards read answers and boxes.

A reward is a function that is called with a completion (a text), the answer of its row, and by name
whatever other parameters it declares: the columns of the row, prompt, tokens (the number of sampled
tokens) and truncated. A completion is hostile text: a reward must parse it and must never evaluate
it.

The file begins with the table of names. Then come the functions that rewards share, which read the
answers of a row and the answer in a completion.
"""
import functools
import math
import re
from decimal import Decimal
from fractions import Fraction
from unicodedata import normalize

# {name of --reward: MODULE:FUNCTION}.
REWARDS = {
    "exact": "examples.exact:exact", "math": "examples.mathematics:math_reward",
    "short": "answers:short",
    "format": "examples.formats:format_tags", "format_boxed": "examples.formats:format_boxed",
    "gsm8k": "examples.gsm8k:gsm8k", "kk": "examples.kk:kk",
    "kk01": "examples.kk:kk01", "countdown": "examples.countdown:countdown",
    "reasoning_gym": "examples.reasoning_gym_tasks:score"}
# {name of --reward: a function that the worker calls before it loads the reward}. These rewards use
# libraries that would evaluate the text of a completion; the function prevents that.
GUARDS = {"math": "examples.mathematics:guard_math",
          "reasoning_gym": "examples.reasoning_gym_tasks:shut_eval"}
ANSWERS = ("answer", "solution", "ground_truth", "target")  # columns of a row's right answer


def answers_of(answer) -> list:
    """Returns the right answers of a row as a list of texts and numbers, any of which is accepted.
    An answer that is a list is returned as it is, and a single one as a list of one. Of a dict it
    is the value of `solution_text_format` (Logic-RL's rows). Raises a ValueError if the list is
    empty, or an element is neither a text that is not blank nor a finite number.
    """
    if isinstance(answer, dict):
        answer = answer.get("solution_text_format", answer)
    found = answer if isinstance(answer, list) else [answer]
    if not found or not all(map(is_answer, found)):
        raise ValueError("an answer is a text, a number, or a list of these "
                         f"(got {str(answer)[:100]!r}, a {type(answer).__name__})")
    return found


def is_answer(value) -> bool:
    """Returns whether a value is a text that is not blank, or a finite number."""
    if isinstance(value, str):
        return bool(value.strip())
    return type(value) in (int, float, Decimal, Fraction) and math.isfinite(value)


def any_answer(reward):
    """Wraps a reward that takes one right answer, so that the row may have several. The wrapped
    reward returns the largest reward over these answers. It gets texts in the form NFC, in which a
    letter is written in one way.
    """
    @functools.wraps(reward)
    def best(completion, answer, **row):
        said = normalize("NFC", completion)
        return max(reward(said, normalize("NFC", one) if isinstance(one, str) else one, **row)
                   for one in answers_of(answer))
    return best


def last_boxed(text: str) -> str | None:
    r"""Returns the contents of the last \boxed{...} or \fbox{...} in a text. After a \boxed without
    braces, they are what follows up to a $ or the end of the line. Returns None if there is no box,
    and "" if its brace is not closed.
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
    """Returns the text within the last <answer>...</answer>, without white space at its ends, or
    None if there is none.
    """
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>"):end].strip() if start >= 0 else None


def short(completion, tokens, **row):
    """Returns a reward that favours short completions: minus the number of sampled tokens, divided
    by 1,000. With `--reward short:0.1` a completion of 2,000 tokens loses 0.2.
    """
    return -tokens / 1000
