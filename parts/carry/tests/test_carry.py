"""Which completions go on in the next step, which are trained on, with which seeds and ages."""
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fakes
import losses
import plan
from data import Stream
from parts.carry import carry
from tables import table


def whole(position: int, i: int) -> int:
    """Tokens of completion i of a prompt, if it may have so many."""
    return [2, 30, 5, 9, 3, 17, 1, 4][(position * 3 + i) % 8]


class Engine:
    """A token is its place, and 99 the end; its log-prob is -step / 8: that of the policy that
    sampled it."""

    def __init__(self, most: int):
        self.most, self.world = most, fakes.World()
        self.log = SimpleNamespace(time=fakes.Log().time, times={"time/rollout": 0.5})

    def complete(self, samples, temperature):
        for s in samples:
            seed, purpose, position, i, *begun = s.seed
            begun, = begun or [0]
            assert (seed, purpose) == (5, "train") and s.ids.tolist() == [*range(begun)]
            n = min(s.room, self.most - begun, whole(position, i) - begun)
            ids = np.arange(begun, begun + n, dtype=np.int32)
            ended = begun + n == whole(position, i) <= self.most
            ids[-1] = 99 if ended else ids[-1]
            s.append(ids, np.full(n, -self.world.step / 8), not ended)


def carry_of(ahead: int, tokens: int, most: int) -> carry.Carry:
    """3 prompts a step, two completions each. An epoch of 10 prompts ends within a step."""
    it = carry.Carry(fakes.args(batch=3, group=2, seed=5, max_tokens=most, carry=ahead,
                                carry_tokens=tokens), Stream(fakes.rows(10), 0))
    it.engine = Engine(most)
    return it


def by_hand(ahead: int, tokens: int, steps: int, most: int) -> list[list[list[int]]]:
    """Plainly: in each step the step of each token, of all completions that it trains on."""
    flight, found, begun = [], [], 0
    for step in range(steps):
        while len(flight) < 6 * (1 + ahead):
            flight += [(min(most, whole(begun, i)), []) for i in (0, 1)]
            begun += 1
        while any(len(made) < n for n, made in flight[:6]):
            for n, made in flight:
                made += [step] * min(tokens, n - len(made))
        found.append([made for _, made in flight[:6]])
        flight = flight[6:]
    return found


@pytest.mark.parametrize("ahead, tokens, most", [
    (0, 32, 32), (1, 4, 32), (2, 4, 10), (1, 7, 32), (3, 32, 32)])
def test_a_step_has_the_oldest_prompts_whenever_they_end(monkeypatch, ahead, tokens, most):
    """No short one overtakes; ages are of the policies that sampled; in the middle the run goes on
    from a checkpoint's JSON. A seed is here what it is made of."""
    monkeypatch.setattr(carry, "hash_seed", lambda *words: words)
    it, data = carry_of(ahead, tokens, most), Stream(fakes.rows(10), 0)
    rows = [prompt.row for _ in range(36) for prompt in data.next(1)]
    for step, expected in enumerate(by_hand(ahead, tokens, 12, most)):
        if step == 5:
            again = carry_of(ahead, tokens, most)
            again.stream.position = it.stream.position
            again.load_state_dict(json.loads(json.dumps(it.state_dict())))
            it = again
        it.engine.world.step = step
        samples = it.sample(it.engine, it.stream.next(3))
        assert [s.prompt.position for s in samples] == [3 * step + k // 2 for k in range(6)]
        for k, (s, steps) in enumerate(zip(samples, expected, strict=True)):
            n = whole(s.prompt.position, k % 2)
            assert s.prompt.row == rows[s.prompt.position]
            assert s.ids.tolist() == ([*range(n - 1), 99] if n <= most else [*range(most)])
            assert s.truncated == (n > most) and s.extras["steps"].tolist() == steps
            assert s.logprobs.tolist() == [-x / 8 for x in steps]
        ages = step - np.concatenate(expected)
        assert it.engine.metrics["carry/old_tokens_frac"] == np.mean(ages > 0)
        assert it.engine.metrics["carry/age_max"] == ages.max()


@pytest.mark.parametrize("flags, words", table("""
carry=1 engine_correction=truncate | fine
carry=1 | --carry needs --engine_correction: older policies
carry=1 engine_correction=truncate stop=('x',) | --stop needs whole completions
carry=9 engine_correction=truncate | --carry must be at least 0 and at most 8"""))
def test_what_does_not_go_with_it_is_one_sentence(refused, flags, words):
    assert refused("grpo", flags, words)


def test_the_plan_has_what_is_in_flight_and_a_resume_keeps_it_as_it_began():
    args = fakes.args(batch=5, group=4, carry=2)
    sizes = plan.Plan(args, 2, 13, 0)
    assert (sizes.in_flight, sizes.requests, sizes.batches) == (15, 30, [5])
    fixed = [{name for name, entry in fakes.made_of(one).items() if entry.fixed}
             for one in (args, fakes.args())]
    assert {"carry", "max_tokens"} <= fixed[0] and "max_tokens" not in fixed[1]


def test_a_real_run_trains_on_positions_in_order(real_run):
    """On two ranks; some tokens are of older policies."""
    metrics, rows = real_run(
        "grpo.py", "--batch 4 --group 3 --carry 1 --carry_tokens 3 --engine_correction truncate "
        "--max_tokens 12 --steps 3 --seed 7 --max_prompt_tokens 64 --no-export")
    assert [row["position"] for row in rows[::3]] == [0, 1, 2, 3, 8, 9, 10, 11]  # of steps 1 and 3
    assert all(len(row["steps"]) == row["tokens"] for row in rows)
    assert max(row["carry/old_tokens_frac"] for row in metrics) > 0


# ---- the bias that an older policy leaves

@pytest.mark.parametrize("kind, first, second", [
    (None, 0.122, 0.028), ("truncate", 0, 0.028), ("sequence_truncate", 0, 0)])
def test_the_bias_that_is_left_in_the_expected_gradient(kind, first, second):
    """An older policy sampled the first of two tokens, of three that each can be. The error, of the
    gradient for the first token and for the second, over all nine completions; no bound acts."""
    draws = torch.Generator().manual_seed(0)
    theta, R = (torch.randn(n, 3, generator=draws, dtype=torch.float64) for n in (4, 3))
    theta.requires_grad_()
    older = theta[0].detach() + 0.3 * torch.randn(3, generator=draws, dtype=torch.float64)
    a, b = torch.cartesian_prod(torch.arange(3), torch.arange(3)).T
    logp = torch.stack([theta[0].log_softmax(-1)[a], theta[1:].log_softmax(-1)[a, b]], 1)  # (9, 2)
    engine = torch.stack([older.log_softmax(-1)[a], logp[:, 1].detach()], 1)
    exact = torch.autograd.grad(logp.sum(1).exp() @ R[a, b], theta, retain_graph=True)[0]
    factors, row = torch.ones(18, dtype=torch.float64), torch.arange(9).repeat_interleave(2)
    if kind:
        factors, _ = losses.engine_correction(
            logp.detach().flatten(), engine.flatten(), row, n_rows=9, kind=kind, low=0, high=9)
    chance = engine.sum(1).exp()
    estimate = (chance * R[a, b] * (factors.view(9, 2) * logp).sum(1)).sum()
    error = torch.autograd.grad(estimate, theta)[0] - exact
    found = [(error[part].norm() / exact[part].norm()).item() for part in (0, slice(1, None))]
    assert found == pytest.approx([first, second], abs=1e-3)
