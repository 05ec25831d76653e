"""A GPU without a GPU: tensors of device "cuda" become meta tensors, which have a shape and a dtype
and no numbers. Tensors of the host are real.

torch without CUDA cannot make a gradient of a fake tensor of device "cuda", but of a meta tensor.
"""
import sys
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model

aten = torch.ops.aten
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


def on_gpu(x) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "meta"


def on_host(x) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "cpu"


def of_logits(logits, *rest):
    """model.of_logits, which gets at least float32."""
    assert logits.dtype == torch.float32
    return model.of_logits(logits, *rest)


def pretend(monkeypatch) -> None:
    """torch does not look for a GPU, and nothing is compiled."""
    for owner, name, value in (
            (torch.cuda, "_lazy_init", mock.Mock()), (model, "compiled", lambda: of_logits),
            (torch.Tensor, "pin_memory", lambda x: x),
            (torch.Tensor, "is_cuda", property(on_gpu)),
            (sys.modules["torch.optim.optimizer"], "_get_fused_kernels_supported_devices",
             lambda: ["cuda", "meta"])):
        monkeypatch.setattr(owner, name, value)


class FakeGpu(TorchDispatchMode):
    """with FakeGpu(kernel): … An operation on both devices is an AssertionError. A size that is on
    the device is an error of meta tensors. kernel: a list that gets the arguments of each call of
    the kernel of attention."""

    def __init__(self, kernel: list):
        super().__init__()
        self.kernel = kernel

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        ours = any(map(on_gpu, leaves))
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = torch.device("meta")
        if ours and function is aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        if ours and function is aten._to_copy.default and str(kwargs.get("device")) == "cpu":
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if ours and function is aten.copy_.default and on_host(args[0]):
            return args[0]
        copied = function in (aten._to_copy.default, aten.copy_.default)
        if not copied and not (function in INDEXED and on_gpu(args[0])):
            assert not (ours and any(on_host(x) and x.dim() for x in leaves)), (
                f"{function} mixes the host and the device: "
                f"{[(x.device.type, *x.shape) for x in leaves if isinstance(x, torch.Tensor)]}")
        if "varlen_attn" in str(function) and "backward" not in str(function):
            self.kernel.append(args)
        return function(*args, **kwargs)
