"""The trainer is transformers, to the last digits, in every family.

Its packed micro-batches on two ranks are plain rows alone: log-probs and gradients, before and
after updates. Here --dtype float64 must mean it: transformers' own code rounds to float32 in
places. And the attention of a GPU is that of a CPU.
"""
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.nn.attention import varlen

import batch
import fakes
import families
import model
from batch import MicroBatch
from learning import difference
from ranks import results
from tools import float64

CPU = torch.device("cpu")
TOKEN = 88  # of the prompts; config.json names it as the padding, and torch would not train it
# Kinds of layers, heads, buffers and names, and where the weights are: no flag changes numbers.
SOME = {"Llama, tied": {}, "Mistral": {}, "Gemma 2": {}, "Gemma 3": dict(cpu_offload=True),
        "Gemma 4": {}, "Granite": dict(shard_size=1), "Cohere": {}, "Phi": dict(cpu_offload=True),
        "Ministral 3": {}, "EXAONE 4": {}, "GPT-2": dict(shard_size=1), "GPT-NeoX": {}}


def trained(world, folder: str, flags: dict) -> tuple:
    """(families.three_steps; of their first batch the gradient of the log-probs' sum, the values of
    ppo.py's critic with a head of ones, and the sums of the states that the policy's head gets)"""
    flags = dict(dtype="float64", head_chunk=50, checkpointing=True) | flags
    steps = families.three_steps(world, folder, False, **flags)
    rows, policy = steps[0][0], families.trainer_of(folder, world, **flags)
    for micro in rows.micro_batches(world, [*range(6)], 400, "update"):
        policy.backward(policy.logprobs(micro, families.HEAT)[0].sum())
    gradient = {name.removeprefix("lm."): model.whole(p.grad)
                for name, p in policy.parameters.items()}
    module = float64.build(model.ValueModel, folder, world, policy.args)
    critic = model.Critic(module, world, policy.args)
    torch.nn.init.ones_(module.head.weight)

    def sums(micro):
        return policy.logprobs(micro, 1.0, formula=lambda hidden, *others: hidden.sum(-1))

    return steps, gradient, *(rows.forward(world, 400, "values", way)
                               for way in (critic.values, sums))


def gradient_of(folder: str, rows) -> dict:
    """The same by plain transformers, one row at a time. Nothing is padded, so every row of the
    embeddings is trained."""
    lm = families.load(folder, torch.float64)
    for module in lm.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    families.single_rows(lm, rows).sum().backward()
    return {name: p.grad for name, p in lm.named_parameters()}


@pytest.mark.parametrize("name", [name if name in SOME else pytest.param(
    name, marks=pytest.mark.slow) for name in families.CASES])
def test_packed_rows_are_single_rows_before_and_after_updates(name, tmp_path):
    """On two ranks, with the memory knobs. transformers loads each export, and the one before the
    first update has the names and bits of the folder."""
    folder = f"{tmp_path}/it"
    families.make(name, folder, dict(dtype="float64", pad_token_id=TOKEN, eos_token_id=TOKEN))
    weights = load_file(f"{folder}/model.safetensors")
    if name == "GPT-2":  # on the hub its names have no prefix
        weights = {key.removeprefix("transformer."): p for key, p in weights.items()}
        save_file(weights, f"{folder}/model.safetensors", metadata={"format": "pt"})
    steps, gradient, values, sums = results(2, trained, folder, SOME.get(name, {}))[0]
    for step, (rows, logprobs) in enumerate(steps):
        theirs = families.plain(f"{folder}-{step}", rows, dtype=torch.float64)
        assert logprobs.dtype == torch.float64 and (logprobs - theirs).abs().max() < 1e-12
    rows = steps[0][0]
    assert TOKEN in rows.samples[0].prompt.row.prompt_ids
    theirs = gradient_of(folder, rows)
    assert difference(*(torch.cat([g[key].flatten() for key in sorted(theirs)])
                        for g in (gradient, theirs))) < 1e-12
    assert difference(values, sums) < 1e-12
    assert families.same(load_file(f"{folder}-0/model.safetensors"), weights)


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
    samples = families.batch_of(*(([n] * n, [[1] * m for m in lengths]) for n, lengths in (
        (3, (1, 5, 9, 2)), (1, (4,)), (14, (12, 2, 20)), (6, (9, 8, 7)))))
    layout = MicroBatch(samples, [*range(len(samples.samples))], CPU).inputs["packed"]
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
