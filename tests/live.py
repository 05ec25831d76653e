"""Live bytes of tensors, exactly: every storage that an operation makes, until it is freed."""
from weakref import WeakSet

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """with Live() as live: …; of the storages that operations make inside, live.peak is the most
    bytes that were live after an operation, live.total is the sum of all, live.largest is the
    largest one. A storage is live until its last tensor is gone, or until FSDP resizes it to
    nothing."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.total, self.largest = WeakSet(), 0, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        made = {*storages(out)} - {*storages((args, kwargs))} - {*self.live}  # not of a view
        self.live |= made
        for size in [storage.nbytes() for storage in made]:
            self.total += size
            self.largest = max(self.largest, size)
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.live))
        return out


def storages(tree) -> list[torch.UntypedStorage]:
    """Of all tensors in it; of a sharded one, this rank's part."""
    tensors = [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
    return [(t._local_tensor if isinstance(t, DTensor) else t).untyped_storage() for t in tensors]
