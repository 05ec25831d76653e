"""A number as it is written: one value for each reward that reads it, and never half of it."""
import itertools
import json
import random
import re
from fractions import Fraction
from pathlib import Path

import pytest

import verifiers
from examples import formats, mathematics, numbers
from examples.countdown import countdown
from examples.gsm8k import gsm8k
from examples.numbers import number_of

APART = [",", "{,}", r"\,", r"\;", r",\!", " ", "\u00a0", "\u202f", "\u2009", "'", "’"]
MINUS = ["-", "−", "–", "‒", "﹣", "－"]
TIMES = [r"\times", r" \cdot ", "×", " × ", "·", "x"]
WIDE = str.maketrans("0123456789", "０１２３４５６７８９")
UNITS = ["${}", r"\${}", "${}$", "€{}", "{}%", r"{}\%", "{} dollars", "{}cm", r"{}\text{{ apples}}",
         "{} m²", r"{} \text{{cm}}^2", "**{}**", "{}."]
VULGAR = {"½": Fraction(1, 2), "¾": Fraction(3, 4), "⅖": Fraction(2, 5), "⅛": Fraction(1, 8)}


def decimal(value: Fraction) -> str:
    """The plain text of a value: '0.25', '1/3'."""
    for digits in range(8):
        if (value * 10**digits).denominator == 1:
            return f"{float(value):.{digits}f}"
    return str(value)


def written(rng: random.Random) -> tuple[str, Fraction]:
    """A number in one of its forms, and its value."""
    n, a, b = rng.randint(1000, 9_999_999), rng.randint(1, 9), rng.randint(2, 9)
    sep, e = rng.choice(APART), rng.choice([-5, -2, 3, 5, 10])
    mantissa = rng.choice(["1", "3", "2.5", "7.25"])
    vulgar, part = rng.choice([*VULGAR.items()])
    forms = [
        (f"{n:,}".replace(",", sep), n), (f"{n:,}.5".replace(",", sep), n + Fraction(1, 2)),
        (str(n).translate(WIDE), n), (f"{n}.", n), (f"{n}.0", n), (f"+{n}", n), (str(n), n),
        (f"{mantissa}e{e}", Fraction(mantissa) * Fraction(10) ** e),
        (f"{mantissa}E{e:+03}", Fraction(mantissa) * Fraction(10) ** e),
        (f"{mantissa}{rng.choice(TIMES)}10^{{{e}}}", Fraction(mantissa) * Fraction(10) ** e),
        (f"{mantissa} {rng.choice(TIMES)} 10⁵", Fraction(mantissa) * 10**5),
        (rf"\frac{{{a}}}{{{b}}}", Fraction(a, b)), (rf"\dfrac {{ {n} }} {{ {b} }}", Fraction(n, b)),
        (rf"\frac{a}{b}", Fraction(a, b)), (f"{a}/{b}", Fraction(a, b)), (vulgar, part),
        (f"{a}{vulgar}", a + part), (f"{a} {b}/10", a + Fraction(b, 10)),
        (rf"{a}\frac{b}{{10}}", a + Fraction(b, 10))]
    text, value = rng.choice(forms)
    if rng.random() < 0.3 and text[0] != "+":
        return rng.choice(MINUS) + text, -Fraction(value)
    return text, Fraction(value)


def wrong(text: str, value: Fraction) -> set[str]:
    """What half a reader would find there: a piece of the digits, the other sign, a tenth."""
    runs = re.findall(r"\d+", text)
    pieces = {*map(int, runs), int("".join(["0", *runs])), *(int(run[-3:]) for run in runs)}
    pieces |= {-value, value * 10, value / 10, value + 1}
    return {decimal(Fraction(piece)) for piece in pieces} - {decimal(value)}


@pytest.mark.parametrize("count", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_every_reward_reads_the_same_value_and_nobody_half_of_it(count):
    mathematics.guard_math()
    rng = random.Random(0)
    for _ in range(count):
        text, value = written(rng)
        gold, others = decimal(value), wrong(text, value)
        assert number_of(text) == value, text
        column = int(value) if value.denominator == 1 else float(value)
        if "/" not in gold:  # a column of numbers
            assert numbers.exact(text, column) == 1, text
        given = rng.choice(UNITS).format(text.removesuffix("."))
        whole = [f"#### {given}", rf"\boxed{{{given}}} of 3", f"It is {given}", rf"\fbox{{{text}}}",
                 f"3 * 4 = 12\n#### x = {text}\n\n5"]
        for completion in whole:
            assert gsm8k(completion, f"so\n#### {gold}") == 1, (completion, gold)
            for other in others:
                assert gsm8k(completion, other) == 0, (completion, other)
        assert gsm8k(f"#### {gold}", f"5\n#### {given}") == 1, given
        box = rf"\boxed{{2}}, no: \boxed{{{text}}}"
        assert mathematics.math_reward(box, gold) == 1, (box, gold)
        assert mathematics.math_reward(rf"\boxed{{{gold}}}", text) == 1, (gold, text)
        for other in others:
            assert numbers.exact(text, float(Fraction(other))) == 0, (text, other)
            assert mathematics.math_reward(box, other) == 0, (box, other)
            assert mathematics.math_reward(rf"\boxed{{{other}}}", text) == 0, (other, text)
        if value.denominator == 1:
            sign, size = "−" if value < 0 else "", abs(int(value))
            for completion in (f"{sign}{size} × ７ ÷ 7", rf"{sign}{size} \times 7 \div 7"):
                assert countdown(completion, target=text, nums=[str(size), 7.0, 7]) == 1
                assert countdown(completion, target=float(value) + 1, nums=[size, 7, 7]) == 0
            assert countdown(f"<answer>{sign}{size} ∗ 7</answer>", text, [str(size), 7.0]) == 0


@pytest.mark.parametrize("text, boxed", [
    (r"\boxed{1} so \boxed{48}", "48"), (r"\fbox{7}", "7"), (r"\boxed{a} \fbox{b}", "b"),
    (r"$\boxed 7$, so", "7"), (r"\boxed {\frac{1}{2}}", r"\frac{1}{2}"), ("no", None),
    (r"\boxed{\{1\}}", r"\{1\}"), (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
    (r"\boxed{3} \boxed{12", "")])
def test_the_last_box_counts(text, boxed):
    assert verifiers.last_boxed(text) == boxed


def test_math_reads_a_box_as_easyr1_does():
    mathematics.guard_math()
    math = mathematics.math_reward
    assert math(r"\boxed{36\pi \approx 113.1}", r"36\pi") == 0
    assert math(r"\boxed{36\pi}", r"36\pi \approx 113.1") == 1
    assert math("It is −5.", "-5") == 1 and math(r"\boxed{√2}", r"\sqrt{2}") == 1
    for completion, gold in [(r"\boxed{3 4}", "7"), (r"\boxed{1} so \boxed{48}", "1"), (
            r"\boxed{12", "12"), (r"\boxed{1_234}", "1"), (r"\boxed{1,23}", "1.23")]:
        assert math(completion, gold) == 0, completion
    for sum_of_floats in "12.000000000000002", "11.999999999999998", "12.0":
        assert math(rf"\boxed{{{sum_of_floats}}}", "12") == math("It is 12.", sum_of_floats) == 1
    for close, gold in ("12.0000001", "12"), ("1234567890123.5", "1234567890123"):
        assert math(rf"\boxed{{{close}}}", gold) == 0, close
    for gold, box in {"√2": r"\sqrt2", "½": "0.5", "1e10": "10^{10}", "1e-05": "0.00001",
                      "18.": "18", "2√3": r"2\sqrt{3}", "5²": "25", "90°": "90", "∞": r"\infty",
                      r"\frac { 15 } { 2 }": "7.5"}.items():
        assert math(rf"\boxed{{{box}}}", gold) == 1, gold
    for gold in "√π", "∛8", "A∪B":  # of these LaTeX would get 0
        with pytest.raises(ValueError, match=f"no answer in '{gold}': write LaTeX"):
            math(r"\boxed{\sqrt{\pi}}", gold)
    assert math(r"\boxed{\emptyset}", "∅") == math(r"\boxed{x \le 3}", "x≤3") == 1


def alike(rng: random.Random) -> list[list[str]]:
    """Forms of answers: those of one list are equal, and no others."""
    a, b = sorted(rng.sample(range(2, 50), 2))
    base, other = rng.sample(range(3, 10), 2)
    digits = f"1{rng.getrandbits(5):05b}"
    short, long = rng.choice([("cm", "centimeters"), ("ft", "feet"), ("mm", "millimeters")])
    return [
        [f"{digits}_{base}", f"{digits}_{{{base}}}"], [f"{digits}_{other}"],
        [digits, f"{digits}_{{10}}", f"{digits}.0"], [str(int(digits, base))],
        [f"({a},{b})", rf"\left({a}, {b}\right)", f"{a}<x<{b}", rf"x \in ({a},{b})"],
        [f"({b},{a})"], [f"[{a},{b}]", rf"{a} \le x \le {b}"], [f"({a},{b}]"], [f"[{a},{b})"],
        [rf"\{{{a},{b}\}}", f"{a},{b}", f"{b}, {a}", f"{b}, {a}, {a}"],
        [f"({a},{b},1)"], [f"(1,{b},{a})"], [f"({a},{b}),({b},1)", f"({b},1), ({a},{b})"],
        [rf"{a}\%", f"{a}%", rf"\frac{{{a}}}{{100}}", f"{a / 100}", f"{a} percent"], [str(a)],
        [rf"{b} \text{{ {short}}}", f"{b} {short}", rf"{b}\mbox{{ {long}}}"],
        [rf"{b} \text{{ days}}"], [rf"{b}\text{{ {short}}}^2", rf"{b}\text{{ square {short}}}"],
        [f"{b}t"], [f"1+{b}={b + 1}", str(b + 1)], [f"{a}x-{b}=0"], ["0"],
        [rf"\begin{{pmatrix}} {a} \\ {b} \end{{pmatrix}}"], [rf"\text{{{short}}}"],
        [rf"(-\infty, {a}) \cup ({b}, \infty)"], [rf"(-\infty, {a}] \cup ({b}, \infty)"]]


@pytest.mark.parametrize("seeds", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_what_math_finds_equal_is_an_equivalence(seeds):
    """math-verify drops bases, units and the order of a pair, and depends on which is the row's."""
    mathematics.guard_math()
    for seed in range(seeds):
        forms = [(i, text) for i, one in enumerate(alike(random.Random(seed))) for text in one]
        for (i, text), (j, gold) in itertools.product(forms, forms):
            equal = i == j
            assert mathematics.math_reward(rf"so \boxed{{{text}}}", gold) == equal, (text, gold)


def test_what_may_be_left_out_for_math():
    """A unit, and a name before "=". No base: a number without one is in base 10."""
    mathematics.guard_math()
    for one, other in [("864", r"864 \mbox{ inches}^2"), ("90", r"90^\circ"), ("5", "x=5"), (
            "5.4", r"5.4 \text{ cents}"), (r"\$36", "36"),
            (r"3 \text{ inches}", r"3\text{ inch}"), (r"90\text{ degrees}", r"90^\circ")]:
        for text, gold in ((one, other), (other, one)):
            assert mathematics.math_reward(rf"\boxed{{{text}}}", gold) == 1, (text, gold)
    assert mathematics.math_reward("It is $110_3$.", "110_2") == 0
    assert mathematics.math_reward("It is $110_2$.", "110_2") == 1


MATH500 = Path(__file__).parents[2] / "shared/data/math500/test.jsonl"


@pytest.mark.skipif(not MATH500.is_file(), reason="needs the rows of MATH-500")
def test_each_answer_of_math_500_is_its_own_solutions():
    mathematics.guard_math()
    for row in map(json.loads, MATH500.open()):
        for text in rf"\boxed{{{row['answer']}}}", row["solution"]:
            assert mathematics.math_reward(text, row["answer"]) == 1, row["answer"]


@pytest.mark.parametrize("text, gold", [
    ("#### 1.234.567", "567"), ("12:30", "30"), (r"\boxed{1\,23}", "23"), ("1_234", "234"),
    ("1e9999", "9999"), ("5k", "5"), ("2x", "2"), (r"\boxed{2\pi}", "2"), ("2^3", "3"),
    (r"\boxed{\sqrt{16}}", "16"), ("#### 10-5", "10"), (r"\boxed{5 or 6}", "6"), ("H2O", "2"),
    ("5 million", "5"), ("negative 5", "5"), ("x = - 5", "5"), ("1/2/3", "3"), ("1.234,56", "56"),
    (r"\boxed{12", "12"), (r"\boxed{1}, \boxed{2}", "1"), ("٢5", "5")])
def test_a_part_of_something_is_not_paid(text, gold):
    assert gsm8k(text, gold) == 0


def test_exact_and_the_floats_of_pandas():
    exact = numbers.exact
    for answer in 18, 18.0, "18.0":
        found = [exact(text, answer) for text in ("18", " 18.0 ", "1", "8", "180")]
        assert found == [1, 1, 0, 0, 0], answer
    # A text is compared as text: tiny tasks sort digits.
    assert exact("0123", "123") == exact("1,234", "1234") == exact("18.0", "18") == 0


@pytest.mark.parametrize("text, value", [
    (r"<think>a</think> so \boxed{1}", 1), (r"< think >a< / think >\boxed{1} bye", 1),
    (r"\boxed{1}<think>a</think>", 0), (r"<think>\boxed{1}</think> so 1", 0),
    (r"so <think>a</think>\boxed{1}", 0), (r"<think>a</think>\boxed{1", 0), (
        r"<think>a \boxed{1}", 0), (r" <think>a</think></think>\boxed{{}}", 1)])
def test_the_format_of_easyr1(text, value):
    """The value is that of its own regular expression."""
    easyr1 = re.sub(r"\s*(<|>|/)\s*", r"\1", text)
    assert bool(re.fullmatch(r"<think>.*</think>.*\\boxed\{.*\}.*", easyr1, re.DOTALL)) == value
    assert formats.format_boxed(text) == value
    opened = text.removeprefix("<think>")
    assert formats.format_boxed(opened, prompt="q <think>\n") == max(value, opened[:2] == "so")


def test_any_dash_before_a_number_is_a_minus():
    from examples.gsm8k import gsm8k
    from examples.numbers import exact
    for dash in "—―﹘－−–‐":
        assert gsm8k(f"#### {dash}5", "-5") == exact(f"{dash}5", -5) == 1
        assert gsm8k(f"#### {dash}5", "5") == exact(f"{dash}5", 5) == 0
