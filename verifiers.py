"""A completion and the row's answer -> a number. --reward names the functions in REWARDS.

A completion is hostile text: parse it, never evaluate it. **row has the row's columns, prompt,
tokens and truncated.
"""
import functools
import re
from collections import Counter
from decimal import Decimal
from fractions import Fraction

NUMBER = re.compile(r"(?:(?<![\w).])-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
                    r"|(?<![0-9])\.[0-9]+")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def numbers_in(text: str) -> list[Decimal]:
    """'$1,234.50' -> 1234.5, '10-5' -> 10 and 5, 'x = -5' -> -5."""
    return [Decimal(n.replace(",", "")) for n in NUMBER.findall(text.replace("$", ""))]


def last_boxed(text: str) -> str | None:
    r"""What is in the last \boxed{...}, or None. Its braces must be balanced."""
    _, box, rest = text.rpartition(r"\boxed{")
    depth = 1
    for brace in re.finditer("[{}]", rest if box else ""):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return rest[:brace.start()]
    return None


def last_answer(text: str) -> str | None:
    """What is in the last <answer>...</answer>, or None."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>"):end].strip() if start >= 0 else None


def arithmetic(text: str) -> tuple[Fraction, list[int]]:
    """The value of an expression of integers with + - * / ( ), and the integers."""
    if len(text) > 300:   # limits the recursion
        raise ValueError("too long")
    tokens, numbers = re.findall(r"[0-9]+|\S", text)[::-1], []

    def operand():
        token = tokens.pop() if tokens else ""
        if token == "-":
            return -operand()
        if token == "(":
            value = terms()
            if not tokens or tokens.pop() != ")":
                raise ValueError("no )")
            return value
        if not (token.isascii() and token.isdigit()):
            raise ValueError("no number")
        numbers.append(int(token))
        return Fraction(numbers[-1])

    def factors():
        value = operand()
        while tokens and tokens[-1] in "*/":
            value = value * operand() if tokens.pop() == "*" else value / operand()
        return value

    def terms():
        value = factors()
        while tokens and tokens[-1] in "+-":
            value = value + factors() if tokens.pop() == "+" else value - factors()
        return value

    value = terms()
    if tokens:
        raise ValueError("no operator")
    return value, numbers


def gsm8k(completion, answer, **row):
    r"""1 if the number after the last ####, else in the last \boxed{}, else the last, is right."""
    gold = numbers_in(str(answer).rpartition("####")[2])[-1:]
    if not gold:
        raise ValueError(f"gsm8k needs a number in the answer (got {answer!r:.200})")
    _, mark, after = completion.rpartition("####")
    if mark:
        given = numbers_in(after.lstrip().partition("\n")[0])[:1]
    else:
        boxed = last_boxed(completion)
        given = numbers_in(completion if boxed is None else boxed)[-1:]
    return float(given == gold)


def math_reward(completion, answer, **row):
    r"""1 if math-verify finds the two answers equal, else 0.

    The answer is LaTeX, or has a \boxed{}, or ends in GSM8K's "#### 72". math-verify's timers are
    off: they give 0, and the worker has its own.
    """
    from math_verify import parse, verify
    given = parse(completion, parsing_timeout=None)
    return float(verify(math_gold(str(answer)), given, timeout_seconds=None))


@functools.lru_cache(maxsize=256)   # a group shares it
def math_gold(answer: str) -> list:
    from math_verify import parse
    text = answer.rpartition("####")[2].strip()
    gold = parse(text if r"\boxed" in text else rf"\boxed{{{text}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify finds no answer in {answer[:200]!r}")
    return gold


def countdown(completion, target, nums=None, numbers=None, **row):
    """1 if the expression in the last <answer>, else the last line, equals `target` and uses
    exactly the row's `nums` (or `numbers`)."""
    lines = completion.strip().splitlines() or [""]
    text = last_answer(completion)
    try:
        value, used = arithmetic(lines[-1] if text is None else text)
    except (ValueError, ZeroDivisionError):
        return 0.0
    return float(Counter(used) == Counter(int(n) for n in nums or numbers) and value == int(target))


def kk(completion, answer, prompt="", **row):
    """Knights and knaves, by Logic-RL's rule (arxiv.org/abs/2502.14768).

    3: right. -0.5: wrong. -1: not readable or complete. -3: wrong tags. The answer is
    '(1) Ava is a knight...', or a dict with this text as `solution_text_format`.
    """
    text = answer["solution_text_format"] if isinstance(answer, dict) else str(answer)
    gold = dict(re.findall(r"([\w'-]+) is an? (knight|knave)", text))
    if not gold:
        raise ValueError(f"kk needs 'NAME is a knight' in the answer (got {text[:200]!r})")
    if not format_tags(completion, prompt):
        return -3.0
    said = last_answer(completion).lower()
    # "a knight or a knave" is no answer
    if len(re.findall("knight|knave", said)) != len(gold):
        return -1.0
    roles = [re.search(rf"\b{re.escape(name.lower())}\b\s+is\s+an?\s+(knight|knave)\b", said)
             for name in gold]
    if None in roles:
        return -1.0
    return 3.0 if [role[1] for role in roles] == list(gold.values()) else -0.5


def kk01(completion, answer, prompt="", **row):
    """1 if kk gives 3, else 0."""
    return float(kk(completion, answer, prompt) == 3.0)


def format_tags(completion, prompt="", **row):
    """1 if TAGS are there, each once, in this order. A <think> that ends the prompt counts."""
    if prompt.rstrip().endswith("<think>") and not completion.lstrip().startswith("<think>"):
        completion = "<think>" + completion
    places = [completion.find(tag) for tag in TAGS]
    return float(places == sorted(places) and all(completion.count(tag) == 1 for tag in TAGS))


def exact(completion, answer, **row):
    """1 if the completion is the answer, else 0."""
    return float(completion.strip() == str(answer).strip())


def short(completion, tokens, **row):
    """With `short:0.1` a completion of 2,000 tokens costs 0.2."""
    return -tokens / 1000


def reasoning_gym_score(completion, answer, reasoning_gym_task, reasoning_gym_entry, **row):
    """reasoning_gym's score, 0 to 1, of the last <answer>, or of all."""
    scorer, text = reasoning_gym_scorer(reasoning_gym_task), last_answer(completion)
    try:
        return float(scorer(completion.strip() if text is None else text, reasoning_gym_entry))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        # The answer is wrong. Or the row is, if its answer raises too.
        scorer(str(reasoning_gym_entry["answer"]), reasoning_gym_entry)
        return 0.0


@functools.cache
def reasoning_gym_scorer(task: str):
    import reasoning_gym
    return reasoning_gym.get_score_answer_fn(task)


REWARDS = dict(math=math_reward, gsm8k=gsm8k, countdown=countdown, kk=kk, kk01=kk01,
               format=format_tags, exact=exact, short=short, reasoning_gym=reasoning_gym_score)
