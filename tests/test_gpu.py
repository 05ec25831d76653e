"""What a GPU would meet, as far as it can be seen without one: its tensors are without numbers
(fakegpu.py), torch.cuda and vLLM are stubs. FSDP's streams and the kernels do not run."""
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from transformers import AutoConfig

import dist
import fakes
import grpo
import inputs
import model
import ppo
import rollout
from errors import SettingsError
from fakegpu import FakeGpu, on_gpu
from tools.prove import LONGEST, PROMPT, VOCAB, fabricate
from tracked import ROOT

GPU = torch.device("cuda", 0)


def gpus(monkeypatch, count: int):
    """This machine has so many GPUs, and torch sees them."""
    for function, value in dict(is_available=count > 0, device_count=count).items():
        monkeypatch.setattr(torch.cuda, function, lambda *_, value=value: value)


def test_more_ranks_than_gpus_and_a_driver_that_is_too_old_are_refused(monkeypatch):
    """With the other mistakes of the flags. It was "AssertionError: Invalid device id", from inside
    torch; with the old driver, of which torch sees no GPU, the run took the CPU in silence."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    gpus(monkeypatch, 2)
    assert dist.gpu_mistakes(2) == []
    with pytest.raises(SettingsError, match="--batch must be at least 1") as caught:
        inputs.read_inputs(fakes.args(batch=0), 4, 4)
    assert ("sees 2 (CUDA_VISIBLE_DEVICES is 0,1). Would work: torchrun --nproc_per_node 2."
            in str(caught.value))
    gpus(monkeypatch, 0)
    for there, hidden, words in (True, None, "version 580"), (True, "", ""), (False, None, ""):
        monkeypatch.setattr(dist.os.path, "exists", lambda path, there=there: (
            there and path == "/dev/nvidia0"))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if hidden is not None:  # on purpose
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        found = dist.gpu_mistakes(4)
        assert bool(found) == bool(words) and words in "".join(found)


# ---- the engine

def vllm(file: str) -> str:
    """vLLM's Python is the same in its GPU wheel: it is read."""
    return (Path(torch.__file__).parent.parent / "vllm" / file).read_text()


def test_what_only_a_gpu_calls_is_in_torch_and_vllm():
    """The rest runs on a CPU, in test_engine.py."""
    code = "".join(path.read_text() for path in ROOT.glob("*.py"))
    names = {*re.findall(r"torch\.cuda\.(\w+)", code)}
    assert len(names) > 5 and not [name for name in names if not hasattr(torch.cuda, name)]
    for file, words in ("worker", "sleep level"), ("worker", "wake_up tags"), (
            "worker", "reload_weights"), ("model_runner", "reload_weights weights_iterator"):
        name, *words = words.split()
        text, = re.findall(rf"def {name}\((.*?)\) ->", vllm(f"v1/worker/gpu_{file}.py"), re.S)
        assert all(word in text for word in words)
    assert all(word in vllm("envs.py") for word in re.findall(r"\b(VLLM_\w+)=", code))


@pytest.mark.parametrize("device, given, passed, level", [
    ("cuda", 0, None, 2), ("cpu", 0, 256, 0), ("cpu", 64, 64, 0)])
def test_what_vllm_is_asked_for(device, given, passed, level, monkeypatch):
    """vLLM has each of these options, and a GPU's engine sleeps."""
    llm = fakes.without_vllm(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    engine = rollout.Engine(SimpleNamespace(
        world=fakes.World(device=device), args=fakes.args(max_num_seqs=given), log=None,
        policy=None, reference=None, critic=None, dtype=torch.bfloat16, inputs=SimpleNamespace(
            source="folder", tokenizer=None, ends=[], kv_cache=0,
            plan=SimpleNamespace(longest=64))))
    known = vllm("engine/arg_utils.py") + vllm("entrypoints/llm.py")
    assert all(re.search(rf"^ +{name}: ", known, re.M) for name in llm.options)
    assert llm.options["max_num_seqs"] == passed and llm.options["enable_prefix_caching"]
    assert engine.sleep_level == level and llm.options["enable_sleep_mode"] == bool(level)


def test_engine_and_trainer_take_turns_on_a_gpu(monkeypatch):
    """The trainer's weights leave the GPU before the engine's come, and the engine's cache comes
    after its new weights: else both are there at once, and do not fit."""
    engine, seen = fakes.engine_of(), mock.MagicMock()
    vars(engine).update(on_gpu=True, asleep=True, sleep_level=2, llm=seen.llm,
                        movable=[seen.trainer])
    monkeypatch.setattr(torch.cuda, "synchronize", seen.wait)
    monkeypatch.setattr(torch.cuda, "empty_cache", seen.empty)
    for _ in range(2):
        seen.reset_mock()
        with engine.generating(SimpleNamespace(weights=lambda dtype: iter(()))):
            seen.generate()
        assert [name for name, *_ in seen.mock_calls if "__" not in name] == [
            "trainer.move", "wait", "empty", "llm.wake_up", "llm.collective_rpc", "llm.wake_up",
            "llm.reset_prefix_cache", "generate", "llm.sleep", "trainer.move"]
        assert seen.llm.wake_up.mock_calls == [
            mock.call(tags=["weights"]), mock.call(tags=["kv_cache"])]
        there, back = seen.trainer.move.mock_calls
        assert there == mock.call(torch.device("cpu")) and back == mock.call(engine.world.device)


# ---- the trainer

class Alone(fakes.World):
    def sum(self, tensor):
        assert not on_gpu(tensor), "gloo takes tensors of the host"
        return tensor

    max = sum


def on_fake_gpu(kind, wrapper, folder, args):
    """A model of the run, without FSDP."""
    lm = model.skeleton(folder, model.compute_dtype(args.model_args, GPU))
    kinds = model.kinds(args, lm.config)
    made = getattr(kinds, kind)(lm, args)
    made.reshard = lambda: None
    for layer in lm.model.layers if args.model_args.checkpointing else ():
        model.checkpoint_layer(layer, preserve_rng_state=False)
    return getattr(kinds, wrapper)(made, Alone(device=GPU), args)


MORE = dict(checkpointing=True, update_tokens=40, score_tokens=40, temperature=0.7, head_chunk=5)


@pytest.mark.parametrize("script, flags", [
    (grpo, MORE | dict(kl_loss_coef=0.1, entropy_coef=0.1, minibatches=2)),
    (grpo, dict(dtype="float32", loss="gspo", minibatches=2, engine_correction="truncate")),
    (ppo, MORE)])
def test_no_device_is_mixed_and_every_gradient_is_there(script, flags, tmp_path, monkeypatch):
    """In the shipped `learn`. In bfloat16 the kernel of attention gets what it asks for: bfloat16,
    and int32 offsets on the GPU."""
    AutoConfig.for_model(
        "qwen2", architectures=["Qwen2ForCausalLM"], vocab_size=VOCAB, hidden_size=64,
        intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64).save_pretrained(tmp_path)
    args = fakes.args(script, model=str(tmp_path), group=2, max_tokens=LONGEST,
                      max_prompt_tokens=PROMPT, **flags)
    step = model.Trained.step

    def look(self, lr):
        assert all(p.grad.dtype == p.dtype and on_gpu(p.grad) for p in self.parameters.values())
        return step(self, lr)

    monkeypatch.setattr(model.Trained, "step", look)
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"],
                        "_get_fused_kernels_supported_devices", lambda: ["cuda", "meta"])
    samples = fabricate(args, 0)
    with FakeGpu() as gpu:
        policy, reference = (
            on_fake_gpu("logprob_model", "policy", str(tmp_path), args) for _ in "12")
        models, more = policy, {}
        if script is ppo:
            models = policy, on_fake_gpu("value_model", "critic", str(tmp_path), args)
            more = dict(critic_lr=1e-3, kl_coef=0.1)
        script.learn(args, Alone(device=GPU), models, samples, lr=1e-3, reference=reference, **more)
    assert bool(gpu.varlen) == ("dtype" not in flags)
    for q, k, v, ends_q, ends_k, *_ in gpu.varlen:
        assert {x.dtype for x in (q, k, v)} == {torch.bfloat16}
        assert all(on_gpu(ends) and ends.dtype == torch.int32 for ends in (ends_q, ends_k))
