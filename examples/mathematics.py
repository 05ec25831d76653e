r"""The reward `math`: LaTeX that math-verify finds equal.

The row's answer and the completion's may change places. What math-verify's parser drops counts:

    a base                  110_2 is 110_{2}, and neither 110_3 nor 110: who is asked for a base
                            must write it
    the order               (1,2) is a pair or an open interval: not (2,1), [1,2] or \{1,2\}. A
                            list without brackets is a set, in any order, where what stands twice
                            counts once
    inequalities            1<x<3 is (1,3) and x \in (1,3)
    a percent               a hundredth: 50\% is 0.5, not 50
    units                   5 m is not 5 cm; 5\text{ cm} is 5 centimeters. Where one of the two
                            answers has no unit, it is not compared. A letter alone, as in 5t, is a
                            variable and counts
    a name                  x = 5 is 5
    an equation of numbers  its last number: 1 + 2 = 3 is 3

math-verify reads LaTeX by sympy, which would evaluate what a model wrote: `guard_math` stops that.
"""
import ast
import functools
import logging
import re

from answers import any_answer, last_boxed
from examples.exact import plain

# Arithmetic: all that sympy may evaluate.
CALLS = set("Integer Float Rational Symbol factorial sqrt exp log ln Abs sin cos tan cot sec csc "
            "asin acos atan sinh cosh tanh".split())
NODES = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant, ast.Name,
         ast.Load, ast.Call)
# math-verify reads the first part of "36\pi \approx 113", and adds "3 4" up.
BASE = re.compile(r"(?<=[0-9A-Z])_\s*(?:\{\s*)?([0-9]+)")  # of a number: 110_2, 1A_{16}
NOT_ONE = re.compile(r"\\approx|≈|[0-9]\s+[0-9]")


@any_answer
def math_reward(completion, answer, **row):
    r"""1 if math-verify finds the two answers equal, whichever is the row's, else 0.

    The answer is LaTeX, or has a box, or ends in GSM8K's "#### 72". The completion's last box
    counts, or without one what math-verify finds. What its parser drops is compared here: bases and
    units, and whether the order counts. Its timers are off: they give 0, and the worker has its
    own.
    """
    from math_verify import verify
    (right, gold), box = math_gold(str(answer)), last_boxed(completion)
    text = plain(completion if box is None else box)
    if box is not None and NOT_ONE.search(text) and not NOT_ONE.search(str(answer)):
        return 0.0
    given = parsed(text if box is None else in_box(text))
    if bases(right) != bases(text.strip().rpartition("\n")[2]) or (
            {"FiniteSet", "ordered"} == {kind(gold), kind(given)} or  # \{1,2\} is not (1,2)
            box is not None and not same_units(right, text)):
        return 0.0
    return float(all(verify(*pair, allow_set_relation_comp=True, timeout_seconds=None)
                     for pair in ((gold, given), (given, gold))))


@functools.lru_cache(maxsize=256)  # a group shares it
def math_gold(answer: str) -> tuple[str, list]:
    """The row's answer as plain LaTeX, and as math-verify parses it. As a text √ or ∪ would equal
    no LaTeX."""
    text = answer.rpartition("####")[2].strip()
    text = plain(last_boxed(text) or text)
    gold = parsed(in_box(text))
    if not gold or re.search("[∀-⋿]", answer) and all(isinstance(one, str) for one in gold):
        raise ValueError(f"math-verify finds no answer in {answer[:200]!r}: write LaTeX")
    return text, gold


def parsed(text: str) -> list:
    """What math-verify finds: an expression of sympy, and its text. An equation of numbers is its
    last number. A percent is a hundredth: of whole numbers math-verify would drop it. A float that
    is whole to 15 digits is that number."""
    from math_verify import grader, parse
    from sympy import Float, Integer
    text = re.sub(r"(?<![0-9.,])([0-9]+)\s*(?:\\?%|percent\b)", r"\\frac{\1}{100}", text)
    found = parse(text, parsing_timeout=None)
    if found and grader.is_equation(found[0]) and not found[0].free_symbols:
        found[0] = grader.take_last_relation(found[0]).rhs
    if found and isinstance(found[0], Float) and found[0].is_finite:
        near = float(f"{float(found[0]):.15g}")  # 12.000000000000002 of Python is 12
        if near.is_integer():  # math-verify finds a whole number equal to no other float
            found[0] = Integer(int(near))
    return found


def kind(found: list) -> str:
    """"FiniteSet": a set or a list without brackets, of which the order does not count. "ordered":
    a pair, an interval, inequalities or a longer tuple."""
    name = type(getattr(found[0], "rhs", found[0])).__name__ if found else ""
    return "ordered" if name in ("Interval", "Tuple", "And") else name


def bases(text: str) -> list[str]:
    """The bases of its numbers: 4210_{5} has 5. Where none is written it is 10."""
    return sorted(base for base in BASE.findall(text) if base != "10")


def same_units(one: str, other: str) -> bool:
    """Whether what math-verify drops at the ends of two texts can be the same: equal units, one
    that is short for the other, or a unit and nothing. A letter alone may be a variable."""
    short, long = sorted((unit_of(one), unit_of(other)), key=len)
    if not short:
        return len(long) != 1
    return short == long or len(short) < 4 <= len(long) and bool(
        re.match(".*".join(short), long))


def unit_of(text: str) -> str:
    r"""'5\text{ cm}^2' -> 'cm2', '5 square feet' -> 'feet2'"""
    from math_verify.parser import NormalizationConfig, normalize_latex
    whole, rest = (normalize_latex(text, NormalizationConfig(units=units))
                   for units in (False, True))
    unit = re.sub(r"\\[a-z]+|[^a-z0-9\s]", "", whole[len(rest):].lower())
    unit = re.sub(r"^\s*square\s+(.*)", r"\g<1>2", unit)
    return re.sub(r"(?:(?<=ch)e)?s(?=2?$)|\s", "", unit)


def in_box(text: str) -> str:
    """LaTeX for math-verify."""
    return rf"\boxed{{{text.rstrip('. ')}}}"  # it cannot read "18."


def guard_math() -> None:
    """Before the first math_reward."""
    shut_sympy()
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns: no timer
    math_reward(r"\boxed{\frac{1}{2}}", "0.5")  # loads the grammar


def shut_sympy() -> None:
    """Keep sympy from evaluating what a model wrote, unless it is arithmetic."""
    from sympy.parsing import sympy_parser
    stringify = sympy_parser.stringify_expr  # sympy evals what it returns

    def arithmetic_only(*args, **kwargs):
        code = stringify(*args, **kwargs)
        for node in ast.walk(ast.parse(code.strip(), mode="eval")):
            called = getattr(node, "func", None)
            if not isinstance(node, NODES) or called and getattr(called, "id", "") not in CALLS:
                raise ValueError("this is not arithmetic")
        return code

    sympy_parser.stringify_expr = arithmetic_only
