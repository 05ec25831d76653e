"""A GPU without a GPU: tensors of the device cuda:0 have no numbers (torch's FakeTensorMode), and
the other ranks are not there (torch's "fake" process group). Tensors of the host are real.

What is shipped runs as it is: model.build with FSDP2, `learn` with AdamW, the weights for the
engine, the tensors of a checkpoint. Kernels, streams and NCCL do not run, and nothing is compiled.
An operation on tensors of both devices is an error, as on a GPU.
"""
import ctypes
import subprocess
import tempfile
import traceback
from contextlib import ExitStack
from functools import cache, cached_property
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as td
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

import batch
import checkpoint
import fakes
import model
import ranks
from tools.prove import LONGEST, PROMPT, fabricate

aten, GPU = torch.ops.aten, "cuda:0"


@cache
def library() -> str:
    """fakegpu.cpp, compiled for this torch: seconds."""
    torch_at, source = Path(torch.__file__).parent, Path(__file__).with_suffix(".cpp")
    made = str(Path(tempfile.mkdtemp(), "fakegpu.so"))
    subprocess.run(["g++", "-shared", "-fPIC", "-std=c++20", "-w", source, "-o", made,
                    "-I", torch_at / "include", "-L", torch_at / "lib", "-lc10", "-ltorch_cpu"],
                   check=True)
    return made


def on_device(x) -> bool:
    return isinstance(x, FakeTensor) or isinstance(x, torch.device) and x.type == "cuda"


class FakeGpu(TorchDispatchMode):
    """In it, tensors of the host are real, and of those on the device integers have values, which
    shapes may depend on. Other numbers that are read from the device are 1.

    kernel: a list that gets the arguments of each call of the kernel of attention.
    """

    def __init__(self, kernel: list):
        super().__init__()
        self.kernel, self.values = kernel, WeakTensorKeyDictionary()  # tensor of the device → host

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = args, kwargs or {}
        leaves = tree_leaves(given)
        if not any(map(on_device, leaves)):
            with unset_fake_temporarily():
                return function(*given[0], **given[1])
        reads = function is aten._local_scalar_dense.default or (
            function is aten._to_copy.default and str(given[1].get("device")) == "cpu") or (
            function is aten.copy_.default and not on_device(args[0]))
        if reads:  # from the device
            with unset_fake_temporarily():
                return function(*map(self.host, args), **given[1])
        if "varlen_attn" in str(function) and "backward" not in str(function):
            self.kernel.append(args)
        try:
            found = function(*given[0], **given[1])
        except DynamicOutputShapeException:
            return self.valued(None, function, given)
        known = all(not x.is_floating_point() and (x in self.values or not on_device(x))
                    for x in leaves if isinstance(x, torch.Tensor))
        integers = any(not x.is_floating_point() for x in tree_leaves(found)
                       if isinstance(x, FakeTensor))
        return self.valued(found, function, given) if known and integers else found

    def host(self, x):
        """What stands on the host in the place of x."""
        if isinstance(x, FakeTensor):
            return self.values.get(x, torch.ones(x.shape, dtype=x.dtype))
        return torch.device("cpu") if on_device(x) else x

    def valued(self, found, function, given):
        """found = function(*args, **kwargs) with its values; None: its shape depends on them."""
        with unset_fake_temporarily():
            args, kwargs = tree_map(self.host, given)
            real = function(*args, **kwargs)
        if found is None:
            found = tree_map_only(torch.Tensor, lambda x: torch.empty_like(x, device=GPU), real)
        for x, value in zip(tree_leaves(found), tree_leaves(real), strict=True):
            if isinstance(x, FakeTensor) and not x.is_floating_point():
                self.values[x] = value
        return found


class World(fakes.World):
    """Rank 0 of `size` ranks."""

    def sum(self, tensor):
        assert not on_device(tensor), "gloo takes tensors of the host"
        return tensor

    max = sum


def of_logits(logits, *rest):
    """model.of_logits, which gets at least float32."""
    assert logits.dtype == torch.float32
    return model.of_logits(logits, *rest)


def pretended():
    """A context in which torch.cuda has a GPU and model.py compiles nothing."""
    stack, stream = ExitStack(), mock.MagicMock()
    for owner, name, value in (
            *((torch.cuda, name, stream) for name in (
                "current_stream", "Stream", "Event", "stream", "_lazy_init", "set_device")),
            (torch.accelerator, "current_stream", stream), (torch.cuda, "current_device", int),
            (torch.Tensor, "record_stream", lambda x, s: None),
            (torch.Tensor, "pin_memory", lambda x: x), (model, "compiled", lambda: of_logits)):
        stack.enter_context(mock.patch.object(owner, name, value))
    return stack


def as_rank(world, library: str, function, calls: list) -> list:
    """See on_gpus. The world of this process is left for that of fake ranks."""
    td.destroy_process_group()
    ctypes.CDLL(library)
    found = []
    for size, *args in calls:
        td.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        kernel: list = []
        try:
            with pretended(), FakeTensorMode(allow_non_fake_inputs=True), FakeGpu(kernel):
                found.append(function(World(0, size, GPU), kernel, *args))
        except Exception:
            found.append(traceback.format_exc())
        td.destroy_process_group()
    return found


def on_gpus(function, calls: list) -> list:
    """What function(world, kernel, *args) returns on rank 0 of `size` ranks with a GPU each, or its
    traceback, for each (size, *args) of `calls`. They run in a process of their own: when torch
    computes its first gradient, it looks once whether there is a GPU."""
    return ranks.results(1, as_rank, library(), function, calls)[0]


# ---- what a step does there

def kind_of(x) -> tuple[str, str]:
    """("cuda:0", "float32") of a tensor, and of a rank's part of one."""
    x = x.to_local() if isinstance(x, model.DTensor) else x
    return str(x.device), str(x.dtype).removeprefix("torch.")


def models(world, folder: str, args):
    """(policy, reference, critic) of a run, as run.build_models has them."""
    def made(module="logprob_model", kind="policy", trained=True):
        kinds = model.kinds(args, model.config_of(folder), trained)
        module = model.build(getattr(kinds, module), folder, world, args, trained)
        return getattr(kinds, kind)(module, world, args)

    policy = made()
    reference = policy.reference(lambda: made(trained=False)) if args.needs_reference else None
    return policy, reference, made("value_model", "critic") if args.needs_critic else None


class Counted:
    """Counts the micro-batches, and how often a packing is computed for attention."""

    def __init__(self, stack):
        self.micros = self.packings = 0
        for name in "blocks", "varlen":
            counted = cached_property(self.packing(vars(batch.Packed)[name].func))
            counted.__set_name__(batch.Packed, name)
            stack.enter_context(mock.patch.object(batch.Packed, name, counted))
        stack.enter_context(mock.patch.object(batch, "pack", self.pack))

    def pack(self, *args, pack=batch.pack):
        self.micros += 1
        return pack(*args)

    def packing(self, function):
        def count(packed):
            self.packings += 1
            return function(packed)
        return count


def learned(world, kernel: list, folder: str, script: str, flags: dict) -> dict:
    """Two calls of the script's `learn` with the model of a folder, and what reads the models
    afterwards → {what: {(device, dtype), …}}, and the counts of `Counted`."""
    args, gradients = fakes.args(script, group=2, max_tokens=LONGEST, max_prompt_tokens=PROMPT,
                                 **flags), []
    policy, reference, critic = models(world, folder, args)
    learner, options = policy, {"reference": reference}
    if critic:
        learner, options = (policy, critic), options | {"critic_lr": 1e-3, "kl_coef": 0.1}

    def step(self, lr, shipped=model.Trained.step):
        assert all(kind_of(p.grad) == kind_of(p) for p in self.parameters.values())
        gradients.extend(p.grad for p in self.parameters.values())
        return shipped(self, lr)

    with ExitStack() as stack:
        counted = Counted(stack)
        stack.enter_context(mock.patch.object(model.Trained, "step", step))
        for seed in 0, 1:
            samples = fabricate(args, seed)
            fakes.SCRIPTS[script].learn(args, world, learner, samples, lr=1e-3, **options)
    trained = {"policy": policy} | ({"critic": critic} if critic else {})
    saved = checkpoint.tensors(trained)
    everyone = [it.module for it in (policy, reference, critic) if it]
    tensors = {
        "gradients": gradients, "parameters": policy.parameters.values(),
        "reference": reference.module.parameters() if reference else [],
        "buffers": [x for module in everyone for x in module.buffers()],
        "engine": [x for _, x in policy.weights(torch.bfloat16)],
        "saved": [x for name, x in saved.items() if not name.endswith(".step")],
        "heads": [x for args in kernel for x in args[:3]],
        "ends": [x for args in kernel for x in args[3:5]]}
    return {what: {*map(kind_of, found)} for what, found in tensors.items()} | {
        "moments": sum(name.endswith(("exp_avg", "exp_avg_sq")) for name in saved) / len(
            sum((list(it.parameters) for it in trained.values()), [])),
        "micros": counted.micros, "packings": counted.packings}
