"""A packed micro-batch is its single rows, to the last digits, in every family.

test_model.py compares them in float32. Here --dtype float64 must mean it: transformers' own code
rounds to float32 in places.
"""
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen
from transformers import AutoModelForCausalLM

import batch
import fakes
import families
import grpo
import learning
import model
import probes
from batch import Batch, Micro
from learning import difference
from ranks import results
from tools import float64

CPU = torch.device("cpu")


def batch_of() -> Batch:
    """Two prompts with two completions each. They are longer than the windows of the models."""
    draws = np.random.default_rng(0)
    prompts = [draws.integers(3, 320, n).tolist() for n in (80, 89)]
    return Batch([learning.sample(prompts[p], draws.integers(3, 320, n))
                  for p, n in ((0, 24), (0, 7), (1, 1), (1, 16))])


def packed(world, folder: str) -> tuple:
    """(M,) log-probs of the trainer, and the gradient of their sum, of one micro-batch."""
    args, rows = fakes.args(dtype="float64"), batch_of()
    policy = model.Policy(float64.build(model.LogprobModel, folder, world, args), world, args)
    micro, = rows.micros(world, [0, 1, 2, 3], 10_000, "update")
    logprobs, _ = policy.logprobs(micro, families.HEAT)
    logprobs.sum().backward()
    in_order = torch.zeros(int(rows.tokens.sum()), dtype=torch.float64)
    in_order[micro.places] = logprobs.detach()
    return in_order, {n.removeprefix("lm."): model.whole(p.grad)
                      for n, p in policy.parameters.items()}


def alone(folder: str) -> tuple:
    """(log-probs, gradient) of plain transformers, one row at a time, in wide norms. Every row of
    the embeddings is trained: nothing is padded."""
    lm = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager")
    for module in lm.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    float64.widen(lm)
    logprobs = families.single_rows(lm, batch_of())
    logprobs.sum().backward()
    return logprobs.detach(), {n: p.grad for n, p in lm.named_parameters()}


# Kinds of layers; test_model.py has every family in float32.
SOME = ("Llama, tied", "Qwen3.5", "Gemma 2", "Gemma 4", "EXAONE 4", "OLMoE", "GPT-2")


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in SOME else pytest.mark.slow) for name in families.CASES])
def test_packed_rows_are_single_rows(name, tmp_path):
    """Log-probs and gradient are those of plain transformers. config.json names a token of the
    prompts as that of the padding, which torch would leave out of the gradient."""
    families.make(name, str(tmp_path))
    path, token = tmp_path / "config.json", batch_of().samples[0].prompt.row.prompt_ids[7]
    path.write_text(json.dumps(json.loads(path.read_text()) | {
        "pad_token_id": token, "eos_token_id": token}))
    (logprobs, gradient), = results(1, packed, str(tmp_path))
    theirs, their_gradient = alone(str(tmp_path))
    assert logprobs.dtype == torch.float64
    assert (logprobs - theirs).abs().max() < 1e-12
    assert difference(*(torch.cat([g[n].flatten() for n in sorted(their_gradient)])
                        for g in (gradient, their_gradient))) < 1e-12


def plain_varlen(q, k, v, ends_q, ends_k, longest_q, longest_k, *, window_size, scale, enable_gqa):
    """torch.nn.attention.varlen.varlen_attn by its documentation, one segment at a time."""
    left, right = window_size
    assert right == 0 and ends_q.dtype == ends_k.dtype == torch.int32
    queries, keys = ends_q.diff().tolist(), ends_k.diff().tolist()
    assert (longest_q, longest_k) == (max(queries), max(keys))
    out = []
    for *parts, n, m in zip(q.split(queries), k.split(keys), v.split(keys), queries, keys,
                            strict=True):
        mask = torch.ones(n, m, dtype=torch.bool).tril(m - n)
        mask = mask if left < 0 else mask.triu(m - n - left)
        out.append(F.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in parts), attn_mask=mask, scale=scale,
            enable_gqa=enable_gqa).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("window", [None, 5])
def test_the_gpu_kernel_gets_the_same_attention(monkeypatch, window):
    """Prompts and completions of unlike lengths, some of nearly one length."""
    monkeypatch.setattr(varlen, "varlen_attn", plain_varlen)
    samples = [learning.sample([n] * n, np.ones(m)) for n, lengths in (
        (3, (1, 5, 9, 2)), (1, (4,)), (14, (12, 2, 20)), (6, (9, 8, 7))) for m in lengths]
    layout = Micro(Batch(samples), [*range(len(samples))], CPU).inputs["packed"]
    q, k, v = (torch.randn(layout.tokens, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    ours, theirs = (way(q, k, v, layout, 0.3, window) for way in (batch.blocks, batch.varlen))
    assert difference(ours, theirs) < 1e-14


def test_log_probs_are_at_least_float32():
    """Also those of a model that computes in bfloat16."""
    lm = probes.Spy().module.lm.bfloat16()
    micro = Micro(families.batch_of([[3, 4]] * 2, [[5, 6], [7]]), [0, 1], CPU)
    logprobs, _ = model.LogprobModel(lm, grpo.Args())(
        micro.inputs, micro.source, micro.targets, 1.0, False)
    assert logprobs.dtype == torch.float32


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_not_applied(value):
    """Neither the weights nor AdamW's moments see it."""
    layer = torch.nn.Linear(2, 1, bias=False)
    trained, before = model.Trained(layer, fakes.World(), fakes.args()), layer.weight.clone()
    layer.weight.grad = torch.tensor([[value, 1.0]])
    assert not trained.step(0.1) < float("inf") and layer.weight.grad is None
    assert torch.equal(layer.weight, before) and not trained.optimizer.state
