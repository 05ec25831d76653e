"""batch.py: a packed group is its rows, to the last digits."""
import random
from itertools import groupby

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen
from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM

import batch
import grpo
import model
from batch import Batch, Micro
from learning import difference, sample
from tools import float64

AttentionInterface.register("packed", batch.attention)
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
             initializer_range=0.2, bos_token_id=None, eos_token_id=None)
# (prompt, completions): lengths. Some are of nearly one length, and padded to one block.
GROUPS = [(3, (1, 5, 9, 2)), (1, (4,)), (7, (6, 6, 6)), (3, (1,)), (14, (12, 2, 20)),
          (6, (9, 8, 7))]


def small():
    torch.manual_seed(3)
    lm = Qwen2ForCausalLM(Qwen2Config(
        **SIZES, head_dim=8, attn_implementation="sdpa")).double().eval()
    float64.widen(lm)
    return lm


def samples_of(groups, seed: int = 0) -> list:
    rng, samples = random.Random(seed), []

    def ids(n):
        return [rng.randrange(64) for _ in range(n)]

    for prompt, completions in groups:
        prompt = ids(prompt)
        samples += [sample(prompt, np.array(ids(c))) for c in completions]
    return samples


def packed_logprobs(lm, samples: list) -> torch.Tensor:
    """(M,) from one packed micro-batch, with gradient."""
    lm.set_attn_implementation("packed")
    micro = Micro(Batch(samples), list(range(len(samples))), torch.device("cpu"))
    prompts = [prompt for prompt, _ in groupby(s.prompt.row.prompt_ids for s in samples)]
    assert micro.tokens == sum(map(len, prompts)) + sum(len(s.completion.ids) - 1 for s in samples)
    module = model.LogprobModel(lm, grpo.Args())
    return module(micro.inputs, micro.source, micro.targets, 1.0, False)[0]


def one_by_one(lm, samples: list) -> torch.Tensor:
    lm.set_attn_implementation("sdpa")
    rows = []
    for s in samples:
        prompt, ids = s.prompt.row.prompt_ids, s.completion.ids.tolist()
        logps = lm(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
        rows.append(torch.stack([logps[len(prompt) - 1 + t, i] for t, i in enumerate(ids)]))
    return torch.cat(rows)


def test_a_packed_input_is_its_rows():
    """In every family, windows and soft caps too: test_float64.py."""
    lm, samples = small(), samples_of(GROUPS)
    weights = torch.randn(sum(len(s.completion.ids) for s in samples), dtype=torch.float64)
    found = {}
    for way in packed_logprobs, one_by_one:
        lm.zero_grad()
        logprobs = way(lm, samples)
        (logprobs * weights).sum().backward()
        found[way] = logprobs.detach(), torch.cat([p.grad.flatten() for p in lm.parameters()])
    for ours, theirs in zip(*found.values(), strict=True):
        assert theirs.norm() > 1 and difference(ours, theirs) < 1e-14


def test_a_completion_sees_no_other():
    lm = small().float()
    with torch.no_grad():
        batch = Batch(samples_of(GROUPS))
        before = packed_logprobs(lm, batch.samples)
        for row in range(len(batch.samples)):
            samples = samples_of(GROUPS)
            ids = samples[row].completion.ids
            ids[:] = (ids + 1) % 64
            changed = batch.of_tokens(packed_logprobs(lm, samples) != before) > 0  # (N,)
            assert changed[row] and changed.sum() == 1, row


def plain_varlen(q, k, v, ends_q, ends_k, longest_q, longest_k, *, window_size, scale, enable_gqa):
    """torch.nn.attention.varlen.varlen_attn by its documentation, one segment at a time."""
    left, right = window_size
    assert right == 0 and ends_q.dtype == ends_k.dtype == torch.int32
    out, lengths = torch.empty_like(q), [e.diff().tolist() for e in (ends_q, ends_k)]
    assert (longest_q, longest_k) == tuple(map(max, lengths))
    for (a, n), (b, m) in zip(*(zip(e.tolist(), L, strict=False) for e, L in zip(
            (ends_q, ends_k), lengths, strict=True)), strict=True):
        mask = torch.ones(n, m, dtype=torch.bool).tril(m - n)
        mask = mask if left < 0 else mask.triu(m - n - left)
        q_, k_, v_ = (x.transpose(0, 1) for x in (q[a:a + n], k[b:b + m], v[b:b + m]))
        out[a:a + n] = F.scaled_dot_product_attention(
            q_, k_, v_, attn_mask=mask, scale=scale, enable_gqa=enable_gqa).transpose(0, 1)
    return out


@pytest.mark.parametrize("window", [None, 5])
def test_the_gpu_kernel_gets_the_same_attention(monkeypatch, window):
    monkeypatch.setattr(varlen, "varlen_attn", plain_varlen)
    samples = samples_of(GROUPS)
    packed = Micro(Batch(samples), list(range(len(samples))), torch.device("cpu")).inputs["packed"]
    q, k, v = (torch.randn(packed.tokens, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    ours, theirs = (way(q, k, v, packed, 0.3, window) for way in (batch.blocks, batch.varlen))
    assert difference(ours, theirs) < 1e-14
