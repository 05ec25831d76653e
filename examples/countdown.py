"""Countdown: reach a number from others with + - * /. Rows and reward of the task, in one file:

    python grpo.py --data examples/countdown.py:rows --eval_data examples/countdown.py:held_out \\
        --reward examples/countdown.py:countdown
"""
import random
import re
from collections import Counter
from fractions import Fraction

from answers import answers_of, last_answer
from examples.exact import SAME, number_of

ASK = ("Using the numbers {nums}, each exactly once, and + - * /, reach {target}. Show your work "
       "in <think> </think>, and the expression in <answer> </answer>, as <answer> (1 + 2) / 3 "
       "</answer>.")
SIGNS = SAME | str.maketrans("×∗·⋅÷", "****/")


def rows(seed, n=4096):
    """Yields n rows: three or four numbers below 100, and a target that they reach."""
    rng = random.Random(seed)
    while n:
        nums = [rng.randint(1, 99) for _ in range(rng.choice((3, 4)))]
        reached = Fraction(nums[0])
        for number in nums[1:]:
            sign = rng.choice("+-*/")
            reached = {"+": reached + number, "-": reached - number, "*": reached * number,
                       "/": reached / number}[sign]
        if reached.denominator == 1 and 0 < reached < 1000:
            target, n = int(reached), n - 1
            rng.shuffle(nums)
            yield {"prompt": ASK.format(nums=nums, target=target), "nums": nums, "target": target}


def held_out(seed):
    """Yields rows that no seed of --data has drawn."""
    yield from rows(f"held out {seed}", 256)


def countdown(completion, target, nums=None, numbers=None, **row):
    """1 if the expression in the last <answer>, else the last line, equals `target` and uses
    exactly the row's `nums` (or `numbers`)."""
    lines = completion.strip().splitlines() or [""]
    text = last_answer(completion)
    text = re.sub(r"\\(?:times|cdot)\b", "*", lines[-1] if text is None else text)
    text = text.replace(r"\div", "/").translate(SIGNS)
    try:
        value, used = arithmetic(text)
    except (ValueError, ZeroDivisionError):
        return 0.0
    given = [number_of(str(n)) for n in (numbers if nums is None else nums)]
    targets = [number_of(str(n)) for n in answers_of(target)]
    if None in given + targets:
        raise ValueError("countdown needs numbers in the row's `nums` and `target`")
    return float(Counter(used) == Counter(given) and value in targets)


def arithmetic(text: str) -> tuple[Fraction, list[int]]:
    """The value of an expression of integers with + - * / ( ), and the integers. Never `eval`: a
    model wrote it. ValueError if it is none."""
    if len(text) > 300:  # limits the recursion
        raise ValueError("too long")
    tokens = re.findall(r"[0-9]+|\S", text)[::-1]  # the next one is the last
    numbers = []
    value = terms(tokens, numbers)
    if tokens:
        raise ValueError("no operator")
    return value, numbers


def terms(tokens: list[str], numbers: list[int]) -> Fraction:
    """Factors with + and - between them. Takes its tokens away, and notes the numbers."""
    value = factors(tokens, numbers)
    while tokens and tokens[-1] in "+-":
        if tokens.pop() == "+":
            value = value + factors(tokens, numbers)
        else:
            value = value - factors(tokens, numbers)
    return value


def factors(tokens: list[str], numbers: list[int]) -> Fraction:
    """Operands with * and / between them."""
    value = operand(tokens, numbers)
    while tokens and tokens[-1] in "*/":
        if tokens.pop() == "*":
            value = value * operand(tokens, numbers)
        else:
            value = value / operand(tokens, numbers)
    return value


def operand(tokens: list[str], numbers: list[int]) -> Fraction:
    """A number, an expression in parentheses, or one of these with a minus before it."""
    token = tokens.pop() if tokens else ""
    if token == "-":
        return -operand(tokens, numbers)
    if token == "(":
        value = terms(tokens, numbers)
        if not tokens or tokens.pop() != ")":
            raise ValueError("no )")
        return value
    if not (token.isascii() and token.isdigit()):
        raise ValueError("no number")
    numbers.append(int(token))
    return Fraction(numbers[-1])
