"""carry.py: which completions go on, which are trained on, with which seeds and ages."""
import itertools
import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tyro

import grpo
import losses
import test_layouts
from chats.carry import Carry, CarryArgs
from data import Row, Stream
from preflight import plan, rules
from preflight.same_policy import sampled_in
from rollout import Request, hash_seed
from trainer.batch import Completion

END = 99


class Engine:
    """Completion i of a prompt has `length(position, i)` tokens. A token is its place, so a round
    that begins again is seen. The log-prob is -step/8: it tells which policy sampled the token."""

    def __init__(self, length, max_tokens):
        self.length, self.max_tokens, self.asked = length, max_tokens, []
        self.log = SimpleNamespace(phase=lambda name: nullcontext(), times={})
        self.announced = []  # (phase, number of its parts)
        self.world = SimpleNamespace(same_phase=lambda *told: self.announced.append(told), step=0)

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


def made(carry: float, tokens: int, age: int = 0, length=None, max_tokens: int = 32):
    args = SimpleNamespace(batch=3, group=2, seed=5, temperature=0.5, max_tokens=max_tokens,
                           carry_args=CarryArgs(carry, tokens, age))
    stream = Stream([Row(i, "", [i], None, {}, "") for i in range(64)], 0)
    stream.next = lambda n: in_file_order(stream, n)
    return Carry(args, stream, Engine(length or spread, max_tokens))


def in_file_order(stream: Stream, n: int):
    """Positions and rows alike, and at most 10 at a time, as at the end of an epoch."""
    found = [SimpleNamespace(position=stream.position + k, row=stream.rows[stream.position + k])
             for k in range(min(n, 10))]
    stream.position += len(found)
    return found


def spread(position: int, i: int) -> int:
    return [2, 30, 5, 9, 3, 17, 1, 4][(position * 3 + i) % 8]


def steps(it: Carry, n: int) -> list[list]:
    found = []
    for step in range(n):
        it.engine.world.step = step
        found.append(it.sample())
    return found


def by_hand(carry: float, tokens: int, age: int, n: int) -> list[list[tuple[int, int]]]:
    """Plainly: [(position, its first step) of each step's prompts]."""
    flight, next_one, found = [], 0, []  # of (position, started, tokens of its longest)
    for step in range(n):
        def over(g):
            return g[2] >= max(spread(g[0], i) for i in (0, 1))
        while sum(map(over, flight)) < 3 or (age and any(
                step - g[1] >= age and not over(g) for g in flight)):
            while len(flight) < math.ceil(3 * (1 + carry)):
                flight.append([next_one, step, 0])
                next_one += 1
            for g in flight:
                g[2] += tokens
        taken = [g for g in flight if over(g)][:3]
        flight = [g for g in flight if g not in taken]
        found.append([(g[0], g[1]) for g in taken])
    return found


@pytest.mark.parametrize("carry, tokens, age", [
    (0.5, 4, 0), (1.0, 4, 0), (1.0, 4, 1), (0.34, 7, 2)])
def test_a_step_has_the_prompts_that_started_first_of_those_that_have_ended(carry, tokens, age):
    it = made(carry, tokens, age)
    for step, (samples, expected) in enumerate(zip(steps(it, 12), by_hand(carry, tokens, age, 12),
                                                   strict=True)):
        found = [(s.prompt.position, int(s.completion.steps[0])) for s in samples]
        assert found == [one for one in expected for _ in range(2)], f"step {step}"
        for k, s in enumerate(samples):  # whole, once, in order
            n, c = spread(s.prompt.position, k % 2), s.completion
            assert c.ids.tolist() == [*range(n - 1), END] and not c.truncated and c.tokens == n
            assert np.array_equal(c.logprobs, -c.steps.astype(np.float32) / 8)


@pytest.mark.parametrize("age, oldest", [(0, 4), (3, 3), (1, 2)])
def test_nothing_is_dropped_and_a_step_waits_for_what_is_too_old(age, oldest):
    it = made(2.0, 4, age)
    positions, ages = [], []
    for step, samples in enumerate(steps(it, 15)):
        positions += [s.prompt.position for s in samples[::2]]
        ages += [step - int(s.completion.steps[0]) for s in samples]
    left = [group.prompt.position for group in it.flight]
    assert sorted(positions + left) == list(range(it.stream.position))
    assert max(ages) == oldest


def test_a_completion_never_has_more_than_max_tokens_and_is_then_truncated():
    it = made(0.5, 4, max_tokens=10)
    lengths = [(spread(s.prompt.position, k % 2), s.completion)
               for samples in steps(it, 8) for k, s in enumerate(samples)]
    for whole, c in lengths:
        assert len(c.ids) == min(whole, 10) and c.truncated == (whole > 10)
    assert {c.truncated for _, c in lengths} == {True, False}


def test_without_a_prompt_more_a_round_of_all_tokens_is_the_run_without_carry():
    it = made(0.0, 32)
    samples = it.in_place_of(None, it.stream.next(3), 2, 1.0)
    assert [s.prompt.position for s in samples] == [0, 0, 1, 1, 2, 2] and not it.flight
    assert it.engine.asked == [[Request([p], hash_seed(5, "train", p, i), 32)
                                for p in range(3) for i in range(2)]]


def test_metrics_are_those_of_the_trained_tokens():
    it = made(1.0, 4)
    steps(it, 5)
    it.engine.world.step, before = 5, len(it.engine.asked)
    samples = it.sample()
    ages = np.concatenate([5 - s.completion.steps for s in samples])
    firsts = [5 - s.completion.steps[0] for s in samples]
    rounds, found = it.engine.asked[before:], it.engine.log.times
    assert found == {
        "carry/age_mean": np.mean(firsts), "carry/age_max": max(firsts),
        "carry/token_age_mean": ages.mean(), "carry/token_age_max": ages.max(),
        "carry/old_tokens_frac": np.mean(ages > 0), "carry/in_flight": 2 * len(it.flight),
        "rollout/decode_steps": sum(max(len(it.engine.one(r).ids) for r in one) for one in rounds)}
    assert found["carry/old_tokens_frac"] > 0


def test_what_is_in_flight_comes_back_from_a_checkpoint():
    it, again = made(2.0, 4, 3), made(2.0, 4, 3)  # a step waits for what started 3 steps ago
    steps(it, 5)
    again.stream.position = it.stream.position
    again.restore(json.loads(json.dumps(it.state())), it.stream.rows)
    for step in range(5, 10):
        it.engine.world.step = again.engine.world.step = step
        for a, b in zip(it.sample(), again.sample(), strict=True):
            assert a.prompt.position == b.prompt.position
            for name in "ids", "logprobs", "steps":
                x, y = getattr(a.completion, name), getattr(b.completion, name)
                assert x.dtype == y.dtype and np.array_equal(x, y)


# ---- before a run, and before its first update

def planned(*flags: str):
    args = tyro.cli(grpo.Args, args=["--batch", "5", "--group", "4", "--max_tokens", "12", *flags],
                    use_underscores=True, config=(tyro.conf.OmitArgPrefixes,))
    args.lr = 1e-6
    return args


def test_the_plan_knows_what_is_in_flight():
    sizes = plan.Plan(planned("--carry", "0.5", "--carry_tokens", "5"), 2, 13, 0)
    assert sizes.in_flight == 8 and sizes.requests == 16 and sizes.batches == [5]
    assert ("8 prompts in flight, a step trains on 5; rounds of 5 tokens, at most 3 for a "
            "completion") in sizes.text()
    alone = plan.Plan(planned(), 2, 13, 0)
    assert alone.requests == 10 and alone.batches == [5, 3] and "in flight" not in alone.text()


def test_what_does_not_go_with_it_is_one_sentence():
    found = [str(rule) for rule in rules.problems(planned("--carry", "1", "--stop", "x"), 1)]
    for words in ("--engine_correction must be on with --carry", "--stop needs whole completions"):
        assert any(one.startswith(words) and "Would work: " in one for one in found), found


def test_the_engine_is_compared_where_it_has_the_policy_of_now():
    c = Completion(np.arange(4), np.zeros(4, np.float32), False, steps=np.array([2, 2, 3, 3]))
    assert sampled_in(3, c).tolist() == [False, False, True, True]
    assert not sampled_in(4, c).any()
    assert sampled_in(9, Completion(np.arange(3), np.zeros(3, np.float32), False)).all()


# ---- what is exact, and what is biased: every completion of two tokens from a vocabulary of three

def gradient(old, new, reward, kind: str) -> torch.Tensor:
    """The expected gradient in the logits of `new`, of completions whose first token the policy
    `old` sampled and whose second one `new`. Logits: (4, 3), of no token and of each first one."""
    logits = new.clone().requires_grad_()
    p, q = logits.log_softmax(-1), old.log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for a, b in itertools.product(range(3), range(3)):
        logprobs = torch.stack([p[0, a], p[1 + a, b]])
        engine = torch.stack([q[0, a], p[1 + a, b]]).detach()
        A, row = reward[a, b].expand(2), torch.zeros(2, dtype=torch.long)
        factors = 1
        if kind != "none":
            factors, _ = losses.engine_correction(
                logprobs.detach(), engine, row, rows=1, kind=kind, low=0.0, high=1e9)
        loss, _ = losses.clip_loss(logprobs, logprobs.detach(), A, row, clip_low=0.2,
                                   clip_high=0.2, dual_clip=None)
        total = total + engine.sum().exp() * (loss * factors).sum()
    total.backward()
    return logits.grad


def exact(new, reward) -> torch.Tensor:
    logits = new.clone().requires_grad_()
    p = logits.log_softmax(-1)
    value = sum((p[0, a] + p[1 + a, b]).exp() * reward[a, b]
                for a, b in itertools.product(range(3), range(3)))
    (-value).backward()
    return logits.grad


def off(found, true) -> float:
    return float((found - true).norm() / true.norm())


def test_the_bias_of_old_tokens_and_what_each_correction_leaves_of_it():
    """sequence_truncate without a bound is exact. truncate weighs a token by its own ratio alone:
    the first token is exact, and the later one keeps the old prefix."""
    torch.manual_seed(0)
    old, reward = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    new = old + 0.3 * torch.randn(4, 3, dtype=torch.float64)
    true = exact(new, reward)
    assert off(gradient(old, new, reward, "sequence_truncate"), true) < 1e-12
    by_token = gradient(old, new, reward, "truncate")
    assert torch.allclose(by_token[0], true[0], atol=1e-12)  # of the first token
    assert not torch.allclose(by_token[1:], true[1:], atol=1e-3)
    assert off(by_token, true) < off(gradient(old, new, reward, "none"), true)
    assert off(gradient(new, new, reward, "none"), true) < 1e-12  # nothing is old


# ---- the script

FLAGS = ("--steps", "4", "--carry", "0.6", "--carry_tokens", "3", "--engine_correction", "truncate",
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
    assert {row["carry/in_flight"] for row in ran[1]} == {12}  # ceil(5 · 1.6) - 5 prompts, of 4
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
