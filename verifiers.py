"""Verifiers: what a model wrote, and the row's answer → a number. `REWARDS` at the end is the table that `--reward` names.

What a model wrote is hostile: it is parsed, never evaluated. These functions run in the worker processes of rewards.py, which
can be killed; a new one takes (completion, answer, **row), where row holds every column and prompt, tokens and truncated.
"""
import functools
import re
from collections import Counter
from decimal import Decimal
from fractions import Fraction

# ---------------------------------------------------------------------------------------------------- reading the text

NUMBER = re.compile(r"(?:(?<![\w).])-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def last_number(text: str) -> Decimal | None:
    """The last number in `text`: '$1,234.50' is 1234.5, '10-5' ends in 5, 'x = -5' in -5. Exact, so a Decimal."""
    found = NUMBER.findall(text.replace("$", ""))
    return Decimal(found[-1].replace(",", "")) if found else None


def last_boxed(text: str) -> str | None:
    r"""What the last complete \boxed{...} holds, braces balanced."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth, start = 0, start + len(r"\boxed")
    for brace in re.finditer("[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start + 1:start + brace.start()]
    return None


def last_answer(text: str) -> str | None:
    """What the last <answer>...</answer> holds, stripped."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>"):end].strip() if start >= 0 else None


def well_tagged(completion: str, prompt: str) -> bool:
    """Each of <think> </think> <answer> </answer> exactly once, in this order (Logic-RL's validate_response_structure).

    Logic-RL's prompts end in `<think>`: the model has only the closing tag left to write. Such an opening counts as the
    completion's own, unless the completion starts by writing it again.
    """
    if prompt.rstrip().endswith("<think>") and not completion.lstrip().startswith("<think>"):
        completion = "<think>" + completion
    places = [completion.find(tag) for tag in TAGS]
    return places == sorted(places) and all(completion.count(tag) == 1 for tag in TAGS)


def arithmetic(text: str) -> tuple[Fraction, list[int]]:
    """Value of an expression of integers, + - * / and parentheses, and the integers it uses. Parsed by hand: no eval, no `**`.

    Raises ValueError for anything else, ZeroDivisionError for a division by zero. 300 characters at most, which also bounds the
    depth of the recursion and, without powers, the size of the numbers.
    """
    if len(text) > 300:
        raise ValueError("longer than 300 characters")
    tokens, numbers = re.findall(r"[0-9]+|\S", text)[::-1], []

    def operand() -> Fraction:
        token = tokens.pop() if tokens else "the end"
        if token == "-":
            return -operand()
        if token == "(":
            value = terms()
            if not tokens or tokens.pop() != ")":
                raise ValueError("a parenthesis is not closed")
            return value
        if not (token.isascii() and token.isdigit()):
            raise ValueError(f"expected a number, found {token!r}")
        numbers.append(int(token))
        return Fraction(numbers[-1])

    def factors() -> Fraction:
        value = operand()
        while tokens and tokens[-1] in "*/":
            value = value * operand() if tokens.pop() == "*" else value / operand()
        return value

    def terms() -> Fraction:
        value = factors()
        while tokens and tokens[-1] in "+-":
            value = value + factors() if tokens.pop() == "+" else value - factors()
        return value

    value = terms()
    if tokens:
        raise ValueError(f"unexpected {tokens[-1]!r}")
    return value, numbers


# ---------------------------------------------------------------------------------------------------- the built-in rewards
# All are called as f(completion, answer, **row), where row also has the item's prompt, tokens and truncated.

def gsm8k(completion, answer, **row):
    r"""1 if the number is right, else 0. The number after the last `####`, else in the last \boxed{}, else the last of the text."""
    gold = last_number(str(answer).rpartition("####")[2])
    if gold is None:
        raise ValueError(f"gsm8k needs a number in the row's answer, after '####' or alone; it is {str(answer)[:200]!r}")
    _, mark, after = completion.rpartition("####")
    boxed = last_boxed(completion)
    if mark:
        after = after.lstrip().partition("\n")[0]
        found = NUMBER.search(after.replace("$", ""))
        given = found and Decimal(found[0].replace(",", ""))
    else:
        given = last_number(completion if boxed is None else boxed)
    return float(given == gold)


def math_reward(completion, answer, **row):
    r"""1 if math-verify finds the completion's answer equal to the row's, else 0. The row's may be bare LaTeX, hold \boxed{}, or
    end in GSM8K's `#### 72`. math-verify's own timers need SIGALRM and score a timeout 0; they are off, the worker's clock rules.
    """
    from math_verify import parse as read, verify
    return float(verify(math_gold(str(answer)), read(completion, parsing_timeout=None), timeout_seconds=None))


@functools.lru_cache(maxsize=256)   # the completions of a group share it
def math_gold(answer: str) -> list:
    from math_verify import parse as read
    _, mark, after = answer.rpartition("####")
    text = after.strip() if mark else answer
    gold = read(text if r"\boxed" in text else rf"\boxed{{{text}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify finds no answer in the row's {answer[:200]!r}")
    return gold


def countdown(completion, answer=None, **row):
    """1 if the expression uses each of the row's `nums` (or `numbers`) exactly as often as given and equals `target`, else 0.

    The expression is the last <answer>...</answer>, or without one the last line. TinyZero's rule, less its holes: it looks only
    at the last line, and lets `**` through to eval.
    """
    given = row["nums"] if "nums" in row else row["numbers"]
    lines = completion.strip().splitlines() or [""]
    text = last_answer(completion)
    try:
        value, used = arithmetic(lines[-1] if text is None else text)
    except (ValueError, ZeroDivisionError):
        return 0.0
    return float(Counter(used) == Counter(int(n) for n in given) and value == int(row["target"]))


def kk(completion, answer, prompt="", **row):
    """Knights and knaves by Logic-RL's rule (arxiv.org/abs/2502.14768): 3 right, -0.5 wrong, -1 unreadable or incomplete, -3 bad
    tags. The row's answer is the text '(1) Ava is a knight\\n...', or a dict that holds it as `solution_text_format`.
    """
    text = answer["solution_text_format"] if isinstance(answer, dict) else str(answer)
    gold = dict(re.findall(r"([\w'-]+) is an? (knight|knave)", text))
    if not gold:
        raise ValueError(f"kk needs 'NAME is a knight' or 'NAME is a knave' in the row's answer; it is {text[:200]!r}")
    if not well_tagged(completion, prompt):
        return -3.0
    said = last_answer(completion).lower()
    if len(re.findall("knight|knave", said)) != len(gold):   # one role a name: naming both is no answer
        return -1.0
    roles = [re.search(rf"\b{re.escape(name.lower())}\b\s+is\s+an?\s+(knight|knave)\b", said) for name in gold]
    if None in roles:
        return -1.0
    return 3.0 if [role[1] for role in roles] == list(gold.values()) else -0.5


def kk01(completion, answer, prompt="", **row):
    """1 where `kk` gives 3, else 0: the accuracy."""
    return float(kk(completion, answer, prompt) == 3.0)


def format_tags(completion, answer=None, prompt="", **row):
    """1 if the completion is <think>...</think> then <answer>...</answer>, each tag once, else 0."""
    return float(well_tagged(completion, prompt))


def exact(completion, answer, **row):
    """1 if the completion is the answer, white space at both ends aside, else 0."""
    return float(completion.strip() == str(answer).strip())


def short(completion, answer=None, tokens=0, **row):
    """-tokens / 1000: with `short:0.1` a completion of 2,000 tokens costs 0.2."""
    return -tokens / 1000


def reasoning_gym_score(completion, answer, reasoning_gym_task, reasoning_gym_entry, **row):
    """The score (0 to 1) of the library's own scorer for the last <answer>...</answer>, or the whole completion."""
    scorer, text = reasoning_gym_scorer(reasoning_gym_task), last_answer(completion)
    try:
        return float(scorer(completion.strip() if text is None else text, reasoning_gym_entry))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        # Some scorers raise on what they cannot read: a wrong answer. A row whose own answer raises as well is a broken row.
        scorer(str(reasoning_gym_entry["answer"]), reasoning_gym_entry)
        return 0.0


@functools.cache
def reasoning_gym_scorer(task: str):
    import reasoning_gym
    return reasoning_gym.get_score_answer_fn(task)


REWARDS = {"math": math_reward, "gsm8k": gsm8k, "countdown": countdown, "kk": kk, "kk01": kk01, "format": format_tags,
           "exact": exact, "short": short, "reasoning_gym": reasoning_gym_score}
