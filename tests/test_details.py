"""Details of docs/learn/details.md that no other test sees."""
import itertools
from types import SimpleNamespace

import pytest
import torch

import evaluate
import fakes
import grpo
import learning
import model
import test_packing
from batch import Batch, Micro
from rollout import Engine, hash_seed


def test_log_probs_are_at_least_float32():
    module = model.LogprobModel(test_packing.small().bfloat16(), grpo.Args())
    module.lm.set_attn_implementation("packed")
    micro = Micro(Batch(learning.fabricate("plain", 1)), [0, 1], torch.device("cpu"))
    logprobs, _ = module(micro.inputs, micro.source, micro.targets, 1.0, False)
    assert logprobs.dtype == torch.float32


@pytest.mark.parametrize("gradient", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_not_applied(gradient):
    layer = torch.nn.Linear(2, 1)
    trained = model.Trained(layer, fakes.World(), fakes.args())
    before = [p.detach().clone() for p in layer.parameters()]
    layer.weight.grad, layer.bias.grad = torch.tensor([[gradient, 1.0]]), torch.ones(1)
    assert not trained.step(0.1) < float("inf") and layer.weight.grad is None
    assert all(torch.equal(p, q) for p, q in zip(layer.parameters(), before, strict=True))


def test_the_optimizer_uses_the_rate_it_is_given():
    """In another project the rate in the log was not the optimizer's."""
    layer, own = torch.nn.Linear(3, 1, bias=False), fakes.args(betas=(0.0, 0.0))
    trained = model.Trained(layer, fakes.World(), own)
    before = layer.weight.detach().clone()
    trained.backward(layer(torch.ones(1, 3)).sum())
    trained.step(0.25)  # Adam's first step is lr · sign(gradient)
    assert torch.allclose(before - layer.weight, torch.full((1, 3), 0.25), atol=1e-6)


def test_the_end_token_is_trained_on_and_each_completion_has_its_own_seed():
    """Neighbours with seed + i share streams."""
    done = SimpleNamespace(token_ids=[5, 6, 2], logprobs=SimpleNamespace(logprobs=[-0.5] * 3),
                           finish_reason="stop", routed_experts=None)
    assert Engine.completion(None, done).ids.tolist() == [5, 6, 2]
    assert len({hash_seed(0, "train", p, i) for p in range(64) for i in range(8)}) == 512


@pytest.mark.parametrize("n, correct", [(4, 1), (5, 3), (5, 0)])
def test_pass_at_k_is_unbiased(n, correct):
    """It is the share of all k-subsets with a correct one."""
    for k in range(1, n + 1):
        subsets = [min(s) < correct for s in itertools.combinations(range(n), k)]
        assert evaluate.pass_at_k(n, correct, k) == pytest.approx(sum(subsets) / len(subsets))
