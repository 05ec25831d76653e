"""Flags are drawn, and each sentence that a rule says of them is read as a claim, which is tried:
of "at least N" N is taken and less is refused; what "would work" works. No sentence is typed here,
so a rule of any component is tried."""
import random
import re
from collections import Counter
from dataclasses import fields, replace
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

import plan
from fakes import SCRIPTS
from flags import NAMES
from settings import ranges, sections
from shapes import shape_of

SHAPES = [None, shape_of("tiny"), shape_of("Qwen2.5-0.5B")]
FILES = [f"variants/{name}.py:{name}" for name in (
    "sapo gmpo dppo ipo opsm geometric clip_cov lite_ppo maxrl gdpo pass_at_k").split()]
WORDS = {  # of flags that are text
    "loss": [*NAMES["loss"], *FILES, "sapo", "clop", "x.py:f"], "eval_data": [None, "", "x"],
    "advantage": [*NAMES["advantage"], *FILES, "maxrl", "gpro"],
    "reward": [("exact",), ("math", "exact")], "data": ["", "x"],
    "name": [None, "..", "a/b", "tiny-1", "\ud800", "é" * 101, "my-run"], "model": ["", "x"],
    "stop": [("a", ""), ("a",)],
    "prompt_template": [None, "", "{question}"]}


def kinds(hint) -> set:
    """The types in a flag's type."""
    return {get_origin(hint) or hint}.union(*map(kinds, get_args(hint)))


def drawable(hint, allowed) -> list:
    """What is drawn for a flag: around the ends of its range, and what nobody may give."""
    found = kinds(hint)
    if get_origin(hint) is Literal:
        return [*get_args(hint)]
    if bool in found:
        return [True, False]
    ends = [x + more for x in (allowed.least, allowed.most) if abs(x) < 1e99 for more in (-1, 0, 1)]
    if {tuple, float} <= found:
        return [(x, y) for x in (-0.1, 0.5, 1.0) for y in (0.9, float("nan"))]
    if int in found:
        return [*ends, 2, 3, 12, 1000]
    return [*ends, 0.005, 0.5, 1.5, float("inf")] if float in found else []


class Flags:
    """The flags of a script. can: what is drawn for each; kinds: the types in its type."""

    def __init__(self, args):
        self.default, self.can, self.kinds = vars(args), {}, {}
        hints, allowed = get_type_hints(type(args), include_extras=True), ranges(args)
        of_parts = {field.name for section in sections(args) for field in fields(section)
                    if type(section).__module__.startswith("parts.")}
        for name in vars(args):
            self.kinds[name] = kinds(hints[name])
            found = WORDS.get(name) or drawable(hints[name], allowed[name])
            if found and name not in of_parts:  # their rules are tried beside them
                self.can[name] = found

    def number(self, name: str, text: str, more: int):
        """What a sentence says, and a little more or less, as the flag has it."""
        value, whole = float(text.replace(",", "")), int in self.kinds[name]
        value = int(value) + more if whole else value + more / 1000
        return (value, value) if tuple in self.kinds[name] else value

    def on(self, name: str):
        """The first value that turns something on."""
        return next(v for v in self.can[name] if v not in (None, "", "none", 0, -1))


class Setting:
    """Drawn flags on drawn ranks, with rows and a model's sizes."""

    def __init__(self, script, seed: int, can: dict):
        rng = random.Random(seed)
        self.args = replace(script.Args(), **{name: rng.choice(can[name]) for name in rng.sample(
            sorted(can), rng.randint(1, 14))})
        self.ranks = rng.choice([1, 2, 4, 6, 8])
        self.n_rows, self.shape = rng.choice([None, 40, 1000]), rng.choice(SHAPES)
        self.local_size = rng.choice([None, self.ranks, max(1, self.ranks // 2)])

    def said(self, **changes) -> dict[str, str]:
        """{a sentence without its numbers: the sentence}, of these flags with some changes."""
        found = plan.problems(replace(self.args, **changes), self.ranks, self.n_rows, 0,
                              self.shape, self.local_size)
        return {re.sub(r"\(got .*?\)+(?=[.:])|-?\d[\d,.e-]*", "#", text): text for text in found}


def claims(text: str, flags: Flags) -> list[tuple[dict, bool]]:
    """Of a sentence: changes of flags, and whether it is still said after them."""
    found, can, default = [], flags.can, flags.default
    for x, y, n in re.findall(r"--(\w+) x --(\w+)(?: must be)? (\d+)(?= or |[ ,.])", text):
        if "must be" in text or f"work: --{x}" in text:
            found.append(({x: int(n), y: 1}, False))
    for x, words, n in re.findall(
            r"(?<! x )--(\w+) must be (at least |at most |more than |below |)(?:--\w+ )?"
            r"(\d[\d,.e-]*\d|\d)", text):
        if x not in WORDS:
            right, wrong = {"at least ": (0, -1), "at most ": (0, 1), "more than ": (1, 0),
                            "below ": (-1, 0), "": (0, None)}[words]
            found.append(({x: flags.number(x, n, right)}, False))
            found += [({x: flags.number(x, n, wrong)}, True)] if words else []
    for x, value in re.findall(r": --(\w+) (\S+?)(?=[.,]$|[.,] )", text):
        if x in can and "FILE" not in value:
            known = [v for v in (*can[x], default[x]) if value in (str(v), *as_words(v))]
            found.append(({x: known[0] if known else flags.number(x, value, 0)}, False))
    for names in re.findall(r"(?:needs?|work: with) (--\w+(?: and --\w+)?)", text):
        found.append(({x: flags.on(x) for x in re.findall(r"\w+", names) if x in can}, False))
    for x in re.findall(r"--(\w+) (?:or .*)?must be given", text):
        found.append(({x: flags.on(x)}, False))
    if "must not be empty" in text:
        x = re.match(r"--(\w+)", text)[1]
        found.append(({x: next(v for v in can[x] if v and "" not in as_words(v))}, False))
    named = [x for x in re.findall(r"--(\w+)", text) if x in can]
    if re.search(r"\bone of them", text):
        return found + [({x: default[x]}, False) for x in named]
    return found or [({x: default[x] for x in named}, False)]


def as_words(value) -> tuple:
    return value if isinstance(value, tuple) else ()


@pytest.mark.parametrize("script, least", [("grpo", 89), ("ppo", 86)])
@pytest.mark.parametrize("first", [0, *(pytest.param(250 * i, marks=pytest.mark.slow)
                                        for i in range(1, 5))])
def test_what_a_rule_says_is_true(script, least, first):
    """And no rule went missing: at least so many kinds of sentences are said."""
    tried, flags = Counter(), Flags(SCRIPTS[script].Args())
    for seed in range(first, first + 250):
        setting = Setting(SCRIPTS[script], seed, flags.can)
        for kind, text in setting.said().items():
            tried[kind] += 1
            for change, still in claims(text, flags) if tried[kind] <= 3 else []:
                assert (kind in setting.said(**change)) == still, (text, change, setting.args)
    assert len(tried) >= least, len(tried)
