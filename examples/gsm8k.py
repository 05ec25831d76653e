"""GSM8K: word problems of grade school. An answer ends in "#### 72". arxiv.org/abs/2110.14168

    python grpo.py --model Qwen/Qwen2.5-1.5B-Instruct --data openai/gsm8k:main --reward gsm8k

Rows and reward in one file: --data examples/gsm8k.py:rows --eval_data examples/gsm8k.py:held_out.
"""
import re
from fractions import Fraction

from answers import any_answer, last_boxed
from examples.exact import FORM, plain, value

SCALES = {"": 1, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9,
          "trillion": 10**12}
# Not in a word, an index, a power or a root, and not the end of another number: 12:30, 1,23.
FOUND = re.compile(
    r"(?<![A-Za-z\d^])(?<![A-Za-z\d}]_)(?<![_^]\{)(?<![_^]\{-)(?<![\d][.,:/])(?<!sqrt[{(])"
    r"(?:(?<![).}\]])([-+]|(?<=[=:(])\s*-\s+|(?:negative|(?<!\d )minus) )(?=[\d.\\]))?"
    rf"{FORM}(?:[ -]({'|'.join(filter(None, SCALES))})\b)?")
# Then it is only a part of something: of another number, an expression, 2\pi, 2x. 18 m is fine.
GOES_ON = re.compile(
    r"[.,:/_]?\d|[ \t]*(?:[-+*×·÷/x]|\*\*|\\times|\\cdot|\\div)[ \t]*[\d.\\]"
    r"|\s*\^(?!\s*\{?\s*\\circ)|\s*(?:\\pi|\\sqrt|\\frac|π|√)"
    r"|[a-cefi-kn-rt-zKMB](?![A-Za-z])|[eE][-+]?\d")


def rows(seed, split="train"):
    """Yields the rows of a split of openai/gsm8k. The seed changes nothing: --seed orders them."""
    import datasets
    for row in datasets.load_dataset("openai/gsm8k", "main", split=split):
        yield {"prompt": row["question"], "answer": row["answer"]}


def held_out(seed):
    """Yields the rows of the test split."""
    yield from rows(seed, "test")


@any_answer
def gsm8k(completion, answer, **row):
    r"""1 if the number after the last ####, else in the last box, else the last, is right. A number
    that can be read only in part is wrong, and so is a box with several."""
    gold = [read(one) for one in found_in(after_equals(str(answer).rpartition("####")[2]))[-1:]]
    if gold in ([], [None]):
        raise ValueError(f"gsm8k needs a number in the answer (got {answer!r:.200})")
    _, mark, after = completion.rpartition("####")
    boxed = last_boxed(completion)
    if mark:
        given = found_in(after_equals(after.lstrip().partition("\n")[0]))[:1]
    elif boxed is not None:
        given = found_in(after_equals(boxed)) if len(boxed) < 300 else []
    else:
        lines = [line for line in completion.splitlines() if re.search("[0-9０-９¼-¾⅐-⅞]", line)]
        given = found_in(lines[-1])[-1:] if lines else []
    return float({read(one) for one in given} == {*gold})


def last_turn(turns, answer, **row):
    """`gsm8k` of the last turn alone: what a tool said is no answer."""
    return gsm8k(turns[-1]["content"], answer)


def after_equals(text: str) -> str:
    """'x = - 5' -> '-5'"""
    return re.sub(r"^([-+])\s+", r"\1", plain(text).rpartition("=")[2].strip())


def found_in(text: str) -> list[re.Match]:
    return [*FOUND.finditer(re.sub(r"(?<!\d)\\?[$€£¥₹]\s*", "", plain(text)))]


def read(match: re.Match) -> Fraction | None:
    """'$1,234.50' -> 1234.5. None: not read as a whole, as the 10 of '10-5' and '10x'."""
    sign, *parts, scale = match.groups()
    if len(match[0]) > 300 or GOES_ON.match(match.string, match.end()):
        return None
    found = value("-" if (sign or "+").strip() != "+" else "", *parts)
    return None if found is None else found * SCALES[scale or ""]
