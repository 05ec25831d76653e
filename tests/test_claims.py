"""Flags are drawn, and each sentence that a rule says of them is read as a claim, which is tried:
of "at least N" N is taken and less is refused; what "would work" works."""
import random
import re
from collections import Counter
from dataclasses import fields
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

import plan
from fakes import SCRIPTS
from flags import NAMES
from settings import changed, groups, ranges, values_of
from shapes import shape_of

SHAPES = [None, shape_of("tiny"), shape_of("Qwen2.5-0.5B")]
FILES = [f"variants/{name}.py:{name}" for name in (
    "sapo gmpo dppo ipo opsm geometric clip_cov lite_ppo maxrl gdpo pass_at_k").split()]
WORDS = {  # of flags that are text
    "loss": [*NAMES["loss"], *FILES, "sapo", "clop", "x.py:f"], "eval_data": [None, "", "x"],
    "advantage": [*NAMES["advantage"], *FILES, "maxrl", "gpro"],
    "reward": [("exact",), ("math", "exact")], "data": ["", "x"],
    "name": [None, "..", "a/b", "tiny-1", "\ud800", "é" * 101, "my-run"], "model": ["", "x"],
    "stop": [("a", ""), ("a",)], "wandb": [None, "", "x"],
    "prompt_template": [None, "", "{question}"]}


def kinds(hint) -> set:
    """The types in a flag's type."""
    return {get_origin(hint) or hint}.union(*map(kinds, get_args(hint)))


def drawable(name: str, hint, allowed, words: dict) -> list:
    """What is drawn for a flag: around the ends of its range, and what nobody may give."""
    if name in words:
        return words[name]
    if get_origin(hint) is Literal:
        return [*get_args(hint)]
    found = kinds(hint)
    if bool in found:
        return [True, False]
    ends = [x + more for x in (allowed.least, allowed.most) if abs(x) < 1e99 for more in (-1, 0, 1)]
    if {tuple, float} <= found:
        return [(x, y) for x in (-0.1, 0.5, 1.0) for y in (0.9, float("nan"))]
    if int in found:
        return [*ends, 2, 3, 12, 1000]
    return [*ends, 0.005, 0.5, 1.5, float("inf")] if float in found else []


def flags_of(script, parts: list[str], words: dict) -> tuple[dict, dict]:
    """{flag: what is drawn for it}, {flag: the types in its type}. Of those of parts the flags of
    these alone are drawn."""
    can, types, args = {}, {}, script.Args()
    left_out = values_of(args.parts).keys() - of_parts(args, parts)
    for group in groups(args):
        hints, allowed = get_type_hints(type(group), include_extras=True), ranges(group)
        for name in (field.name for field in fields(group)):
            types[name] = kinds(hints[name])
            found = [] if name in left_out else drawable(name, hints[name], allowed[name], words)
            can |= {name: found} if found else {}
    return can, types


def of_parts(args, parts: list[str]) -> set[str]:
    """The names of their flags, of those that are here."""
    return {name for part in parts if hasattr(args.parts, part)
            for name in values_of(getattr(args.parts, part))}


class Setting:
    """Drawn flags on drawn ranks, with rows and a model's sizes. own: one of them, or more."""

    def __init__(self, script, seed: int, can: dict, types: dict, own: set[str]):
        rng, args = random.Random(seed), script.Args()
        self.default, self.can, self.kinds = values_of(args), can, types
        drawn = rng.sample(sorted(self.can), rng.randint(1, 14))
        if own:
            drawn.append(rng.choice(sorted(self.can.keys() & own)))
        self.args = changed(args, **{name: rng.choice(self.can[name]) for name in drawn})
        self.ranks = rng.choice([1, 2, 4, 6, 8])
        self.n_rows, self.shape = rng.choice([None, 40, 1000]), rng.choice(SHAPES)
        self.local_size = rng.choice([None, self.ranks, max(1, self.ranks // 2)])

    def said(self, **changes) -> dict[str, str]:
        """{a sentence without its numbers: the sentence}, of these flags with some changes."""
        found = plan.problems(changed(self.args, **changes), self.ranks, self.n_rows, 0,
                              self.shape, self.local_size)
        return {re.sub(r"\(got .*?\)+(?=[.:])|-?\d[\d,.e-]*", "#", text): text for text in found}

    def number(self, name: str, text: str, more: int = 0):
        """What a sentence says, and a little more or less, as the flag has it."""
        value, whole = float(text.replace(",", "")), int in self.kinds[name]
        value = int(value) + more if whole else value + more / 1000
        return (value, value) if tuple in self.kinds[name] else value


def claims(text: str, setting: Setting) -> list[tuple[dict, bool]]:
    """Of a sentence: changes of flags, and whether it is still said after them."""
    found, default, can = [], setting.default, setting.can
    for x, y, n in re.findall(r"--(\w+) x --(\w+)(?: must be)? (\d+)(?= or |[ ,.])", text):
        if "must be" in text or f"work: --{x}" in text:
            found.append(({x: int(n), y: 1}, False))
    for x, words, n in re.findall(
            r"(?<! x )--(\w+) must be (at least |at most |more than |below |)(?:--\w+ )?"
            r"(\d[\d,.e-]*\d|\d)", text):
        if x not in WORDS:
            right, wrong = {"at least ": (0, -1), "at most ": (0, 1), "more than ": (1, 0),
                            "below ": (-1, 0), "": (0, None)}[words]
            found.append(({x: setting.number(x, n, right)}, False))
            found += [({x: setting.number(x, n, wrong)}, True)] if words else []
    for x, value in re.findall(r": --(\w+) (\S+?)(?=[.,]$|[.,] )", text):
        if x in can and "FILE" not in value:
            known = [v for v in (*can[x], default[x]) if value in (str(v), *as_words(v))]
            found.append(({x: known[0] if known else setting.number(x, value)}, False))
    for names in re.findall(r"(?:needs?|work: with) (--\w+(?: and --\w+)?)", text):
        found.append(({x: next(filter(on, can[x])) for x in re.findall(r"\w+", names)
                       if x in can}, False))
    for x in re.findall(r"--(\w+) (?:or .*)?must be given", text):
        found.append(({x: next(filter(on, can[x]))}, False))
    if "must not be empty" in text:
        x = re.match(r"--(\w+)", text)[1]
        found.append(({x: next(v for v in can[x] if v and "" not in as_words(v))}, False))
    named = [x for x in re.findall(r"--(\w+)", text) if x in can]
    if re.search(r"\bone of them", text):
        return found + [({x: default[x]}, False) for x in named]
    return found or [({x: default[x] for x in named}, False)]


def as_words(value) -> tuple:
    return value if isinstance(value, tuple) else ()


def on(value) -> bool:
    """Whether it turns something on."""
    return value not in (None, "", "none", 0, -1)


@pytest.mark.parametrize("script, least", [("grpo", 89), ("ppo", 87)])
def test_what_a_rule_says_is_true(script, least):
    true(SCRIPTS[script], least)


def true(script, least: int, *parts: str, **words):
    """What is said is true. And no rule went missing: at least so many kinds of sentences are said;
    with parts, those that name a flag of the first one. The flags of the others are drawn too.
    words: what is drawn for flags that are text."""
    if parts:  # wrong names are the core's matter
        words = {name: [*NAMES[name], *FILES] for name in ("advantage", "loss")} | words
    tried, known = Counter(), flags_of(script, parts, WORDS | words)
    own = of_parts(script.Args(), parts[:1])
    for seed in range(250):
        look(Setting(script, seed, *known, own), tried)
    found = [kind for kind in tried if not parts or own & {*re.findall(r"--(\w+)", kind)}]
    assert len(found) >= least, len(found)


def look(setting, tried: Counter):
    """Tries the claims of a setting's sentences."""
    for kind, text in setting.said().items():
        tried[kind] += 1
        for change, still in claims(text, setting) if tried[kind] <= 3 else []:
            assert (kind in setting.said(**change)) == still, (text, change, setting.args)
