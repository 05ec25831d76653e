"""carry.py: which completions go on, which are trained on, with which seeds and ages."""
import json
import math
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tyro

import checkpoint
import fakes
import grpo
import log
import plan
import test_layouts
from batch import Completion
from data import Row, Stream
from errors import SettingsError
from parts.carry.carry import Carried, Carry, CarryArgs
from rollout import Request, hash_seed
from settings import changed

END = 99


class Engine:
    """Completion i of a prompt has `length(position, i)` tokens. A token is its place, so a round
    that begins again is seen. The log-prob is -step/8: it tells which policy sampled the token."""

    def __init__(self, length, max_tokens):
        self.length, self.max_tokens, self.asked = length, max_tokens, []
        self.log = SimpleNamespace(time=self.time, times=defaultdict(float))
        self.announced = []  # (phase, number of its parts)
        self.world = SimpleNamespace(same_phase=lambda *told: self.announced.append(told), step=0)

    @contextmanager
    def time(self, name: str):
        yield
        self.log.times[f"time/{name}"] += 0.5

    def complete(self, requests: list[Request], temperature: float) -> list[Completion]:
        self.asked.append(requests)
        assert self.announced == [("rollout", len(asked)) for asked in self.asked]
        return [self.one(request) for request in requests]

    def one(self, request: Request) -> Completion:
        position, i, begun = SEEDS[request.seed]
        assert request.prompt_ids[0] == position and len(request.prompt_ids) - 1 == begun
        whole = self.length(position, i)
        n = min(request.room, whole - begun)
        ids = np.arange(begun, begun + n)
        if begun + n == whole and whole <= self.max_tokens:
            ids[-1] = END
        cut = ids[-1] != END
        logprobs = np.full(n, -self.world.step / 8, np.float32)
        return Completion(ids.astype(np.int32), logprobs, bool(cut))


SEEDS = {hash_seed(5, "train", position, i, *begun): (position, i, begun[0] if begun else 0)
         for position in range(64) for i in range(2) for begun in [(), *((n,) for n in range(40))]}


def made(carry: int, tokens: int, length=None, max_tokens: int = 32):
    args = SimpleNamespace(batch=3, group=2, seed=5, temperature=0.5, max_tokens=max_tokens,
                           parts=SimpleNamespace(carry=CarryArgs(carry, tokens)))
    stream = Stream([Row(i, "", [i], None, {}, "") for i in range(64)], 0)
    stream.next = lambda n: in_file_order(stream, n)
    it = Carry(args, stream)
    it.engine = Engine(length or spread, max_tokens)
    return it


def in_file_order(stream: Stream, n: int):
    """Positions and rows alike, and at most 10 at a time, as at the end of an epoch."""
    found = [SimpleNamespace(position=stream.position + k, row=stream.rows[stream.position + k])
             for k in range(min(n, 10))]
    stream.position += len(found)
    return found


def spread(position: int, i: int) -> int:
    return [2, 30, 5, 9, 3, 17, 1, 4][(position * 3 + i) % 8]


def one_step(it: Carry, step: int) -> list:
    it.engine.log.times.clear()
    it.engine.world.step = step
    return it.sample(it.engine, it.stream.next(3))


def steps(it: Carry, n: int) -> list[list]:
    return [one_step(it, step) for step in range(n)]


def by_hand(carry: int, tokens: int, n: int, most: int) -> list[list[list[int]]]:
    """Plainly: the step of each token, of both completions of a prompt, in each step's prompts."""
    flight, found = [], []  # of (whole length, steps of its tokens so far), two a prompt
    for step in range(n):
        while len(flight) < 3 * (1 + carry):
            position = 3 * step + len(flight)
            flight.append([[min(most, spread(position, i)), []] for i in (0, 1)])
        while any(len(made) < whole for prompt in flight[:3] for whole, made in prompt):
            for prompt in flight:
                for one in prompt:
                    one[1] += [step] * min(tokens, one[0] - len(one[1]))
        found.append([[made for _, made in prompt] for prompt in flight[:3]])
        flight = flight[3:]
    return found


@pytest.mark.parametrize("carry, tokens, most", [(1, 4, 32), (2, 4, 10), (1, 7, 32), (3, 32, 32)])
def test_a_step_has_the_oldest_prompts_whenever_they_end(carry, tokens, most):
    """Which prompts it trains on does not depend on their lengths: no short one overtakes. What
    has `most` tokens and no end is truncated."""
    it = made(carry, tokens, max_tokens=most)
    for step, (samples, expected) in enumerate(zip(steps(it, 12), by_hand(
            carry, tokens, 12, most), strict=True)):
        assert [s.prompt.position for s in samples] == [
            3 * step + k for k in range(3) for _ in (0, 1)]
        for k, s in enumerate(samples):  # whole, once, in order
            n, c = spread(s.prompt.position, k % 2), s.completion
            whole = [*range(n - 1), END] if n <= most else [*range(most)]
            assert c.ids.tolist() == whole and c.tokens == len(whole)
            assert c.truncated == (n > most)
            assert c.steps.tolist() == expected[k // 2][k % 2]
            assert np.array_equal(c.logprobs, -c.steps.astype(np.float32) / 8)
        assert len(it.flight) == 3 * carry


def test_without_a_batch_ahead_a_round_of_all_tokens_is_the_run_without_carry():
    it = made(0, 32)
    samples = one_step(it, 0)
    assert [s.prompt.position for s in samples] == [0, 0, 1, 1, 2, 2] and not it.flight
    assert it.engine.asked == [[Request([p], hash_seed(5, "train", p, i), 32)
                                for p in range(3) for i in range(2)]]


@pytest.mark.parametrize("refills", [0, 2])
def test_metrics_are_those_of_the_tokens_that_a_step_took(refills):
    """Of all its rollouts, with --dynamic_sampling."""
    it = made(1, 4)
    steps(it, 5)
    before = len(it.engine.asked)
    samples = one_step(it, 5)
    for _ in range(refills):
        samples += it.sample(it.engine, it.stream.next(2))  # fewer than a batch
    completions = [s.completion for s in samples]
    ages = np.concatenate([5 - c.steps for c in completions])
    firsts = [5 - c.steps[0] for c in completions]
    rounds, found = it.engine.asked[before:], it.engine.metrics
    drawn = [len(it.engine.one(r).ids) for r in sum(rounds, [])]
    seconds = it.engine.log.times["time/rollout"]
    assert found.pop("rollout/tokens_per_s") == pytest.approx(sum(drawn) / seconds)
    assert sum(drawn) != sum(c.tokens for c in completions)
    assert found == {
        "carry/age_mean": np.mean(firsts), "carry/age_max": max(firsts),
        "carry/token_age_mean": ages.mean(), "carry/token_age_max": ages.max(),
        "carry/old_tokens_frac": np.mean(ages > 0), "carry/in_flight": 2 * len(it.flight),
        "rollout/decode_steps": sum(max(len(it.engine.one(r).ids) for r in one) for one in rounds)}
    assert found["carry/old_tokens_frac"] > 0


def test_a_step_that_generates_nothing_has_no_tokens_per_second():
    """Its prompts had ended in the step before."""
    it = made(1, 32)
    steps(it, 2)
    assert len(it.engine.asked) == 1 and math.isnan(it.engine.metrics["rollout/tokens_per_s"])


def test_what_is_in_flight_comes_back_from_a_checkpoint():
    """Rows keep their index where others are left out for their length."""
    it, again = made(2, 4), made(2, 4)
    for one in it, again:
        one.stream.rows = [replace(row, index=3 * row.index + 1) for row in one.stream.rows]
    steps(it, 5)
    again.stream.position = it.stream.position
    again.load_state_dict(json.loads(json.dumps(it.state_dict())))
    for step in range(5, 10):
        for a, b in zip(one_step(it, step), one_step(again, step), strict=True):
            assert a.prompt.position == b.prompt.position and a.prompt.row == b.prompt.row
            for name in "ids", "logprobs", "steps":
                x, y = getattr(a.completion, name), getattr(b.completion, name)
                assert x.dtype == y.dtype and np.array_equal(x, y)


def test_the_step_that_sampled_a_token_is_a_whole_number():
    """In samples/."""
    it = fakes.sample(1.0, text="ab", advantages=torch.full((3,), -1 / 3))
    it.completion = Carried(**vars(it.completion), steps=np.array([4, 4, 5], np.int32))
    row = json.loads(log.as_lines([log.sample_row(it, lambda ids, **_: "x" * len(ids))]))
    assert row["steps"] == [4, 4, 5] and all(type(step) is int for step in row["steps"])
    assert row["advantages"] == [-0.3333333] * 3


# ---- before a run, and before its first update

def planned(*flags: str):
    args = tyro.cli(grpo.Args, args=["--batch", "5", "--group", "4", "--max_tokens", "12", *flags],
                    use_underscores=True, config=(tyro.conf.OmitArgPrefixes,))
    args.lr = 1e-6
    return args


def test_the_plan_knows_what_is_in_flight():
    sizes = plan.Plan(planned("--carry", "1", "--carry_tokens", "5"), 2, 13, 0)
    assert sizes.in_flight == 10 and sizes.requests == 20 and sizes.batches == [5]
    assert "10 prompts in flight, a step trains on 5" in sizes.text()
    alone = plan.Plan(planned(), 2, 13, 0)
    assert alone.requests == 10 and alone.batches == [5, 3] and "in flight" not in alone.text()


def test_what_does_not_go_with_it_is_one_sentence():
    found = plan.problems(planned("--carry", "1", "--stop", "x"), 1)
    for words in ("--carry needs --engine_correction", "--stop needs whole completions"):
        assert any(one.startswith(words) for one in found), found


# ---- the script

FLAGS = ("--steps", "4", "--carry", "1", "--carry_tokens", "3", "--engine_correction", "truncate",
         "--save_every", "2")


def played(folder, *flags: str, **options) -> tuple[list[str], list[dict]]:
    """What a run samples, and its metrics."""
    folder.mkdir(exist_ok=True)
    (status, text), = test_layouts.launch(folder, *FLAGS, *flags, **options)
    assert status == 0, text[-3000:]
    place, = (path.parent for path in folder.rglob("metrics.jsonl"))
    rows = [json.loads(line) for line in open(place / "metrics.jsonl")]
    return [test_layouts.drawn(file) for file in sorted((place / "samples").iterdir())], rows


def same(ran, one) -> None:
    assert ran[0] == one[0]
    for ours, theirs in zip(ran[1], one[1], strict=True):
        for name in ours:
            if name.startswith(("carry/", "reward/", "grad/", "batch/", "data/", "rollout/decode")):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    ran = played(tmp_path_factory.mktemp("one") / "run")
    assert {row["carry/in_flight"] for row in ran[1]} == {20}  # 5 prompts, of 4
    assert max(row["carry/old_tokens_frac"] for row in ran[1]) > 0.1
    assert any(row["grad/norm"] > 0 for row in ran[1])
    return ran


def test_two_ranks_have_in_flight_what_one_has(tmp_path, one):
    same(played(tmp_path / "run", ranks_each=2), one)


@pytest.mark.slow
def test_an_engine_of_two_ranks_has_in_flight_what_one_rank_has(tmp_path, one):
    same(played(tmp_path / "run", "--tp", "2", ranks_each=2), one)


@pytest.mark.slow
@pytest.mark.parametrize("script, flags", [
    ("grpo.py", "--dynamic_sampling"), ("grpo.py", "--lora_rank 4 --lora_sync adapter"),
    ("ppo.py", "--kl_reward_coef 0.05")])
def test_it_runs_with(tmp_path, script, flags):
    _, rows = played(tmp_path / "run", *flags.split(), script=script, ranks_each=2)
    assert max(row["carry/token_age_max"] for row in rows) > 0
    assert any(row["grad/norm"] > 0 for row in rows)


@pytest.mark.parametrize("was, now, refused", [
    (dict(carry=0, max_tokens=9), dict(carry=1, max_tokens=9), "carry was 0 and is now 1"),
    (dict(carry=1, max_tokens=9), dict(carry=0, max_tokens=9), "carry was 1 and is now 0"),
    (dict(carry=1, max_tokens=9), dict(carry=1, max_tokens=5), "max_tokens was 9 and is now 5"),
    (dict(carry=0, max_tokens=9), dict(carry=0, max_tokens=5), None)])
def test_what_is_in_flight_goes_on_as_it_began(tmp_path, was, now, refused):
    saved = checkpoint.Saved(tmp_path, {"step": 2, "settings": was, "flight": []})
    fixed = checkpoint.fixed(changed(grpo.Args(), **now))
    if refused:
        with pytest.raises(SettingsError, match=refused):
            checkpoint.check(saved, now, fixed=fixed)
    else:
        assert checkpoint.check(saved, now, fixed=fixed).changed == [
            "resumed with max_tokens 5 (was 9) from step 3 on"]
