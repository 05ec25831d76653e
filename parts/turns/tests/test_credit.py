"""Credit for tokens and turns: what an advantage of a file sees, and the proof of turn_credit.

The proof lists everything. The vocabulary is 3 tokens, of which 2 ends a turn. A turn has at most
two tokens, an episode at most two turns. The environment answers by the first turn, may end the
episode there, and pays for both turns. So there are 37 episodes, and the expectation of an estimate
over all groups of 2 or 3 of them is a sum.
"""
import itertools
import re
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data
import flags
import grpo
import plan
import test_losses
from batch import Batch, Micro, Sample
from errors import SettingsError
from parts.turns.turn_credit import turns_of
from parts.turns.turns import Turns
from rewards import Score
from settings import changed
from test_losses import F64, close, gradient, variant

CREDIT = "parts/turns/turn_credit.py:turn_credit"
TURNS = [(2,), *itertools.product((0, 1), (0, 1, 2))]  # all that a turn may be
OVER = [(2,), (1, 1)]  # after these first turns the environment ends the episode
EPISODES = [(one,) if one in OVER else (one, two) for one in TURNS
            for two in (TURNS if one not in OVER else [()])]
CONTEXTS = [(), *((one,) for one in TURNS if one not in OVER)]  # before a turn
STATES = [(*context, begun) for context in CONTEXTS for begun in ((), (0,), (1,))]


class World:
    """Its numbers, drawn from a seed: logits (18, 3) of the policy, what is paid for turns, and at
    the end of an episode."""

    def __init__(self, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.theta = torch.tensor(rng.normal(size=(len(STATES), 3)), requires_grad=True)
        self.paid = [[float(x) for x in rng.normal(1, 1, len(episode))] for episode in EPISODES]
        first = {one: float(rng.normal(1, 1)) for one in TURNS}  # known after the first turn
        self.paid = [[first[episode[0]], *paid[1:]]
                     for episode, paid in zip(EPISODES, self.paid, strict=True)]
        self.end = rng.normal(size=len(EPISODES)).tolist()
        samples = []
        for episode, paid, end in zip(EPISODES, self.paid, self.end, strict=True):
            ids, sampled = [], []
            for turn in episode:
                ids, sampled = [*ids, *turn, 9], [*sampled, *[True] * len(turn), False]
            turns = [{"role": "assistant", "paid": x} for x in paid]
            samples.append(Sample(
                data.Prompt(0, data.Row(0, "", [5], None, {}, "")), Turns(
                    np.array(ids[:-1], np.int32), np.zeros(len(ids) - 1, np.float32), False,
                    np.array(sampled[:-1]), turns=turns), "", Score(sum(paid) + end, {}, None)))
        self.batch = Batch(samples)

    def logprobs(self):
        """(M,): of each token of the episodes, one after another."""
        found, logp = [], self.theta.log_softmax(-1)
        for episode in EPISODES:
            for k, turn in enumerate(episode):
                for t, token in enumerate(turn):
                    found.append(logp[STATES.index((*episode[:k], turn[:t])), token])
        return torch.stack(found)

    def chances(self):
        return torch.stack([part.sum() for part in self.batch.split(self.logprobs())]).exp()

    def true_gradient(self):
        """Of the expected reward, by differentiating the probabilities."""
        return gradient(self.chances() @ self.batch.rewards, self.theta)

    def expected(self, estimate, G: int):
        """The mean over all groups of 1/G Σ_i Σ_t A_it ∇log π_it. estimate: as --advantage."""
        index = torch.tensor(list(itertools.product(range(len(EPISODES)), repeat=G)))  # (37^G, G)
        chance = self.chances().detach()[index].prod(1).repeat_interleave(G)
        index, batch = index.flatten(), self.batch
        lengths = batch.tokens[index]
        row = torch.arange(len(index)).repeat_interleave(lengths)
        place = torch.cat([batch.places[i] for i in index.tolist()])
        engine = batch.engine_logprobs[place]
        many = SimpleNamespace(samples=[batch.samples[i] for i in index.tolist()])
        A = estimate(batch.rewards[index], G, scored=torch.ones(len(index), dtype=torch.bool),
                     eps=0.0, parts={"turns": (1.0, None)}, trained=None, row=row, lengths=lengths,
                     batch=many, old_logprobs=engine, engine_logprobs=engine)
        weight = torch.zeros(len(self.logprobs()), dtype=F64).index_add(0, place, A * chance[row])
        return gradient(weight @ self.logprobs() / G, self.theta)

    def bias(self, estimate, G: int) -> float:
        """‖expected estimate - gradient‖ / ‖gradient‖"""
        true = self.true_gradient()
        return float((self.expected(estimate, G) - true).norm() / true.norm())


def turn_credit():
    return flags.own("advantage", CREDIT).function


@cache
def world(seed: int = 0) -> World:
    return World(seed)


def test_the_episodes_are_all_of_them():
    assert len(EPISODES) == 37
    assert float(world().chances().sum().detach()) == pytest.approx(1, abs=1e-14)


@pytest.mark.parametrize("G", [2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_expected_estimate_is_the_gradient(seed, G):
    assert world(seed).bias(turn_credit(), G) < 1e-12


# ---- what an advantage of a file sees

def batch_of(*masks: str, paid=None, text: str = "") -> Batch:
    """A completion of each mask: s is sampled, . is not. paid: of the turns of each."""
    samples = []
    for p, mask in enumerate(masks):
        n, own = len(mask), (paid or [[]] * len(masks))[p]
        turns = [{"role": "assistant", "paid": x} for x in own]
        if turns:  # a reply may take any role
            turns.insert(1, {"role": "assistant", "content": "put in"})
        samples.append(Sample(
            data.Prompt(p // 2, data.Row(p // 2, "", [1, 2], None, {}, "")), Turns(
                np.arange(n, dtype=np.int32), np.arange(n, dtype=np.float32) - 9, False,
                np.array([x == "s" for x in mask]), turns=turns), text, Score(1.0 + p, {
                    "turns": 1.0 + p, "exact": 0.0}, None)))
    return Batch(samples)


def test_the_turns_of_tokens_and_what_they_were_paid():
    batch = batch_of("ss..s", "s", ".s.ss.s", "sss", paid=[[0.5, -1], [], [1, 2, 3], [0]])
    (turn, paid), engine = turns_of(batch), batch.engine_logprobs
    assert [x.tolist() for x in batch.split(turn)] == [[0, 0, 1], [0], [0, 1, 1, 2], [0, 0, 0]]
    assert [x.tolist() for x in batch.split(paid)] == [
        [0, 0.5, -1], [0], [1, 0, 2, 3], [0, 0, 0]]
    assert engine.tolist() == [-9, -8, -5, -9, -8, -6, -5, -3, -9, -8, -7]
    assert paid.dtype == F64


SEES = '''import torch
from parts.turns.turn_credit import turns_of
PER = "{per}"

def f(rewards, group, *, scored, row, lengths, parts, batch, old_logprobs, engine_logprobs,
      **others):
    turn, turn_rewards = turns_of(batch)
    turn_rewards = parts["turns"][0] * turn_rewards if "turns" in parts else 0 * turn_rewards
    assert row.tolist() == torch.arange(4).repeat_interleave(lengths).tolist()
    assert len(turn) == len(turn_rewards) == len(old_logprobs) == len(engine_logprobs) == len(row)
    return {result}

def few(rewards, group, **others):
    return rewards.float()
'''


def advantages(tmp_path, per: str, result: str, batch: Batch, reward=("turns:0.5",), name="f"):
    code = SEES.replace("arange(4)", f"arange({len(batch.samples)})")
    path = tmp_path / f"sees_{len([*tmp_path.iterdir()])}.py"
    path.write_text(code.format(per=per, result=result or None))
    args = changed(grpo.Args(), advantage=f"{path}:{name}", group=2, reward=reward)
    assert args.needs_old_logprobs == (name == "f")
    old = torch.arange(int(batch.tokens.sum())).float()
    return grpo.compute_advantages(args, batch, batch.tokens, old, None)


def test_a_file_says_what_has_one_number(tmp_path):
    """By name: also where the batch has as many tokens as completions."""
    batch = batch_of("ss..s", "s", ".s.ss.s", "sss", paid=[[0.5, -1], [], [1, 2, 3], [0]])
    turns, each = [0, 0, 1, 0, 0, 1, 1, 2, 0, 0, 0], [1, 1, 1, 2, 3, 3, 3, 3, 4, 4, 4]
    for per, result, expected in (
            ("token", "turn_rewards + turn", [0, 0.25, 0.5, 0, 0.5, 1, 2, 3.5, 0, 0, 0]),
            ("token", "turn", turns), ("token", "turn.numpy()", turns),
            ("completion", "rewards", each)):
        A = advantages(tmp_path, per, result, batch)
        assert A.dtype == F64 and A.tolist() == expected
    assert not advantages(tmp_path, "token", "turn_rewards", batch, ("exact",)).any()
    assert advantages(tmp_path, "completion", "", batch, name="few").tolist() == each
    four = batch_of("s", "ss", ".", "s")  # 4 tokens
    for per, expected in (("token", [1, 2, 3, 4]), ("completion", [1, 2, 2, 4])):
        assert advantages(tmp_path, per, "rewards", four).tolist() == expected


@pytest.mark.parametrize("per, result, words", [
    ("token", "rewards", "must return a tensor of 11 finite numbers: its PER is token."),
    ("completion", "turn.double()",
     "must return a tensor of 4 finite numbers: its PER is completion."),
    ("token", "turn.double()[:, None]", "must return a tensor of 11 finite numbers"),
    ("token", "turn / 0.0", "must return a tensor of 11 finite numbers"),
    ("token", "None", "must return a tensor of 11 finite numbers"),
    ("token", "turn.tolist()", "must return a tensor of 11 finite numbers"),
    ("tokens", "turn.double()", "must return a tensor of 4 finite numbers: its PER is tokens.")])
def test_a_file_that_returns_something_else_is_refused(per, result, words, tmp_path):
    batch = batch_of("ss..s", "s", ".s.ss.s", "sss")
    with pytest.raises(SettingsError, match=re.escape(words)):
        advantages(tmp_path, per, result, batch)


def test_one_advantage_a_completion_is_asked_for_in_vain():
    """gmpo has one ratio for a completion. It is known before anything loads."""
    flags = dict(advantage=CREDIT, loss=variant("gmpo"), reward=("turns",),
                 reply="examples/doors.py:Doors")
    found, = plan.problems(changed(grpo.Args(), lr=1e-6, **flags), 1)
    assert "turn_credit.py:turn_credit has an advantage for each token" in found
    flags |= dict(loss="gspo")
    assert plan.problems(changed(grpo.Args(), lr=1e-6, **flags), 1) == []


@pytest.mark.parametrize("flags, words", [
    (dict(name="turn_credit", reward=("exact",)), "no --reward counts it: give --reward turns"),
    (dict(name="turn_credit", reward=("turns",)), "--reward environment or turns needs --reply"),
    (dict(name="turn_credit", reward=("turns",), reply="examples/doors.py:Doors",
          dynamic_sampling=True), "learns from groups of equal rewards too"),
    (dict(name="pass_at_k", group=3), "draws 4 of a group: --group must be at least 5 (got 3)"),
    (dict(name="pass_at_k", overlong_buffer=8), "--overlong_buffer subtracts from them")])
def test_settings_that_do_not_fit_are_one_sentence(flags, words):
    name = flags.pop("name")
    flags["advantage"] = CREDIT if name == "turn_credit" else variant(name)
    found, = plan.problems(changed(grpo.Args(), lr=1e-6, **flags), 1)
    assert words in found


# ---- pass_at_k, clip_cov

def test_pass_at_k_needs_rewards_of_0_and_1_and_its_mean_is_0():
    function, scored = flags.own("advantage", variant("pass_at_k")).function, torch.tensor(
        [True] * 8 + [False] + [True] * 7)
    R = torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0], dtype=F64)
    A = function(R, 8, scored=scored)
    assert close(A.view(2, 8).sum(1), torch.zeros(2, dtype=F64), 1e-14) and A[8] == 0
    assert A[0] > 0 > A[1] and not function(torch.ones(8, dtype=F64), 8, scored=scored[:8]).any()
    assert not function(torch.zeros(8, dtype=F64), 8, scored=scored[:8]).any()
    with pytest.raises(SettingsError, match="is neither 0 nor 1"):
        function(R / 2, 8, scored=scored)


def test_a_draw_is_the_tokens_own():
    """In any order, beside any others, of any epoch."""
    masks = ["ss..s", "s", ".s.ss.s", "sss"]
    batch, device = batch_of(*masks), torch.device("cpu")
    alone = [Micro(batch, [i], device).draws() for i in range(4)]
    assert torch.equal(Micro(batch, [2, 0], device).draws(), torch.cat([alone[2], alone[0]]))
    assert Micro(batch, [], device).draws().shape == (0,)
    every = torch.cat(alone).tolist()
    assert len(set(every)) == len(every) and 0 <= min(every) < max(every) < 1
    assert [len(x) for x in alone] == batch.tokens.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_rewards_that_differ_by_rounding_alone_are_equal(seed):
    def found(rewards) -> float:
        batch = test_losses.batch_of(rewards)
        for sample in batch.samples:
            sample.completion.turns = []  # not paid
        return float(test_losses.of_file(
            CREDIT, rewards, 3, ~rewards.isnan(), 0.0, batch, reward="turns").abs().max())

    rewards = test_losses.nearly_equal(seed)
    assert found(rewards) == 0
    test_losses.make_one_differ(rewards)
    assert found(rewards) > 0
