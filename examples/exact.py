"""Numbers as people and models write them, and the reward `exact`.

`plain` rewrites the many forms of a number: full-width digits; −5 with any minus sign, hyphen or
dash; thousands set apart, as in 1,234 or 1{,}234 or 1 234; 1e10; 3/4, ½ and \\frac12; roots.
`number_of` reads a text that is one number and no more: 1,23 or 12:30 or 2x is none.
"""
import re
import unicodedata
from decimal import Decimal
from fractions import Fraction

from answers import any_answer

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
MIXED = re.compile(r"(?<![A-Za-z0-9.,/])([0-9]+) +([0-9]+)/([0-9]+)(?!\.?[0-9]|/)")
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


@any_answer
def exact(completion, answer, **row):
    """1 if the completion is the answer, else 0. Of a number in the row any form is right; of the
    text "18.0", as pandas writes, also 18."""
    text = str(answer).strip()
    if completion.strip() in (text, re.sub(r"^(-?[0-9]+)\.0$", r"\1", text)):
        return 1.0
    value = None if isinstance(answer, str) else number_of(text)
    return float(value is not None and number_of(completion) == value)
