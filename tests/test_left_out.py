"""What a step leaves out: a completion whose advantages are all 0, and nothing else; its log-probs
are NaN, so that nobody reads them by mistake."""
import math
from types import SimpleNamespace

import pytest
import torch

import fakes
import grpo
import learning
from batch import Batch

V = learning.VOCAB


class Table:
    """A policy with one logit for each id, whatever comes before it. Each optimizer step keeps its
    gradient; `computed` has the rows of each pass with a gradient."""

    def __init__(self, spread: float = 1.0):
        generator = torch.Generator().manual_seed(0)
        self.logits = (spread * torch.randn(V, generator=generator, dtype=torch.float64))
        self.logits.requires_grad_()
        self.metrics, self.gradients, self.computed = {}, [], []

    def logprobs(self, micro, temperature, entropy=False):
        if torch.is_grad_enabled():
            self.computed += micro.rows
        logp = (self.logits / temperature).log_softmax(0)[micro.targets]
        return logp, torch.zeros_like(logp)

    def backward(self, loss):
        loss.backward()

    def step(self, lr):
        gradient, self.logits.grad = self.logits.grad, None
        self.gradients.append(gradient)
        return float(gradient.norm())


# The advantages of a completion's tokens, which are repeated to its length.
TOKENS = {"cancel in pairs": [1.0, -1.0], "cancel in threes": [0.5, 0.5, -1.0],
          "cancel but for rounding": [0.1, 0.2, -0.3], "one token": [0.0, 0.0, 0.0, 0.0, 1.0],
          "tiny": [1e-200], "tiny, and cancel": [1e-200, -1e-200], "below 0": [-1.0]}


@pytest.mark.parametrize("pattern", TOKENS)
@pytest.mark.parametrize("loss", ["clip", "cispo", "reinforce", "gspo"])
def test_a_completion_is_skipped_only_if_each_of_its_advantages_is_0(monkeypatch, pattern, loss):
    """Here every second one. The gradient is that of the formula over all tokens."""
    samples = learning.fabricate("plain", 3)
    batch = Batch(samples)
    rows = [i for i in range(len(samples)) if i % 2 and batch.tokens[i] >= len(TOKENS[pattern])]
    assert len(rows) > 1
    values = torch.tensor(TOKENS[pattern], dtype=torch.float64)
    repeated = [values.repeat(int(n) // len(values) + 1)[:n] for n in batch.tokens]
    if pattern.startswith(("cancel", "tiny, ")):  # only whole repetitions, so the sum is 0
        for A in repeated:
            A[len(A) - len(A) % len(values):] = 0
    advantages = torch.cat([A if i in rows else 0 * A for i, A in enumerate(repeated)])
    sums = batch.sum_tokens(advantages)
    assert not pattern.startswith(("cancel", "tiny, ")) or sums.abs().max() < 1e-15
    monkeypatch.setattr(grpo, "compute_advantages", lambda *_: advantages.clone())

    policy = Table()
    grpo.learn(learning.arguments(loss=loss), fakes.World(), policy, samples, lr=0.1)
    assert sorted(policy.computed) == rows
    other, micro = Table(), SimpleNamespace(
        targets=torch.cat([torch.from_numpy(s.ids).long() for s in samples]), rows=[])
    logp, _ = other.logprobs(micro, 1.0)
    if loss != "gspo":
        (-(advantages * logp).sum() / len(logp)).backward()
        assert torch.allclose(policy.gradients[0], other.logits.grad, rtol=1e-12, atol=0)
    assert policy.gradients[0].abs().max() > 0


@pytest.mark.parametrize("flags", [
    {}, dict(minibatches=2), dict(epochs=2), dict(kl_loss_coef=0.1, kl_estimator="k2"),
    dict(entropy_coef=0.1), dict(advantage="grpo"), dict(loss="tests/often.py:clip_cov")])
def test_terms_that_act_on_all_tokens_skip_none(flags):
    """Rewards are equal, so only these terms act. Without them nothing is computed."""
    policy, reference = Table(), Table(2.0)
    grpo.learn(learning.arguments(**flags), fakes.World(), policy,
               learning.fabricate("equal", 3), lr=0.1, reference=reference)
    acts = flags.keys() & {"kl_loss_coef", "entropy_coef", "loss"}
    assert {*policy.computed} == ({*range(12)} if acts else set())


@pytest.mark.parametrize("among", ["all", None, "odd", "none", "one", "last"])
def test_what_a_score_pass_leaves_out_is_nan(among):
    """And nothing else is; rows with replies have fewer tokens than ids. budget: one row, all."""
    batch = Batch(learning.fabricate("mixed", 6))
    N = len(batch.samples)
    chosen = {"all": [True] * N, None: [True] * N, "odd": [i % 2 == 1 for i in range(N)],
              "none": [False] * N, "one": [i == 5 for i in range(N)],
              "last": [i == N - 1 for i in range(N)]}[among]
    given = None if among is None else torch.tensor(chosen)
    for budget in learning.LONGEST, 1 << 20:
        seen = []

        def forward(micro, seen=seen):
            seen += micro.rows
            return micro.places.double() + 0.5

        found = batch.forward(fakes.World(), budget, "score", forward, given)
        wanted = [place + 0.5 if chosen[i] else math.nan
                  for i, own in enumerate(batch.places) for place in own.tolist()]
        assert torch.equal(found.isnan(), torch.tensor(wanted).isnan())
        assert torch.equal(found.nan_to_num(-1), torch.tensor(wanted).double().nan_to_num(-1))
        assert sorted(seen) == [i for i in range(N) if chosen[i]]


@pytest.mark.parametrize("flags", [dict(minibatches=2), dict(epochs=2), dict(minibatches=3)])
def test_learn_keeps_no_number_of_a_skipped_completion(monkeypatch, flags):
    """log π_old of completions that do not learn is NaN: a use of it would show in the loss."""
    samples, kept, real = learning.fabricate("mixed", 6), [], grpo.logprobs_before

    def spy(*given):
        kept.append((real(*given), given[-1]))
        return kept[-1][0]

    monkeypatch.setattr(grpo, "logprobs_before", spy)
    policy = Table()
    metrics = grpo.learn(learning.arguments(**flags), fakes.World(), policy, samples, lr=0.1)
    ((old, _), learns), = kept
    assert 0 < learns.sum() < len(samples)
    assert torch.equal(old.isnan(), ~Batch(samples).per_token(learns))
    assert metrics["grad/norm_not_finite"] == 0 and all(map(math.isfinite, metrics.values()))
