"""What a GPU would meet, as far as it can be seen without one: its tensors are without numbers
(fakegpu.py), torch.cuda and vLLM are stubs. FSDP's streams and the kernels do not run."""
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dist
import fakes
import grpo
import inputs
import model
import ppo
from errors import SettingsError
from fakegpu import FakeGpu, on_gpu, pretend
from tools import float64
from tools.prove import LONGEST, PROMPT, VOCAB, fabricate
from tracked import ROOT

GPU = torch.device("cuda", 0)


HIDDEN, JOB = {"CUDA_VISIBLE_DEVICES": ""}, {"STARTED_AS": "./run.sh ppo"}
DRIVER, NO_BACKEND = "/dev/nvidiactl", "Would work: a driver of version 580 or newer, .*-cpu/bin"


@pytest.mark.parametrize("count, cuda, environ, device, said", [
    (4, "13.0", {}, DRIVER, None), (0, None, HIDDEN, DRIVER, None), (0, None, {}, "", None),
    (2, "13.0", {"CUDA_VISIBLE_DEVICES": "0,1"}, DRIVER, "sees 2 .CUDA_VISIBLE_DEVICES is 0,1.. "
     "Would work: torchrun --nproc_per_node 2."),
    (1, "13.0", JOB, DRIVER, r"Would work: RANKS=1 \./run\.sh ppo\."),
    (0, "13.0", {}, DRIVER, NO_BACKEND), (0, "13.0", JOB | HIDDEN, DRIVER, NO_BACKEND),
    (0, None, {}, DRIVER, r"Would work: \./run\.sh setup, or CUDA_VISIBLE_DEVICES= for a run on")])
def test_ranks_without_a_gpu_each_are_refused_with_what_works(
        monkeypatch, count, cuda, environ, device, said):
    """Four ranks, with the other mistakes of the flags. It was "AssertionError: Invalid device id",
    from inside torch; with the old driver, of which torch sees no GPU, the run took the CPU in
    silence. cuda: what the build of torch is for. vLLM's of the same set-up has nothing for a CPU,
    so no message sends a run there with it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(dist.os, "environ", environ)
    monkeypatch.setattr(dist.os.path, "exists", lambda path: path == device)
    with pytest.raises(SettingsError, match="--batch must be at least 1") as caught:
        inputs.read_inputs(fakes.args(batch=0), 4, 4)
    found = re.search(said or "4 ranks on this machine need", str(caught.value))
    assert bool(found) == bool(said)
    assert cuda is None or "CUDA_VISIBLE_DEVICES= " not in str(caught.value)


# ---- the engine

def test_what_only_a_gpu_calls_is_in_torch_and_vllm():
    """The rest runs on a CPU, in test_engine.py. vLLM's Python is the same in its GPU wheel."""
    code = "".join(path.read_text() for path in ROOT.glob("*.py"))
    names = {*re.findall(r"torch\.cuda\.(\w+)", code)}
    assert len(names) > 5 and all(hasattr(torch.cuda, name) for name in names)
    known = (Path(torch.__file__).parents[1] / "vllm/envs.py").read_text()
    assert all(name in known for name in re.findall(r"\b(VLLM_\w+)=", code))


class Card:
    """A GPU with a trainer and a sleeping engine, which do not fit together. there: what it has."""

    def __init__(self):
        self.there = {"trainer"}

    def move(self, device):  # of the trainer
        assert self.there <= {"trainer"}, "the engine is awake"
        self.there = {"trainer"} if device.type == "cuda" else set()

    def wake_up(self, tags):
        assert "trainer" not in self.there
        self.there.update(tags)

    def collective_rpc(self, name, kwargs):
        assert self.there == {"weights"}, "there is no room for new weights beside the cache"

    def reset_prefix_cache(self):
        return True

    def sleep(self, level):
        self.there.clear()


def test_engine_and_trainer_take_turns_on_a_gpu(monkeypatch):
    engine, card = fakes.engine_of(), Card()
    vars(engine).update(on_gpu=True, asleep=True, sleep_level=2, llm=card, movable=[card],
                        world=fakes.World(device="cuda"))
    for name in "synchronize", "empty_cache":
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for _ in range(2):
        with engine.generating(SimpleNamespace(weights=lambda dtype: iter(()))):
            assert card.there == {"weights", "kv_cache"}
        assert card.there == {"trainer"}


# ---- the trainer

class Alone(fakes.World):
    def sum(self, tensor):
        assert not on_gpu(tensor), "gloo takes tensors of the host"
        return tensor

    max = sum


def on_fake_gpu(kind, wrapper, folder, args):
    """A model of the run, without FSDP."""
    lm = model.skeleton(folder, model.compute_dtype(args.model_args, GPU))
    module = kind(lm, args)
    module.reshard = lambda: None
    for layer in lm.model.layers if args.model_args.checkpointing else ():
        model.checkpoint_layer(layer, preserve_rng_state=False)
    return wrapper(module, Alone(device=GPU), args)


MORE = dict(checkpointing=True, update_tokens=40, score_tokens=40, temperature=0.7, head_chunk=5)


@pytest.mark.parametrize("script, flags", [
    (grpo, MORE | dict(kl_loss_coef=0.1, entropy_coef=0.1, minibatches=2)),
    (grpo, dict(dtype="float32", loss="gspo", minibatches=2, engine_correction="truncate")),
    (ppo, MORE)])
def test_no_device_is_mixed_and_every_gradient_is_there(script, flags, tmp_path, monkeypatch):
    """In the shipped `learn`. In bfloat16 the kernel of attention gets what it asks for: bfloat16,
    and int32 offsets on the GPU."""
    folder = str(tmp_path)
    float64.make(folder, VOCAB)
    args = fakes.args(script, group=2, max_tokens=LONGEST, max_prompt_tokens=PROMPT, **flags)
    step, kernel, more = model.Trained.step, [], {}

    def look(self, lr):
        assert all(p.grad.dtype == p.dtype and on_gpu(p.grad) for p in self.parameters.values())
        return step(self, lr)

    monkeypatch.setattr(model.Trained, "step", look)
    pretend(monkeypatch)
    with FakeGpu(kernel):
        policy, reference = (
            on_fake_gpu(model.LogprobModel, model.Policy, folder, args) for _ in "12")
        models = policy
        if script is ppo:
            models = policy, on_fake_gpu(model.ValueModel, model.Critic, folder, args)
            more = dict(critic_lr=1e-3, kl_coef=0.1)
        script.learn(args, Alone(device=GPU), models, fabricate(args, 0), lr=1e-3,
                     reference=reference, **more)
    assert bool(kernel) == ("dtype" not in flags)
    for q, k, v, ends_q, ends_k, *_ in kernel:
        assert {x.dtype for x in (q, k, v)} == {torch.bfloat16}
        assert all(on_gpu(ends) and ends.dtype == torch.int32 for ends in (ends_q, ends_k))
