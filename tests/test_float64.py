"""A packed micro-batch is its single rows, to the last digits, in every family.

test_model.py compares them in float32. Here --dtype float64 must mean it: transformers' own code
rounds to float32 in places.
"""
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen

import batch
import fakes
import families
import model
from batch import Batch, Micro
from families import CASES, batch_of
from learning import difference
from ranks import results
from tools import float64

CPU = torch.device("cpu")


def rows() -> Batch:
    """Two prompts with two completions each. They are longer than the windows of the models."""
    draws = np.random.default_rng(0)

    def ids(n: int) -> list[int]:
        return draws.integers(3, 320, n).tolist()

    return batch_of((ids(80), [ids(24), ids(7)]), (ids(89), [ids(1), ids(16)]))


def packed(world, folder: str) -> tuple:
    """(M,) log-probs of the trainer, and the gradient of their sum, of one micro-batch."""
    args = fakes.args(dtype="float64")
    policy = model.Policy(float64.build(model.LogprobModel, folder, world, args), world, args)
    logprobs, _ = policy.logprobs(Micro(rows(), [*range(4)], CPU), families.HEAT)
    logprobs.sum().backward()
    return logprobs.detach(), {n.removeprefix("lm."): model.whole(p.grad)
                               for n, p in policy.parameters.items()}


def alone(folder: str) -> tuple:
    """(log-probs, gradient) of plain transformers, one row at a time, in wide norms. Every row of
    the embeddings is trained: nothing is padded."""
    lm = families.load(folder, torch.float64)
    for module in lm.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    logprobs = families.single_rows(lm, rows())
    logprobs.sum().backward()
    return logprobs.detach(), {n: p.grad for n, p in lm.named_parameters()}


# Kinds of layers; test_model.py has every family in float32.
SOME = "Llama, tied", "Gemma 2", "Gemma 4", "EXAONE 4", "GPT-2"


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in SOME else pytest.mark.slow) for name in CASES])
def test_packed_rows_are_single_rows(name, tmp_path):
    """Log-probs and gradient are those of plain transformers. config.json names a token of the
    prompts as that of the padding, which torch would leave out of the gradient."""
    token = rows().samples[0].prompt.row.prompt_ids[7]
    families.make(name, str(tmp_path), dict(pad_token_id=token, eos_token_id=token))
    (logprobs, gradient), = results(1, packed, str(tmp_path))
    theirs, their_gradient = alone(str(tmp_path))
    assert logprobs.dtype == torch.float64
    assert (logprobs - theirs).abs().max() < 1e-12
    assert difference(*(torch.cat([g[n].flatten() for n in sorted(their_gradient)])
                        for g in (gradient, their_gradient))) < 1e-12


def plain_varlen(q, k, v, ends_q, ends_k, longest_q, longest_k, *, window_size, **options):
    """torch.nn.attention.varlen.varlen_attn by its documentation, one segment at a time."""
    queries, keys = ends_q.diff().tolist(), ends_k.diff().tolist()
    assert (longest_q, longest_k) == (max(queries), max(keys))
    left, right = window_size  # left: -1 is no window
    assert right == 0
    out = []
    for *parts, n, m in zip(q.split(queries), k.split(keys), v.split(keys), queries, keys,
                            strict=True):
        mask = batch.visible(n, m - n, left + 1 or None, CPU)
        out.append(F.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in parts), attn_mask=mask, **options).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("window", [None, 5])
def test_the_gpu_kernel_gets_the_same_attention(monkeypatch, window):
    """Prompts and completions of unlike lengths, some of nearly one length."""
    monkeypatch.setattr(varlen, "varlen_attn", plain_varlen)
    samples = batch_of(*(([n] * n, [[1] * m for m in lengths]) for n, lengths in (
        (3, (1, 5, 9, 2)), (1, (4,)), (14, (12, 2, 20)), (6, (9, 8, 7)))))
    layout = Micro(samples, [*range(len(samples.samples))], CPU).inputs["packed"]
    q, k, v = (torch.randn(layout.tokens, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    ours, theirs = (way(q, k, v, layout, 0.3, window) for way in (batch.blocks, batch.varlen))
    assert difference(ours, theirs) < 1e-14


def test_a_gradient_that_is_not_finite_is_not_applied():
    """Neither the weights nor AdamW's moments see it."""
    layer = torch.nn.Linear(2, 1, bias=False)
    trained, before = model.Trained(layer, fakes.World(), fakes.args()), layer.weight.clone()
    layer.weight.grad = torch.tensor([[torch.inf, 1.0]])
    assert not trained.step(0.1) < torch.inf and layer.weight.grad is None
    assert torch.equal(layer.weight, before) and not trained.optimizer.state
