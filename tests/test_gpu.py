"""What a GPU would meet, as far as it can be seen without one: torch.cuda and vLLM are stubs."""
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import dist
import fakes
import grpo
import inputs
import model as head
import rollout
from errors import SettingsError
from plan import GIB
from settings import changed

# ---- mistakes


def gpus(monkeypatch, count: int):
    """This machine has so many GPUs, and torch sees them."""
    for function, value in dict(is_available=count > 0, device_count=count,
                                get_device_name="NVIDIA H100").items():
        monkeypatch.setattr(torch.cuda, function, lambda *_, value=value: value)


def test_more_ranks_than_gpus_and_a_driver_that_is_too_old(monkeypatch):
    """It was "AssertionError: Invalid device id", from inside torch; with the old driver, of which
    torch sees no GPU, the run took the CPU in silence."""
    gpus(monkeypatch, 2)
    assert dist.gpu_mistakes(2) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    said, = dist.gpu_mistakes(4)
    assert "sees 2 (CUDA_VISIBLE_DEVICES is 0,1). Would work: torchrun --nproc_per_node 2." in said
    gpus(monkeypatch, 0)
    for there, hidden, words in (True, None, "version 580"), (True, "", ""), (False, None, ""):
        monkeypatch.setattr(dist.os.path, "exists", lambda path, there=there: (
            there and path == "/dev/nvidia0"))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if hidden is not None:  # on purpose
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        found = dist.gpu_mistakes(4)
        assert bool(found) == bool(words) and words in "".join(found)


def test_they_are_said_with_the_other_mistakes_and_before_weights_load(monkeypatch):
    gpus(monkeypatch, 1)
    with pytest.raises(SettingsError) as caught:
        inputs.read_inputs(changed(grpo.Args(), batch=0), 2, 2)
    assert "1. 2 ranks on this machine need 2 GPUs" in str(caught.value)
    assert "--batch must be at least 1" in str(caught.value)


# ---- the engine

@pytest.mark.parametrize("gib, expected", [  # as the installed vLLM's get_batch_defaults
    (24, (8192, 256)), (None, (8192, 256)), (79.1, (16384, 1024))])
def test_the_plan_knows_what_vllm_chooses(gib, expected):
    card = gib and gib * GIB
    assert rollout.engine_limits(rollout.EngineArgs(), card) == expected
    assert rollout.engine_limits(rollout.EngineArgs(max_num_seqs=5), card)[1] == 5


def made_engine(monkeypatch, kind, device: str, **flags):
    """(the engine, what vLLM was asked for): a kind of engine is built on this device."""
    llm, threads = fakes.without_vllm(monkeypatch), [3]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    engine = kind(SimpleNamespace(
        world=fakes.World(device=device), args=fakes.args(**flags), log=None,
        policy=SimpleNamespace(layers={"q.weight": None}), reference=None, critic=None,
        dtype=torch.bfloat16, inputs=SimpleNamespace(
            source="folder", tokenizer=None, ends=[], kv_cache=0,
            plan=SimpleNamespace(longest=64))))
    assert threads[-1] == (3 if device == "cuda" else 1)  # on a CPU vLLM has its own threads
    return engine, llm.options


@pytest.mark.parametrize("device, given, passed, level", [
    ("cuda", 0, None, 2), ("cpu", 0, 256, 0), ("cpu", 64, 64, 0)])
def test_what_vllm_is_asked_for(device, given, passed, level, monkeypatch):
    """Threads are restored."""
    engine, options = made_engine(monkeypatch, rollout.Engine, device, max_num_seqs=given)
    assert options["max_num_seqs"] == passed and options["enable_prefix_caching"]
    assert engine.sleep_level == level and options["enable_sleep_mode"] == bool(level)


def test_an_engine_on_a_gpu_sleeps_between_its_turns(monkeypatch):
    """The trainer's weights leave the GPU first; the cache comes when the new weights are there."""
    engine, said = fakes.engine_of(), []
    engine.on_gpu, engine.asleep, engine.sleep_level = True, True, 2
    engine.world.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("wait"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append("room"))
    engine.trained = [SimpleNamespace(move=lambda device: said.append(device.type))]
    engine.llm = SimpleNamespace(
        sleep=lambda level: said.append(f"sleep {level}"), wake_up=lambda tags: said.extend(tags),
        collective_rpc=lambda name, kwargs: said.append(name), reset_prefix_cache=lambda: True)
    policy = SimpleNamespace(weights=lambda dtype: iter(()))
    for _ in range(2):
        with engine.generating(policy):
            said.append("generate")
    assert said == 2 * ["cpu", "wait", "room", "weights", "reload_weights", "kv_cache", "generate",
                        "sleep 2", "cuda"]


# ---- the head

@pytest.mark.parametrize("temperature, entropy", [(0.7, False), (1.0, True)])
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
        (logp.sum() + (ent.sum() if entropy else 0)).backward()
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
                        torch.zeros(3, dtype=torch.long), 1.0, 16, True)
