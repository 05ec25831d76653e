"""Equal completions give the same update and metrics on any number of ranks, with any budgets.

The shipped `grpo.learn` on several numbers of ranks is compared with one rank. test_reference.py
compares one rank with loops over single sequences.
"""
import math
from dataclasses import replace

import pytest
import torch

import ranks
from families import ROUNDINGS
from learning import (
    GROUP,
    LONGEST,
    Case,
    difference,
    learn_all,
    make_models,
    whole,
)

LIMIT = 1e-12                               # in float64
BUDGETS = (LONGEST, 77, 4096)               # exactly one longest sequence; a few; everything


def case(prompts: int, samples: str = "mixed", tied: bool = True, dtype: str = "float64",
         steps: int = 1, shard_size: int = 0, kind=Case, **args) -> Case:
    return kind(prompts, tuple(sorted(args.items())), samples, tied, dtype, steps, shard_size)


def label(c: Case) -> str:
    flags = " ".join(f"{k}={v}" for k, v in c.args)
    return f"{c.prompts} prompts {c.samples} {c.dtype} {c.source} {flags}"


def cross(dtype: str) -> list[Case]:
    """batch × budget × aggregation × minibatches, all of it."""
    return [case(prompts, dtype=dtype, update_tokens=budget, score_tokens=budget + 13,
                 aggregation=aggregation, minibatches=minibatches)
            for prompts in (1, 7, 8) for budget in BUDGETS
            for aggregation in ("token", "sequence", "constant") for minibatches in (1, 3)]


LATIN = [c for i, c in enumerate(cross("float64"))                 # holds each pair of values
         if (i // 18 + i // 6 + i // 2) % 3 == 0 and (i + i // 6) % 2]
SOME = [
    *LATIN,
    *(case(7, dtype=dtype, update_tokens=LONGEST, aggregation="sequence", minibatches=3)
      for dtype in ("float32", "float64")),
    case(7, tied=False, update_tokens=77),
    case(7, kl_loss_coef=0.1, entropy_coef=0.01, minibatches=3, update_tokens=100, score_tokens=50,
         aggregation="sequence"),
    case(7, kl_reward_coef=0.05, advantage="reinforce++", update_tokens=64, score_tokens=96),
    case(8, engine_correction="truncate", correction_high=1.2, advantage="grpo", update_tokens=64,
         score_tokens=96),
    case(3, engine_correction="mask", epochs=2, overlong_filter=True, overlong_buffer=8,
         loss="gspo", aggregation="sequence", update_tokens=40),
    case(3, advantage="reinforce++-baseline", loss="cispo", minibatches=2, epochs=2, steps=2,
         update_tokens=40),
    case(7, kl_loss_coef=0.1, minibatches=3, steps=2, score_tokens=96,
         checkpointing=True, cpu_offload=True),
    case(1, samples="plain", minibatches=3),            # 4 completions in 3 minibatches
    # Weight decay goes on where no completion learns: in all minibatches; in the second one.
    case(3, samples="equal", minibatches=2, weight_decay=0.5, update_tokens=64, score_tokens=96),
    case(7, minibatches=7, epochs=2, weight_decay=0.5, steps=2, update_tokens=77),
    case(2, samples="unscored", minibatches=3),         # nothing to learn from
    case(0, samples="none", minibatches=2),             # --dynamic_sampling that found no group
]


def run_on(sizes, folder: str, cases: list[Case]) -> dict[int, list]:
    """{W: [the case's outcomes on all W ranks, for each case]}"""
    return {size: list(zip(*ranks.results(size, learn_all, folder, cases, timeout=300),
                           strict=True)) for size in sizes}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("models"))
    make_models(None, folder)
    return folder


def limit_of(c: Case, cases: list[Case], one: list) -> float:
    """Of relative differences: in float32 so many times what it rounds on one rank."""
    if c.dtype == "float64":
        return LIMIT
    narrow, wide = (one[cases.index(replace(c, dtype=kind))][0] for kind in ("float32", "float64"))
    pairs = zip([*narrow.gradients, narrow.after], [*wide.gradients, wide.after], strict=True)
    return ROUNDINGS * max(difference(whole([a]), whole([b])) for a, b in pairs)


def same(cases: list[Case], runs: dict[int, list]) -> None:
    """Asserts that the outcomes on W ranks are those on one; prints the largest differences."""
    worst: dict[tuple, float] = {}
    for number, c in enumerate(cases):
        one = runs[1][number]
        before, after = whole([o.before for o in one]), whole([o.after for o in one])
        learnt = any(m["update/steps"] for m in one[0].metrics)
        assert learnt == (c.samples not in ("unscored", "none"))
        assert not learnt or difference(after, before) > 1e-4, "the parameters do not move"
        for size, outcomes in runs.items():
            many, limit = outcomes[number], limit_of(c, cases, runs[1])
            name = f"{label(c)}, {size} ranks"
            assert len(many[0].gradients) == len(one[0].gradients), name
            for k in range(len(one[0].gradients)):
                gap = difference(whole([o.gradients[k] for o in many]),
                                 whole([o.gradients[k] for o in one]))
                key = c.dtype, "gradient", size
                worst[key] = max(worst.get(key, 0), gap)
                assert gap <= limit, f"{name}: gradient {k} differs by {gap:.2g}"
            start, end = whole([o.before for o in many]), whole([o.after for o in many])
            gap, update = difference(end, after), difference(end - start, after - before)
            for what, value in (("parameters", gap), ("update", update)):
                worst[c.dtype, what, size] = max(worst.get((c.dtype, what, size), 0), value)
            assert torch.equal(start, before), name
            assert gap <= limit, f"{name}: parameters differ by {gap:.2g}"
            for theirs in many:                          # every rank has the metrics of one rank
                same_metrics(theirs.metrics, one[0].metrics, 100 * limit, name)
    for (dtype, what, size), value in sorted(worst.items()):
        if size > 1:
            print(f"  {dtype} {what:<10} {size} ranks: differs by at most {value:.1e}, relative")


def same_metrics(theirs: list[dict], ours: list[dict], limit: float, name: str) -> None:
    for a, b in zip(theirs, ours, strict=True):
        assert a.keys() == b.keys(), name
        for key in a:
            assert math.isclose(a[key], b[key], rel_tol=limit, abs_tol=limit), \
                f"{name}: {key} is {a[key]}, on one rank {b[key]}"


def in_two_copies(c: Case, cases: list[Case], one: list, models: str) -> None:
    """--shard_size 2 on 4 ranks: two copies of the weights, each over two ranks. Both copies have
    the gradient of all four ranks, which is that of one rank."""
    outcomes, = run_on((4,), models, [replace(c, shard_size=2)])[4]
    gradient = whole([o.gradients[-1] for o in one[cases.index(c)]])
    for copy in (outcomes[:2], outcomes[2:]):
        assert difference(whole([o.gradients[-1] for o in copy]), gradient) <= 1e-12


def test_same_update_and_metrics_on_any_ranks(models):
    runs = run_on((1, 3), models, SOME)
    same(SOME, runs)
    in_two_copies(case(7, tied=False, update_tokens=77), SOME, runs[1], models)
    # One rank does not depend on its budgets either: cases that differ only in them have equal
    # gradients.
    by_maths: dict[tuple, torch.Tensor] = {}
    for c, outcomes in zip(SOME, runs[1], strict=True):
        if outcomes[0].gradients:
            maths = tuple(a for a in c.args if a[0] not in (
                "update_tokens", "score_tokens", "checkpointing", "cpu_offload"))
            key = c.prompts, c.samples, c.source, maths, c.dtype
            gradient = whole([o.gradients[0] for o in outcomes])
            same_maths = by_maths.setdefault(key, gradient)
            assert difference(gradient, same_maths) <= LIMIT, label(c)
    # The cases do what they should: some rank has nothing to do, and one longest sequence fills the
    # smallest budget.
    cuts = [cut for outcomes in runs[3] for o in outcomes for cut in o.micros]
    assert any(micros == [((), 1)] for _, _, micros in cuts)
    assert any(tokens == LONGEST - 1 == budget - 1 for _, budget, micros in cuts
               for _, tokens in micros)
    # A completion whose advantage is 0 is in no pass, neither of the update nor of a score.
    for outcomes, c in ((runs[size][n], c) for n, c in enumerate(SOME) for size in runs):
        idle = {"equal": range(0, 4), "mixed": (1, 2)}.get(c.samples)  # p % 4: see fabricate
        if idle is None or {"advantage", "kl_reward_coef", "kl_loss_coef", "loss"} & {*c.options}:
            continue
        passes = [(phase, row) for o in outcomes for phase, _, micros in o.micros
                  for rows, _ in micros for row in rows]
        assert c.samples == "equal" or {phase for phase, _ in passes} >= {"update"}
        assert not [row for _, row in passes if row // GROUP % 4 in idle], label(c)
        assert all(math.isfinite(x) for m in outcomes[0].metrics for x in m.values()), label(c)
    # 1 prompt in 3 minibatches: as many optimizer steps on every layout, none of them empty.
    number = SOME.index(case(1, samples="plain", minibatches=3))
    for outcomes in runs.values():
        for o in outcomes[number]:
            assert o.metrics[0]["update/steps"] == 3 and o.metrics[0]["update/skipped"] == 0


@pytest.mark.slow
def test_same_update_whole_cross_product(models):
    cases, across = [*cross("float64"), *cross("float32")], {}
    runs = run_on((1, 2, 3, 4, 5), models, cases)
    same(cases, runs)
    for c, outcomes in zip(cases, runs[1], strict=True):  # and across budgets
        after = whole([o.after for o in outcomes])
        maths = c.dtype, c.prompts, c.options["aggregation"], c.options["minibatches"]
        gap = difference(after, across.setdefault(maths, after))
        assert gap <= limit_of(c, cases, runs[1]), label(c)
