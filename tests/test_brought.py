"""What people bring as rows: each type of Python, each column, each way to write a letter or a name
of a file is read as it is meant, or refused in one sentence that names it."""
import json
import pickle
import unicodedata
from functools import partial

import pytest

from tables import table
from test_rewards import item, score, totals
from test_rows import load, sentence

# ---- types: what a row of FILE.py:NAME holds, and what of it is read

TYPES = """
'a' | "a"
np.str_('a') | "a"
Word.A | "a"
7 | 7
np.int64(7) | 7
np.uint8(7) | 7
np.array(7) | 7
np.array([7])[0] | 7
torch.tensor(7) | 7
Number.A | 7
np.float32(0.5) | 0.5
torch.tensor(0.5, dtype=torch.bfloat16) | 0.5
decimal.Decimal('0.5') | "0.5"
fractions.Fraction(1, 2) | "1/2"
True | true
np.bool_(True) | true
np.array(True) | true
torch.tensor(True) | true
None | null
pd.NA | null
pd.NaT | null
np.datetime64('NaT') | null
datetime.date(2026, 1, 2) | "2026-01-02"
datetime.datetime(2026, 1, 2, 3) | "2026-01-02 03:00:00"
pd.Timestamp(2026, 1, 2) | "2026-01-02 00:00:00"
np.datetime64('2026-01-02') | "2026-01-02"
np.datetime64('2026-01-02T03:00:00.000000000') | "2026-01-02 03:00:00"
np.array(['2026-01-02'], 'M8[ns]') | ["2026-01-02 00:00:00"]
np.timedelta64(90, 'ns') | "0:00:00"
datetime.timedelta(seconds=90) | "0:01:30"
('a', 7) | ["a", 7]
Pair('a', 7) | ["a", 7]
{'b', 'a'} | ["a", "b"]
frozenset([2, 1]) | [1, 2]
range(2) | [0, 1]
np.array([['a', 'b']]) | [["a", "b"]]
torch.tensor([1.5, 2]) | [1.5, 2.0]
pd.Series(['a', None, 3]) | ["a", null, 3]
[np.int64(1), {'k': (np.float64(2), pd.NA)}] | [1, {"k": [2.0, null]}]
{1: np.array([1]), 'b': {'c': {3}}} | {"1": [1], "b": {"c": [3]}}
collections.UserDict(a=1) | {"a": 1}
collections.deque([1, 2]) | [1, 2]
{'a': 1}.keys() | ["a"]
bytearray(b'a') | "b'a'"
memoryview(b'a') | "b'a'"
b'a' | "b'a'"
uuid.UUID(int=5) | "00000000-0000-0000-0000-000000000005"
pathlib.Path('/a/b') | "/a/b"
Own() | Own
Color.RED | Color
Point(1, 2) | Point
lambda: 1 | function
(n for n in [1]) | generator
1j | complex
np.complex64(1) | complex
object | type
re | module
pd.DataFrame([1]) | DataFrame
open('/dev/null') | TextIOWrapper
print | builtin_function_or_method
"""
MAKER = """
import collections, dataclasses, datetime, decimal, enum, fractions, pathlib, re, uuid
import numpy as np, pandas as pd, torch
class Own: pass
class Color(enum.Enum): RED = 1
class Word(str, enum.Enum): A = "a"
class Number(enum.IntEnum): A = 7
Pair = collections.namedtuple("Pair", "x y")
@dataclasses.dataclass
class Point:
    x: int
    y: int
def rows(seed): return [{"prompt": "q"}, {"prompt": "q"} | ROW]
"""
PLACES = {"unread": "{'x': VALUE}", "answer": "{'answer': VALUE}",
          "deep": "{'x': {'y': ['', VALUE]}}"}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value, right", table(TYPES))
def test_a_value_of_any_type_is_read_or_its_row_column_and_type_are_named(
        tmp_path, place, value, right):
    """Python's own value comes to the reward and to the digest, wherever it stands in the row."""
    (tmp_path / "own.py").write_text(MAKER.replace("ROW", PLACES[place].replace("VALUE", value)))
    spec = f"{tmp_path}/own.py:rows"
    if not right[0].isalpha() or right in ("true", "null"):
        (_, row), _ = load(spec)
        found = row.columns.get("x", row.columns.get("answer"))
        found = found["y"][1] if place == "deep" else found
        assert json.loads(json.dumps(found, default=str)) == json.loads(right), found
        assert pickle.loads(pickle.dumps(row)).columns == row.columns
    else:
        said = sentence(load, spec)
        assert f"row 2: its column {'answer' if place == 'answer' else 'x'} holds a {right}" in said


# ---- letters: one letter has several ways to be written

LETTERS = "café Zürich 한국 ἀρχή Ångström naïve Ωmega Đặng".split()
NAMED = {"exact": "{}", "math": r"\text{{{}}}", "kk01": "(1) {} is a knight", "reasoning_gym": "{}"}
SAID = {"exact": " {}\n", "math": r"so \boxed{{\text{{{}}}}}",
        "reasoning_gym": "<answer>{}</answer>",
        "kk01": "<think>a</think><answer>(1) {} is a knight</answer>"}


@pytest.mark.parametrize("reward", NAMED)
def test_a_letter_is_the_same_in_any_form_of_unicode(reward):
    """An é may be one sign or two; Å is also the sign of a unit."""
    forms = [*(partial(unicodedata.normalize, form) for form in ("NFC", "NFD")),
             lambda text: text.replace("Å", unicodedata.lookup("ANGSTROM SIGN"))]
    more = {"metadata": {"source_dataset": "letter_jumble"}} if reward == "reasoning_gym" else {}
    cases = [(NAMED[reward].format(one(word)), SAID[reward].format(other(said)))
             for word in LETTERS for said in (word, word.translate({233: "e", 252: "u", 7841: "a"}))
             for one in forms for other in forms]
    right = [float(unicodedata.normalize("NFC", answer.split()[1] if reward == "kk01" else answer)
                   in unicodedata.normalize("NFC", said)) for answer, said in cases]
    assert 0 < sum(right) < len(right)
    items = [item(said, answer, **more) for answer, said in cases]
    found = totals(score([reward], items, timeout=60.0))
    wrong = [(case, pay) for case, pay, one in zip(cases, found, right, strict=True) if pay != one]
    assert not wrong
