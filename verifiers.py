"""verifiers.py: the built-in rewards: a completion and the row's answer → a number.

--reward names those in REWARDS. A completion is hostile text: parse it, never evaluate it. **row
has the row's columns, prompt, tokens and truncated. The first half reads a number as people and
models write it: `plain` rewrites its many forms (full-width digits, other minus signs, thousands
set apart, powers of ten, fractions, roots), and `number_of` reads a text that is one number and
nothing else.
"""
import ast
import functools
import logging
import math
import re
import unicodedata
from decimal import Decimal
from fractions import Fraction

# ---- numbers ----

SAME = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}  # full-width
SAME |= {ord("°"): r"^{\circ}", ord("∞"): r"\infty"}
SAME |= {code: "-" for code in range(0x10000) if unicodedata.category(chr(code)) == "Pd"}  # dashes
SAME |= str.maketrans("−\u00a0\u2007\u2009\u202f", "-    ")
RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
DIGITS = (r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?!,?[0-9])|[0-9]+)(?:\.[0-9]+)?"
          r"|(?<![A-Za-z0-9)])\.[0-9]+)")
FORM = rf"(?:([0-9]*)\\frac\{{(-?[0-9]+)\}}\{{([0-9]+)\}}|({DIGITS})(?: ?/ ?({DIGITS}))?)"
NUMBER = re.compile(rf"([-+]?)\s*{FORM}\.?")
# 1{,}234, 1\,234, 1 234 or 1'234. A comma alone stays: (1,234) is a pair.
APART = r"\{,\}|,\\!|\\[,;:! ]|['’~]"
THOUSANDS = re.compile(rf"(?<![A-Za-z0-9.,'’])(?<![0-9] )[0-9]{{1,3}}({APART}| )[0-9]{{3}}"
                       r"(?:\1[0-9]{3})*(?![0-9/]|,[0-9]|\1[0-9])")
MIXED = re.compile(r"(?<![A-Za-z0-9.,/])([0-9]+) +([0-9]+)/([0-9]+)(?![0-9./])")
FRAC = re.compile(r"(?:(?<=[0-9])\s+)?\\[dtc]?frac\s*(?:\{\s*(-?[0-9]+)\s*\}|([0-9]))"
                  r"\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))")
POWER = re.compile(r"(?<![A-Za-z0-9.,])([0-9]+(?:\.[0-9]+)?)"
                   r"(?:[eE]|\s*(?:\\times|\\cdot|[×*·x])\s*10\s*(?:\^|\*\*)\s*)"
                   r"(\{\s*)?([-+]?[0-9]{1,3})(?(2)\s*\}|(?![A-Za-z]))(?!\.?[0-9])")


def plain(text: str) -> str:
    r"""'1{,}234' -> '1234', '−2½' -> '-2\frac{1}{2}', '1e-05' -> '0.00001', '√2' -> '\sqrt{2}'."""
    text = text.translate(SAME)
    text = re.sub("[⁰¹²³⁴-⁹⁻⁺]+", lambda m: "^{" + m[0].translate(RAISED) + "}", text)
    text = re.sub("[¼-¾⅐-⅞]", vulgar, text)
    text = MIXED.sub(r"\1\\frac{\2}{\3}", text.replace("⁄", "/"))
    text = FRAC.sub(lambda m: rf"\frac{{{m[1] or m[2]}}}{{{m[3] or m[4]}}}", text)
    text = re.sub(r"√\s*(?:\(([^()]*)\)|([0-9]+|[a-z]))", r"\\sqrt{\1\2}", text)
    text = THOUSANDS.sub(lambda m: re.sub("[^0-9]", "", m[0]), text)
    text = re.sub(rf"(?<=[0-9])(?:{APART})(?=[0-9])", ",", text)  # no thousands: 1\,23
    return POWER.sub(lambda m: f"{Decimal(f'{m[1]}e{m[3]}'):f}", text)


def vulgar(match: re.Match) -> str:
    r"""'½' -> '\frac{1}{2}'"""
    return r"\frac{" + unicodedata.normalize("NFKC", match[0]).replace("⁄", "}{") + "}"


def number_of(text: str) -> Fraction | None:
    """The value of a text that is one number. None: it is none, or it is more."""
    match = NUMBER.fullmatch(plain(text[:1000]).strip())
    return value(*match.groups()) if match and len(text) < 1000 else None


def value(sign: str, whole: str, over: str, under: str, top: str, bottom: str) -> Fraction | None:
    """Of the groups of NUMBER. None: a division by zero."""
    top, bottom = (Fraction((part or "1").replace(",", "")) for part in (top, bottom))
    if over:
        top, bottom = Fraction(over), Fraction(under)
    if not bottom:
        return None
    number = top / bottom + int(whole or 0)
    return -number if sign == "-" else number


# ---- rewards ----

# The names of --reward, and their places: MODULE:FUNCTION.
REWARDS = {
    "exact": "verifiers:exact", "math": "verifiers:math_reward",
    "short": "verifiers:short",
    "format": "examples.formats:format_tags", "format_boxed": "examples.formats:format_boxed",
    "gsm8k": "examples.gsm8k:gsm8k", "kk": "examples.kk:kk",
    "kk01": "examples.kk:kk01", "countdown": "examples.countdown:countdown",
    "reasoning_gym": "examples.reasoning_gym_tasks:score"}
# Called first, in a worker: libraries that would evaluate what a model wrote.
GUARDS = {"math": "verifiers:guard_math",
          "reasoning_gym": "examples.reasoning_gym_tasks:shut_eval"}
# Arithmetic: all that sympy may evaluate.
CALLS = set("Integer Float Rational Symbol factorial sqrt exp log ln Abs sin cos tan cot sec csc "
            "asin acos atan sinh cosh tanh".split())
NODES = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant, ast.Name,
         ast.Load, ast.Call)
# math-verify reads the first part of "36\pi \approx 113", and adds "3 4" up.
BASE = re.compile(r"(?<=[0-9A-Z])_\s*(?:\{\s*)?([0-9]+)")  # of a number: 110_2, 1A_{16}
NOT_ONE = re.compile(r"\\approx|≈|[0-9]\s+[0-9]")


def answers_of(answer) -> list:
    """The right answers of a row: texts and numbers, of which any will do. Else a ValueError."""
    if isinstance(answer, dict):  # Logic-RL's
        answer = answer.get("solution_text_format", answer)
    found = answer if isinstance(answer, list) else [answer]
    if not found or not all(map(is_answer, found)):
        raise ValueError("an answer is a text, a number, or a list of these "
                         f"(got {str(answer)[:100]!r})")
    return found


def is_answer(value) -> bool:
    """Is it a text that is not blank, or a finite number?"""
    if isinstance(value, str):
        return bool(value.strip())
    return type(value) is int or (type(value) in (float, Decimal) and math.isfinite(value))


def any_answer(reward):
    """A reward for one answer → one for all that a row may have. The best counts."""
    @functools.wraps(reward)
    def best(completion, answer, **row):
        return max(reward(completion, one, **row) for one in answers_of(answer))
    return best


def last_boxed(text: str) -> str | None:
    r"""What is in the last \boxed{...} or \fbox{...}, or after \boxed up to a $ or the end of the
    line. None: there is none. "": it is not closed."""
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
    """What is in the last <answer>...</answer>, or None."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>"):end].strip() if start >= 0 else None


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
    last number. A percent is a hundredth: of whole numbers math-verify would drop it."""
    from math_verify import grader, parse
    text = re.sub(r"(?<![0-9.,])([0-9]+)\s*(?:\\?%|percent\b)", r"\\frac{\1}{100}", text)
    found = parse(text, parsing_timeout=None)
    if found and grader.is_equation(found[0]) and not found[0].free_symbols:
        found[0] = grader.take_last_relation(found[0]).rhs
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


@any_answer
def exact(completion, answer, **row):
    """1 if the completion is the answer, else 0. Of a number in the row any form is right; of the
    text "18.0", as pandas writes, also 18."""
    text = str(answer).strip()
    if completion.strip() in (text, re.sub(r"^(-?[0-9]+)\.0$", r"\1", text)):
        return 1.0
    value = None if isinstance(answer, str) else number_of(text)
    return float(value is not None and number_of(completion) == value)


def short(completion, tokens, **row):
    """With `short:0.1` a completion of 2,000 tokens costs 0.2."""
    return -tokens / 1000
