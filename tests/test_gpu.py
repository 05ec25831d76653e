"""What a GPU would meet, as far as it can be seen without one: torch.cuda and vLLM are stubs."""
import ast
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import dist
import grpo
import rollout
from dist import SettingsError, World
from preflight import inputs, plan
from preflight.memory import GIB
from trainer import logprobs as head

ROOT = Path(__file__).parent.parent
PACKAGES = Path(torch.__file__).parent.parent


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
        "4 ranks on this machine need 4 GPUs, and torch sees 2 (CUDA_VISIBLE_DEVICES is 0,1). "
        "Would work: torchrun --nproc_per_node 2."]


def test_a_driver_that_is_too_old(monkeypatch):
    """torch sees no GPU then, and the run took the CPU in silence."""
    gpus(monkeypatch, 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(dist.os.path, "exists", lambda path: path == "/dev/nvidia0")
    said, = dist.gpu_mistakes(4)
    assert "has NVIDIA GPUs (/dev/nvidia0), and torch " in said and "version 580" in said
    assert "CUDA_VISIBLE_DEVICES= for a run on the CPU" in said
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # they are hidden on purpose
    assert dist.gpu_mistakes(4) == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(dist.os.path, "exists", lambda path: False)  # a machine without one
    assert dist.gpu_mistakes(4) == []


def test_they_are_said_with_the_other_mistakes_and_before_weights_load(monkeypatch):
    gpus(monkeypatch, 1)
    monkeypatch.setattr(inputs, "check_memory", None)  # it asks the GPU of each rank for its size
    args = plan.changed(grpo.Args(), data="nowhere.jsonl")
    with pytest.raises(SettingsError) as caught:
        inputs.read_inputs(args, 2, 2)
    assert "1. 2 ranks on this machine need 2 GPUs" in str(caught.value)
    assert "nowhere.jsonl" in str(caught.value)


def test_ranks_join_without_gpus_to_say_it_together(monkeypatch):
    gpus(monkeypatch, 1)
    made = []
    monkeypatch.setattr(dist.td, "init_process_group", lambda *args, **_: made.append(args))
    monkeypatch.setattr(dist.td, "new_group", lambda **_: None)
    monkeypatch.setattr(World, "joined", None)
    monkeypatch.setattr(torch, "set_num_threads", made.append)
    for name, value in dict(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                            MASTER_ADDR="", MASTER_PORT="0").items():
        monkeypatch.setenv(name, value)
    assert dist.join().device.type == "cpu" and ("gloo",) in made


# ---- the engine ----

def vllm_defaults(total: float, name: str) -> tuple[int, int]:
    """What the installed vLLM's own function gives for a card. Its Python is the GPU wheel's."""
    tree = ast.parse((PACKAGES / "vllm/engine/arg_utils.py").read_text())
    found, = (node for node in ast.walk(tree)
              if isinstance(node, ast.FunctionDef) and node.name == "get_batch_defaults")
    found.decorator_list, found.returns = [], None
    found.body = [node for node in found.body
                  if not isinstance(node, ast.ImportFrom | ast.AnnAssign | ast.Expr)]
    platform = SimpleNamespace(
        get_device_total_memory=lambda: total, get_device_name=lambda: name,
        is_tpu=lambda: False, is_cpu=lambda: False)
    usage = SimpleNamespace(LLM_CLASS="llm", OPENAI_API_SERVER="server")
    inside = {"current_platform": platform, "GiB_bytes": GIB, "UsageContext": usage}
    exec(compile(ast.Module([found], []), "arg_utils.py", "exec"), inside)
    tokens, seqs = inside["get_batch_defaults"](None, 1)
    return tokens["llm"], seqs["llm"]


@pytest.mark.parametrize("gib, name", [
    (24, "NVIDIA GeForce RTX 4090"), (39.4, "NVIDIA A100-SXM4-40GB"), (47, "NVIDIA L40S"),
    (79.2, "NVIDIA A100-SXM4-80GB"), (79.1, "NVIDIA H100 80GB HBM3"), (140, "NVIDIA H200"),
    (178, "NVIDIA B200")])
def test_the_plan_knows_what_vllm_chooses(gib, name, monkeypatch):
    """The plan had 8,192 tokens for every card: 0.5 to 1.1 GiB too little on an H100."""
    gpus(monkeypatch, 1, name=name)
    assert rollout.engine_limits(rollout.EngineArgs(), gib * GIB) == vllm_defaults(gib * GIB, name)
    assert rollout.engine_limits(rollout.EngineArgs(max_num_seqs=5), gib * GIB)[1] == 5


def test_a_card_that_is_not_here_is_no_a100():
    assert rollout.engine_limits(rollout.EngineArgs(), 80 * GIB) == (16384, 1024)
    assert rollout.engine_limits(rollout.EngineArgs(), None) == (8192, 256)


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
        "folder", World(0, 1, 0, 1, torch.device(device), None, 1.0),
        rollout.EngineArgs(max_num_seqs=given), tokenizer=None, eos_ids=[], dtype=torch.bfloat16,
        max_len=64, max_tokens=32, seed=0, kv_cache=0, log=None, trained=[])
    assert Llm.options["max_num_seqs"] == passed
    assert threads[-1] == (3 if device == "cuda" else 1)  # on a CPU vLLM has its own threads


# ---- the head ----

@pytest.mark.parametrize("temperature, entropy, backend", [
    (0.7, "value", "aot_eager"), (1.0, "grad", "aot_eager"),
    pytest.param(0.7, "value", "inductor", marks=pytest.mark.slow)])  # as on CUDA: with a compiler
def test_compiled_the_head_gives_the_same_numbers(temperature, entropy, backend, monkeypatch):
    """On CUDA it is compiled. Here the same graphs run, in chunks, with their backward. The last
    chunk is smaller: another graph for it would not meet the others' in the backward."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    head.compiled.cache_clear()
    torch._dynamo.reset()
    hidden, weight = torch.randn(50, 8), torch.randn(97, 8)
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
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)
    head.compiled.cache_clear()
    assert {16, 2} == set(seen)


def test_a_temperature_of_1_divides_nothing():
    logits, targets = torch.randn(4, 7), torch.zeros(4, dtype=torch.long)
    kinds = []

    class Calls(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            kinds.append(str(function))
            return function(*args, **(kwargs or {}))

    for temperature, divided in (1.0, False), (0.7, True):
        with Calls():
            head.of_logits(logits, targets, temperature, "value")
        assert any("div" in kind for kind in kinds) == divided


def test_only_on_cuda_it_is_compiled(monkeypatch):
    monkeypatch.setattr(head, "compiled", None)
    weight = torch.randn(7, 4)
    head.token_logprobs(torch.randn(3, 4), lambda x: x @ weight.T,
                        torch.zeros(3, dtype=torch.long), 1.0, 16, "value")


def test_the_tests_hide_gpus():
    assert torch.cuda.device_count() == 0
