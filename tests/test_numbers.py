"""A number as it is written has one value for each reward that reads it, and is never half read.
What `math` finds equal is an equivalence. The formats of a completion are their definitions."""
import itertools
import json
import random
import re
from fractions import Fraction
from pathlib import Path

import pytest

import answers
from examples import formats, mathematics
from examples.countdown import countdown
from examples.exact import exact, number_of
from examples.gsm8k import gsm8k
from examples.mathematics import math_reward
from tables import table

APART = ",|{,}|\\,|\\;|\\!| |\u00a0|\u202f|\u2009|'|’".split("|")  # of thousands
MINUS = "-−–‒﹣－—―﹘‐"
TIMES = [r"\times", r" \cdot ", "×", " × ", "·", "x"]
WIDE = str.maketrans("0123456789", "０１２３４５６７８９")
UNITS, = table(r"${} | \${} | {}$ | €{} | {}% | {}\% | {} dollars | {}cm | {}\text{{ apples}} "
               r"| {} m² | {} \text{{cm}}^2 | **{}** | {}.")


@pytest.fixture(autouse=True, scope="module")
def guarded():
    mathematics.guard_math()


def decimal(value: Fraction) -> str:
    """Returns the plain text of a value: '0.25', '1/3'."""
    for digits in range(8):
        if (value * 10**digits).denominator == 1:
            return f"{float(value):.{digits}f}"
    return str(value)


def written(rng: random.Random) -> tuple[str, Fraction]:
    """Returns a number in one of its forms, and its value."""
    n, a, b, e = map(rng.randint, (1000, 1, 2, -5), (9_999_999, 9, 9, 10))
    sep, by, m = rng.choice(APART), rng.choice(TIMES), rng.choice(["1", "3", "2.5", "7.25"])
    vulgar, part = rng.choice([("½", "1/2"), ("¾", "3/4"), ("⅖", "2/5"), ("⅛", "1/8")])
    text, value = rng.choice(table(rf"""
{f"{n:,}".replace(",", sep)} | {n}
{f"{n:,}".replace(",", sep)}.5 | {n}.5
{str(n).translate(WIDE)} | {n}
{n}. | {n}
{n}.0 | {n}
+{n} | {n}
{n} | {n}
{m}e{e} | {m}e{e}
{m}E{e:+03} | {m}e{e}
{m}{by}10^{{{e}}} | {m}e{e}
{m} {by} 10⁵ | {m}e5
\frac{{{a}}}{{{b}}} | {a}/{b}
\dfrac {{ {n} }} {{ {b} }} | {n}/{b}
\frac{a}{b} | {a}/{b}
{a}/{b} | {a}/{b}
{vulgar} | {part}
{a}{vulgar} | {a + Fraction(part)}
{a} {b}/10 | {a}.{b}
{a}\frac{b}{{10}} | {a}.{b}"""))
    if rng.random() < 0.3 and text[0] != "+":
        text, value = rng.choice(MINUS) + text, "-" + value
    return text, Fraction(value)


def wrong(text: str, value: Fraction) -> set[str]:
    """Returns what half a reader would find: a piece of the digits, the other sign, a tenth."""
    runs = re.findall(r"\d+", text)
    pieces = {*map(int, runs), int("".join(["0", *runs])), *(int(run[-3:]) for run in runs)}
    pieces |= {-value, value * 10, value / 10, value + 1}
    return {decimal(Fraction(piece)) for piece in pieces} - {decimal(value)}


def boxed(text: str) -> str:
    return rf"\boxed{{{text}}}"


# A completion and an answer that are the same number: as it is written, with a unit, as plain text.
# A new line is ¶.
SAME = table(r"""
gsm8k | #### {given} | {gold}
gsm8k | \boxed{{{given}}} of 3 | {gold}
gsm8k | It is {given} | {gold}
gsm8k | \fbox{{{text}}} | {gold}
gsm8k | 3 * 4 = 12¶#### x = {text}¶¶5 | {gold}
gsm8k | #### {gold} | 5¶#### {given}
math | \boxed{{2}}, no: \boxed{{{text}}} | {gold}
math | \boxed{{{gold}}} | {text}
""")
REWARDS = {"gsm8k": gsm8k, "math": math_reward}


@pytest.mark.parametrize("count", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_every_reward_reads_the_same_value_and_nobody_half_of_it(count):
    """`exact`, gsm8k, math and countdown pay the value of any form, with any unit, on either side;
    none of them pays what half a reader would find."""
    rng = random.Random(0)
    for _ in range(count):
        text, value = written(rng)
        right, given = decimal(value), rng.choice(UNITS).format(text.removesuffix("."))
        assert number_of(text) == value, text
        if "e" in text.lower():  # gsm8k reads no 1e5cm
            given = given.replace("cm", " cm")
        for gold in [right, *wrong(text, value)]:
            for name, *sides in SAME:
                completion, answer = (side.format(text=text, given=given, gold=gold).replace(
                    "¶", "\n") for side in sides)
                assert REWARDS[name](completion, answer) == (gold == right), (completion, answer)
            if gold != right or "/" not in gold:  # a column of numbers
                assert exact(text, float(Fraction(gold))) == (gold == right), (text, gold)
        if value.denominator == 1:
            sign, size = "−" if value < 0 else "", abs(int(value))
            for form in "{} × ７ ÷ 7", r"{} \times 7 \div 7":
                row = dict(completion=form.format(f"{sign}{size}"), nums=[str(size), 7.0, 7])
                assert countdown(target=text, **row) == 1 > countdown(target=right + "1", **row)
            assert countdown(f"<answer>{sign}{size} ∗ 7</answer>", text, [str(size), 7.0]) == 0


def alike(rng: random.Random) -> list[list[str]]:
    """Returns forms of answers: those of one line are equal, and no others."""
    a, b = sorted(rng.sample(range(2, 50), 2))
    base, other = rng.sample(range(3, 10), 2)
    digits = f"1{rng.getrandbits(5):05b}"
    short, long = rng.choice([("cm", "centimeters"), ("ft", "feet"), ("mm", "millimeters")])
    return table(rf"""
{digits}_{base} | {digits}_{{{base}}}
{digits}_{other}
{digits} | {digits}_{{10}} | {digits}.0
{int(digits, base)}
({a},{b}) | \left({a}, {b}\right) | {a}<x<{b} | x \in ({a},{b})
({b},{a})
[{a},{b}] | {a} \le x \le {b}
({a},{b}]
[{a},{b})
\{{{a},{b}\}} | {a},{b} | {b}, {a} | {b}, {a}, {a}
({a},{b},1)
(1,{b},{a})
({a},{b}),({b},1) | ({b},1), ({a},{b})
{a}\% | {a}% | \frac{{{a}}}{{100}} | {a / 100} | {a} percent
{a}
{b} \text{{ {short}}} | {b} {short} | {b}\mbox{{ {long}}}
{b} \text{{ days}}
{b}\text{{ {short}}}^2 | {b}\text{{ square {short}}}
{b}t
1+{b}={b + 1} | {b + 1}
{a}x-{b}=0
0
\begin{{pmatrix}} {a} \\ {b} \end{{pmatrix}}
\text{{{short}}}
(-\infty, {a}) \cup ({b}, \infty)
(-\infty, {a}] \cup ({b}, \infty)""")


@pytest.mark.parametrize("seeds", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_what_math_finds_equal_is_an_equivalence(seeds):
    """math-verify drops bases, units and the order of a pair, and depends on which is the row's."""
    for seed in range(seeds):
        forms = [(i, text) for i, one in enumerate(alike(random.Random(seed))) for text in one]
        for (i, text), (j, gold) in itertools.product(forms, forms):
            assert math_reward(f"so {boxed(text)}", gold) == (i == j), (text, gold)


EITHER = r"""
864 | 864 \mbox{ inches}^2
90 | 90^\circ
5 | x=5
5.4 | 5.4 \text{ cents}
\$36 | 36
3 \text{ inches} | 3\text{ inch}
90\text{ degrees} | 90^\circ
90° | 90
12.000000000000002 | 12
11.999999999999998 | 12
5² | 25
∞ | \infty
10^{10} | 1e10
√2 | \sqrt2
2√3 | 2\sqrt{3}
∅ | \emptyset
x≤3 | x \le 3
"""
COMPLETIONS = r"""
\boxed{36\pi} | 36\pi \approx 113.1 | 1
\boxed{36\pi \approx 113.1} | 36\pi | 0
It is −5. | -5 | 1
It is 12. | 12.000000000000002 | 1
\boxed{3 4} | 7 | 0
\boxed{1} so \boxed{48} | 1 | 0
\boxed{12 | 12 | 0
\boxed{1_234} | 1 | 0
\boxed{1,23} | 1.23 | 0
\boxed{12.0000001} | 12 | 0
\boxed{1234567890123.5} | 1234567890123 | 0
It is $110_3$. | 110_2 | 0
It is $110_2$. | 110_2 | 1
"""


def test_what_math_reads_and_what_may_be_left_out():
    """A unit, and a name before "=". No base: a number without one is in base 10. A text that
    math-verify takes for words is no answer of a row."""
    for one, other in table(EITHER):
        assert math_reward(boxed(one), other) == math_reward(boxed(other), one) == 1, one
    for completion, gold, paid in table(COMPLETIONS):
        assert math_reward(completion, gold) == int(paid), completion
    for gold in "√π", "∛8", "A∪B":  # of these LaTeX would get 0
        with pytest.raises(ValueError, match=f"no answer in '{gold}': write LaTeX"):
            math_reward(r"\boxed{\sqrt{\pi}}", gold)


MATH500 = Path(__file__).parents[2] / "shared/data/math500/test.jsonl"


@pytest.mark.skipif(not MATH500.is_file(), reason="needs the rows of MATH-500")
def test_each_answer_of_math_500_is_its_own_solutions():
    """Also as the last box of the row's solution."""
    for row in map(json.loads, MATH500.open()):
        for text in boxed(row["answer"]), row["solution"]:
            assert math_reward(text, row["answer"]) == 1, row["answer"]


PARTS = r"""
#### 1.234.567 | 567
12:30 | 30
\boxed{1\,23} | 23
1_234 | 234
1e9999 | 9999
5k | 5
2x | 2
\boxed{2\pi} | 2
2^3 | 3
\boxed{\sqrt{16}} | 16
#### 10-5 | 10
\boxed{5 or 6} | 6
H2O | 2
5 million | 5
negative 5 | 5
x = - 5 | 5
1/2/3 | 3
#### 4 7/10. | 4
1.234,56 | 56
\boxed{12 | 12
\boxed{1}, \boxed{2} | 1
٢5 | 5
"""


@pytest.mark.parametrize("text, gold", table(PARTS))
def test_a_part_of_something_is_not_paid(text, gold):
    """gsm8k reads a number as a whole, or the completion is wrong."""
    assert gsm8k(text, gold) == 0


def test_exact_compares_texts_as_texts_and_the_floats_of_pandas():
    """tiny tasks sort digits: "0123" is not 123."""
    for answer in 18, 18.0, "18.0":
        assert [exact(text, answer) for text in ("18", " 18.0 ", "1", "180")] == [1, 1, 0, 0]
    assert exact("0123", "123") == exact("1,234", "1234") == exact("18.0", "18") == 0


BOXES = r"""
\boxed{1} so \boxed{48} | 48
\fbox{7} | 7
\boxed{a} \fbox{b} | b
$\boxed 7$, so | 7
\boxed {\frac{1}{2}} | \frac{1}{2}
\boxed{\{1\}} | \{1\}
\boxed{\left\{ x \right.} | \left\{ x \right.
"""


def test_the_last_box_counts():
    """Its braces are matched; one that is not closed is empty, and no box is None."""
    for text, box in table(BOXES):
        assert answers.last_boxed(text) == box
    assert answers.last_boxed(r"\boxed{3} \boxed{12") == "" and not answers.last_boxed("no")


def test_the_formats_are_their_definitions():
    """On all short sequences of their pieces: EasyR1's own regular expression, and each tag once,
    in order. A <think> that ends the prompt counts."""
    tags = [*formats.TAGS]
    for parts in itertools.product([*tags, "< / think >", r"\boxed{", "}", " a\n"], repeat=4):
        text, opened = "".join(parts), "".join(["<think>", *parts])
        if text.lstrip().startswith("<think>"):
            opened = text
        assert formats.format_tags(text) == ([it for it in parts if it in tags] == tags)
        for prompt, whole in ("q", text), ("q <think>\n", opened):
            easyr1 = re.sub(r"\s*(<|>|/)\s*", r"\1", whole)
            right = re.fullmatch(r"<think>.*</think>.*\\boxed\{.*\}.*", easyr1, re.DOTALL)
            assert formats.format_boxed(text, prompt=prompt) == bool(right), parts
