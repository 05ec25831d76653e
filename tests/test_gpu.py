"""What a GPU would meet, as far as it can be seen without one: its tensors are without numbers
(fakegpu.py), torch.cuda and vLLM are stubs. FSDP's streams and the kernels do not run."""
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from vllm.config import SchedulerConfig
from vllm.engine import arg_utils
from vllm.usage.usage_lib import UsageContext

import batch
import dist
import fakes
import memory
import model
import plan
import preflight
from errors import SettingsError
from fakegpu import GPU, learned, on_gpus
from memory import GIB
from shapes import shape_of
from tools import float64
from tools.prove import VOCAB
from tracked import ROOT

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
        preflight.read_inputs(fakes.args(batch=0), 4, 4)
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


def test_an_engine_that_sleeps_is_not_shut_down():
    """It would print "CUDA Error: invalid argument" for each piece of memory that it gave back."""
    engine, asked = fakes.engine_of(), []
    engine.llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace(
        shutdown=lambda: asked.append("shutdown"))))
    for engine.asleep in True, False:
        engine.close()
    assert asked == ["shutdown"]


CARDS = [(24, "L4"), (80, "H100"), (141, "H200"), (180, "B200"), (40, "A100"), (80, "A100")]


@pytest.mark.parametrize("gib, name", CARDS)
def test_plan_and_engine_have_one_size_which_is_vllms(gib, name, monkeypatch):
    """The engine gets the plan's tokens, sequences and cache. Given explicitly, they are what vLLM
    would choose itself, except on an A100 of 80 GB: the plan was wrong there by 4."""
    monkeypatch.setattr(arg_utils, "current_platform", SimpleNamespace(
        get_device_total_memory=lambda: gib * GIB, get_device_name=lambda: f"NVIDIA {name}",
        is_tpu=bool, is_cpu=bool))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda: SimpleNamespace(total_memory=gib * GIB))
    for seqs, prompt, new, given in (0, 500, 268, 0.0), (3, 100, 28, 0.0), (4096, 9000, 9000, 9.0):
        args = fakes.args(max_num_seqs=seqs, max_prompt_tokens=prompt, max_tokens=new,
                          kv_cache_gb=given, dtype="bfloat16")
        made = plan.Plan(args, 1, 8, 0)
        found = memory.Memory(made, shape_of("Qwen2.5-0.5B"), dist.card_bytes())
        engine = fakes.engine_of()
        vars(engine).update(args=args, on_gpu=True)
        options = engine.options(made.longest)
        theirs = SimpleNamespace(  # an EngineArgs, whose constructor looks for a model
            max_num_seqs=seqs or None, max_num_batched_tokens=None, enable_chunked_prefill=True,
            pipeline_parallel_size=1, tensor_parallel_size=1, performance_mode="balanced",
            get_batch_defaults=arg_utils.EngineArgs.get_batch_defaults)
        arg_utils.EngineArgs._set_default_max_num_seqs_and_batched_tokens_args(
            theirs, UsageContext.LLM_CLASS,
            SimpleNamespace(max_model_len=made.longest, is_multimodal_model=False),
            SimpleNamespace(use_batched_dp_moe=False))
        ours = options["max_num_batched_tokens"], options["max_num_seqs"]
        vllms = theirs.max_num_batched_tokens, theirs.max_num_seqs
        assert ours == vllms or (gib, name) == (80, "A100")
        SchedulerConfig(max_model_len=made.longest, is_encoder_decoder=False, max_num_seqs=ours[1],
                        max_num_batched_tokens=ours[0])  # it refuses what does not go together
        assert found.holds <= ours[1]
        assert found.engine_work(*ours) == found.parts["engine"][0] - found.engine_weights() - (
            memory.GRAPHS + found.cache)


# ---- the head is compiled on a GPU

def test_the_head_has_one_graph_for_each_kind_of_chunk(monkeypatch):
    """For n = 0, n = 1 and all others, with and without gradient. The targets of a chunk are a view
    in the middle of a vector: with a graph for each such place torch gives up compiling."""
    monkeypatch.setattr(torch._dynamo.config, "disable", False)
    torch._dynamo.reset()
    compiled = torch.compile(model.of_logits, dynamic=True, backend="aot_eager")
    monkeypatch.setattr(model, "compiled", lambda: compiled)
    weight, ids, found = torch.randn(50, 8), torch.randint(0, 50, (800,)), {}
    for gpu in False, True:
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x, gpu=gpu: gpu))
        for n, grad in (300, False), (500, True), (257, True), (400, True), (1, True), (0, True), (
                385, False), (0, False), (1, False), (17, False), (130, True):
            hidden = torch.linspace(-1, 1, 8 * n).view(n, 8).requires_grad_()
            with torch.set_grad_enabled(grad):
                logp, entropy = model.token_logprobs(
                    hidden, lambda x: x @ weight.T, ids[:n], 0.7, 128, entropy=True)
                if grad:
                    (logp + entropy).sum().backward()
            found.setdefault((n, grad), []).append((logp, entropy, hidden.grad))
    for one, other in found.values():
        assert all(a is b or torch.equal(a, b) for a, b in zip(one, other, strict=True))
    graphs = torch._dynamo.eval_frame._debug_get_cache_entry_list(model.of_logits)
    assert len(graphs) == 6


# ---- the trainer, on tensors without numbers

HOST = "cpu"
MORE = dict(checkpointing=True, update_tokens=40, logprob_tokens=40, temperature=0.7, head_chunk=5,
            minibatches=2)
LEARNED = [  # the script, the number of ranks, the flags
    ("grpo", 1, {}), ("grpo", 4, {}), ("grpo", 4, MORE | dict(kl_loss_coef=0.1, entropy_coef=0.1)),
    ("grpo", 4, dict(cpu_offload=True)), ("grpo", 1, MORE | dict(cpu_offload=True)),
    ("grpo", 4, dict(offload=("reference",), kl_loss_coef=0.1)),
    ("grpo", 4, dict(dtype="float32", loss="gspo", minibatches=2, engine_correction="truncate")),
    ("grpo", 16, dict(shard_size=8)), ("ppo", 4, MORE | dict(kl_reward_coef=0.1)),
    ("ppo", 4, dict(kl_reward_coef=0.1, cpu_offload=True))]


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> list:
    """What fakegpu.learned finds in each case; or a traceback."""
    folder = str(tmp_path_factory.mktemp("model"))
    float64.make(folder, VOCAB)
    return on_gpus(learned, [(size, folder, script, flags) for script, size, flags in LEARNED])


@pytest.mark.parametrize("number", range(len(LEARNED)), ids=map(str, LEARNED))
def test_a_step_mixes_no_devices(number, steps):
    """`learn` twice, the weights for the engine, and the tensors of a checkpoint are where the
    flags say. A micro-batch's packing is computed once, not in each layer again."""
    (_, _, flags), found = LEARNED[number], steps[number]
    assert isinstance(found, dict), found
    offloaded, compute = flags.get("cpu_offload"), flags.get("dtype", "bfloat16")
    place = HOST if offloaded else GPU
    for what in "gradients", "parameters", "saved":
        assert found[what] == {(place, "float32")}, what
    assert found["reference"] <= {(HOST if offloaded or "offload" in flags else GPU, compute)}
    assert found["buffers"] == {(GPU, "float32")}  # also where parameters are on the host
    assert found["engine"] == {(GPU, "bfloat16")}
    assert found["moments"] == 2
    if compute == "bfloat16":  # the kernel of attention gets what it asks for
        assert found["heads"] == {(GPU, "bfloat16")} and found["ends"] == {(GPU, "int32")}
    assert 0 < found["packings"] == found["micros"]


def test_a_tensor_that_stays_on_the_host_is_seen(tmp_path):
    """Advantages, in the loss."""
    float64.make(str(tmp_path), VOCAB)
    found, = on_gpus(learned_badly, [(4, str(tmp_path), "grpo", {})])
    assert isinstance(found, str) and "FakeTensorDeviceMismatch" in found


def learned_badly(world, kernel, *args):
    """fakegpu.learned, with MicroBatch.take as it would be without `to_device`."""
    with mock.patch.object(batch.MicroBatch, "take", lambda micro, x: x[micro.places]):
        return learned(world, kernel, *args)
