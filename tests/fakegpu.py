"""A GPU without a GPU. Tensors of device "cuda" become meta tensors: they have a shape and a dtype,
and no numbers. Tensors of the host are real. What makes the host wait for the GPU is counted.

torch without CUDA cannot make a gradient of a fake tensor of device "cuda", but of a meta tensor.
"""
import traceback
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import model as head

aten, ROOT = torch.ops.aten, Path(__file__).parent.parent
SIZED = (aten.nonzero.default, aten.masked_select.default,  # sizes that are on the device
         aten.repeat_interleave.Tensor, aten.masked_scatter_backward.default)
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


def on_gpu(x) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "meta"


def on_host(x) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "cpu"


class FakeGpu(TorchDispatchMode):
    """with FakeGpu() as gpu: …

    gpu.waits {(kind, place in our code): times}; gpu.varlen [arguments of each call of the kernel].
    """

    def __enter__(self):
        self.waits, self.varlen, self.pinned, self.stack = Counter(), [], {}, ExitStack()

        def is_cuda(x):
            return on_gpu(x)

        def plain():
            return head.of_logits

        for owner, name, value in (
                (torch.cuda, "_lazy_init", mock.Mock()), (torch.cuda, "synchronize", mock.Mock()),
                (torch.cuda, "empty_cache", mock.Mock()), (head, "compiled", plain),
                (torch.Tensor, "pin_memory", torch._C.TensorBase.pin_memory),  # vLLM has its own
                (torch.Tensor, "is_cuda", property(is_cuda))):
            self.stack.enter_context(mock.patch.object(owner, name, value, create=True))
        self.stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device=…) copies visibly
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.stack.close()

    def wait(self, kind: str) -> None:
        ours = [f for f in traceback.extract_stack()
                if Path(f.filename).parent == ROOT]
        place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "elsewhere"
        self.waits[kind, place] += 1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        ours = any(map(on_gpu, leaves))
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = torch.device("meta")
        if function in (aten._pin_memory.default, aten.is_pinned.default):
            return self.pin(function, args[0])
        if function in SIZED and ours:
            self.wait("a size to the host")
            raise AssertionError(f"the host would wait for the sizes of {function}")
        if function is aten._local_scalar_dense.default and ours:
            self.wait("a number to the host")
            return 1.0 if args[0].is_floating_point() else 1
        if function in (aten._to_copy.default, aten.copy_.default):
            return self.copy(function, args, kwargs)
        if function in INDEXED and on_gpu(args[0]):
            for _ in filter(on_host, args[1]):
                self.wait("copy to the device")
        elif ours and any(on_host(x) and x.dim() for x in leaves):
            found = [(x.device.type, *x.shape) for x in leaves if isinstance(x, torch.Tensor)]
            raise AssertionError(f"{function} mixes the host and the device: {found}")
        if "varlen_attn" in str(function) and "backward" not in str(function):
            self.varlen.append(args)
        return function(*args, **kwargs)

    def copy(self, function, args, kwargs):
        """A copy between host and device waits, but for one from pinned memory that need not."""
        if function is aten.copy_.default:
            source, gpu = args[1], on_gpu(args[0])
        else:
            source = args[0]
            gpu = torch.device(kwargs.get("device") or source.device).type == "meta"
        if on_host(source) and gpu and not (id(source) in self.pinned
                                            and kwargs.get("non_blocking")):
            self.wait("copy to the device")
        if on_gpu(source) and not gpu:
            self.wait("copy to the host")
            if function is aten.copy_.default:
                return args[0]
            return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        return function(*args, **kwargs)

    def pin(self, function, x):
        if function is aten.is_pinned.default:
            return id(x) in self.pinned
        with _disable_current_modes():
            found = x.clone()
        self.pinned[id(found)] = found  # kept: no other tensor may get its id
        return found
