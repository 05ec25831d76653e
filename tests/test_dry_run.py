"""The path of a GPU, without one: the shipped updates and score passes on a fake GPU (fakegpu.py).

It has no FSDP, whose streams need CUDA. The kernels do not run: their inputs are looked at.
"""
import sys
from collections import Counter

import pytest
import torch
from transformers import AutoConfig

import fakes
import grpo
import model
import ppo
from batch import KEYS
from fakegpu import FakeGpu, on_gpu
from settings import changed, values_of
from tools.prove import LONGEST, PROMPT, VOCAB, fabricate

WAITS = 0  # of the host, in one micro-batch of an update
GPU = torch.device("cuda", 0)
SIZES = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)


class Alone(fakes.World):
    def sum(self, tensor):
        assert not on_gpu(tensor), "gloo takes tensors of the host"
        return tensor

    max = sum


def world() -> Alone:
    return Alone(device=GPU)


def trained(kind, wrapper, folder, args, monkeypatch):
    """A model of the run, on the fake GPU, without FSDP."""
    compute = model.compute_dtype(args.model_args, GPU)
    lm = model.skeleton(folder, compute)
    kinds = model.kinds(args, lm.config)
    made = getattr(kinds, kind)(lm, args)
    made.reshard = lambda: None
    if args.model_args.checkpointing:
        for layer in lm.model.layers:
            model.checkpoint_layer(layer, preserve_rng_state=False)
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"],
                        "_get_fused_kernels_supported_devices", lambda: ["cuda", "meta"])
    return getattr(kinds, wrapper)(made, world(), args)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("shape")
    config = AutoConfig.for_model("qwen2", architectures=["Qwen2ForCausalLM"], **SIZES)
    config.save_pretrained(place)
    return str(place)


def learn(script, folder, monkeypatch, **flags):
    """One `learn` → (FakeGpu, the models, micro-batches that were made)."""
    args = changed(script.Args(), model=folder, group=2, max_tokens=LONGEST,
                        max_prompt_tokens=PROMPT, lr=1e-3, **flags)
    samples, micros = fabricate(args, 0), Counter()
    with FakeGpu() as gpu:
        policy = trained("logprob_model", "policy", folder, args, monkeypatch)
        reference = trained("logprob_model", "policy", folder, args, monkeypatch)
        models, more = [policy], {}
        if script is ppo:
            models.append(trained("value_model", "critic", folder, args, monkeypatch))
            more = dict(critic_lr=1e-3, kl_coef=0.1)
        ran = model.Trained.run

        def count(self, micro, *inputs):
            micros[torch.is_grad_enabled()] += 1
            return ran(self, micro, *inputs)

        monkeypatch.setattr(model.Trained, "run", count)
        gpu.waits.clear()
        script.learn(args, world(), tuple(models) if script is ppo else policy, samples, lr=1e-3,
                     reference=reference, **more)
    return gpu, models, micros


CASES = {
    "bfloat16": {}, "float32": dict(dtype="float32"),
    "checkpointing": dict(checkpointing=True, update_tokens=40, score_tokens=40, temperature=0.7),
    "reference, entropy": dict(kl_loss_coef=0.1, entropy_coef=0.1, minibatches=2, head_chunk=5),
    "lora": dict(lora_rank=8),
    "gspo": dict(loss="gspo", minibatches=2, engine_correction="truncate")}


@pytest.mark.parametrize("script, name", [*((grpo, name) for name in CASES), *(
    (ppo, name) for name in ("checkpointing", "lora"))])
def test_no_device_is_mixed_and_every_gradient_is_there(script, name, folder, monkeypatch):
    flags = {k: v for k, v in CASES[name].items() if k in values_of(script.Args())}
    grads = []
    step = model.Trained.step

    def look(self, lr):
        grads.append([n for n, p in self.parameters.items()
                      if p.grad is None or not on_gpu(p.grad) or p.grad.dtype != p.dtype])
        return step(self, lr)

    monkeypatch.setattr(model.Trained, "step", look)
    gpu, _, micros = learn(script, folder, monkeypatch, **flags)
    assert micros[True] and grads and not any(grads)
    assert bool(gpu.varlen) == (flags.get("dtype") != "float32")
    for args in gpu.varlen:
        kernel_takes(*args)


def kernel_takes(q, k, v, ends_q, ends_k, max_q, max_k, *rest):
    """What varlen_attn asks for: (tokens, heads, d) in bfloat16, int32 offsets, whole numbers."""
    assert {x.dtype for x in (q, k, v)} == {torch.bfloat16} and k.shape == v.shape
    assert q.shape[1:] == (4, 16) and k.shape[1:] == (2, 16) and len(k) <= KEYS * 16384
    for ends, x in (ends_q, q), (ends_k, k):
        assert ends.dtype == torch.int32 and ends.dim() == 1 and on_gpu(ends) and on_gpu(x)
    assert len(ends_q) == len(ends_k) and type(max_q) is type(max_k) is int and max_q <= max_k


def test_how_often_the_host_waits_in_a_micro_batch(folder, monkeypatch):
    """Each wait leaves the GPU idle. What is left per optimizer step does not count: the norm, the
    sums of the metrics. More micro-batches show what one of them costs."""
    found = []
    for budget in (40, 400):
        gpu, _, micros = learn(grpo, folder, monkeypatch, update_tokens=budget)
        found.append((sum(gpu.waits.values()), micros[True], gpu.waits))
    (many, n, waits), (few, m, _) = found
    each = (many - few) / (n - m)
    assert n > m and each <= WAITS, waits
