"""What a GPU would meet, as far as it can be seen without one: torch.cuda and vLLM are stubs."""
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

import dist
import grpo
import inputs
import model as head
import plan
import rollout
from dist import World
from errors import SettingsError
from plan import GIB

ROOT = Path(__file__).parent.parent


def gpus(monkeypatch, count: int, name="NVIDIA H100"):
    """This machine has so many GPUs, and torch sees them."""
    for function, value in dict(is_available=count > 0, device_count=count,
                                get_device_name=name).items():
        monkeypatch.setattr(torch.cuda, function, lambda *_, value=value: value)


# ---- mistakes ----

def test_more_ranks_than_gpus(monkeypatch):
    """It was "AssertionError: Invalid device id", from inside torch."""
    gpus(monkeypatch, 2)
    assert dist.gpu_mistakes(2) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert dist.gpu_mistakes(4) == [
        f"4 ranks on this machine need 4 GPUs, and torch {torch.__version__} sees 2 "
        f"(CUDA_VISIBLE_DEVICES is 0,1). Would work: torchrun --nproc_per_node 2."]


def test_a_driver_that_is_too_old(monkeypatch):
    """torch sees no GPU then, and the run took the CPU in silence."""
    gpus(monkeypatch, 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(dist.os.path, "exists", lambda path: path == "/dev/nvidia0")
    said, = dist.gpu_mistakes(4)
    assert "need 4 GPUs, and torch " in said and "version 580" in said
    assert "CUDA_VISIBLE_DEVICES= for a run on the CPU" in said
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # they are hidden on purpose
    assert dist.gpu_mistakes(4) == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(dist.os.path, "exists", lambda path: False)  # a machine without one
    assert dist.gpu_mistakes(4) == []


def test_they_are_said_with_the_other_mistakes_and_before_weights_load(monkeypatch):
    gpus(monkeypatch, 1)
    args = plan.changed(grpo.Args(), batch=0)
    with pytest.raises(SettingsError) as caught:
        inputs.read_inputs(args, 2, 2)
    assert "1. 2 ranks on this machine need 2 GPUs" in str(caught.value)
    assert "--batch must be at least 1" in str(caught.value)


# ---- the engine ----

@pytest.mark.parametrize("gib, name, expected", [  # as the installed vLLM's get_batch_defaults
    (24, "NVIDIA GeForce RTX 4090", (8192, 256)), (None, "", (8192, 256)),
    (79.1, "NVIDIA H100 80GB HBM3", (16384, 1024))])
def test_the_plan_knows_what_vllm_chooses(gib, name, expected):
    card = gib and gib * GIB
    assert rollout.engine_limits(rollout.EngineArgs(), card) == expected
    assert rollout.engine_limits(rollout.EngineArgs(max_num_seqs=5), card)[1] == 5


class Llm:
    """vLLM's LLM, as far as making one goes. Its worker on a GPU leaves one thread."""

    def __init__(self, folder, **options):
        Llm.options = options
        torch.set_num_threads(1)

    def apply_model(self, function):
        pass


@pytest.mark.parametrize("device, given, passed", [
    ("cuda", 0, None), ("cuda", 64, 64), ("cpu", 0, 256), ("cpu", 64, 64)])
def test_threads_are_restored_and_vllm_chooses_its_sequences(device, given, passed, monkeypatch):
    stub = ModuleType("vllm")
    stub.LLM = Llm
    monkeypatch.setitem(sys.modules, "vllm", stub)
    monkeypatch.setattr(rollout, "prepare_environment", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    threads = [3]
    monkeypatch.setattr(torch, "set_num_threads", lambda n: threads.append(n))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    rollout.Engine(
        "folder", World(0, 1, 0, 1, torch.device(device), None),
        rollout.EngineArgs(max_num_seqs=given), tokenizer=None, eos_ids=[], dtype=torch.bfloat16,
        max_len=64, max_tokens=32, seed=0, kv_cache=0, log=None, trained=[])
    assert Llm.options["max_num_seqs"] == passed
    assert threads[-1] == (3 if device == "cuda" else 1)  # on a CPU vLLM has its own threads


# ---- the head ----

@pytest.mark.parametrize("temperature, entropy", [(0.7, "value"), (1.0, "grad")])
def test_compiled_the_head_gives_the_same_numbers(temperature, entropy, monkeypatch):
    """On CUDA it is compiled. Here the same graphs run, in chunks, with their backward. The last
    chunk is smaller: another graph for it would not meet the others' in the backward."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    head.compiled.cache_clear()
    torch._dynamo.reset()
    hidden, weight = torch.randn(50, 8).double(), torch.randn(97, 8).double()
    targets, found, seen = torch.randint(97, (50,)), [], []
    for formula in (head.of_logits, head.compiled()):
        monkeypatch.setattr(head, "of_logits", formula)
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()

        def logits(x, w=w):
            seen.append(len(x))
            return x @ w.T

        logp, ent = head.token_logprobs(h, logits, targets, temperature, 16, entropy)
        (logp.sum() + (ent.sum() if entropy == "grad" else 0)).backward()
        with torch.no_grad():
            alone, _ = head.token_logprobs(h, logits, targets, temperature, 16, entropy)
        found.append((logp, ent, h.grad, w.grad, alone))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    head.compiled.cache_clear()
    assert {16, 2} == set(seen)


def test_only_on_cuda_it_is_compiled(monkeypatch):
    monkeypatch.setattr(head, "compiled", None)
    weight = torch.randn(7, 4)
    head.token_logprobs(torch.randn(3, 4), lambda x: x @ weight.T,
                        torch.zeros(3, dtype=torch.long), 1.0, 16, "value")
