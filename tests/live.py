"""Live bytes of tensors, exactly: every storage that an operation makes, until it is freed."""
import weakref

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """with Live() as live: …; of the storages made inside, live.peak is the most bytes that were
    live at once, live.total is the sum of all, live.largest is the largest one. A storage is live
    until its last tensor is gone, or until it is resized to nothing."""

    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.peak, self.total, self.largest = {}, 0, 0, 0, 0

    def __enter__(self):
        self.resize = resize = torch.UntypedStorage.resize_

        def resized(storage, size):  # FSDP frees a gathered weight so, and makes it again
            resize(storage, size)
            if id(storage) in self.sizes:
                self.forget(id(storage))
                self.count(storage)
        torch.UntypedStorage.resize_ = resized
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self.resize
        return super().__exit__(*error)

    def count(self, storage: torch.UntypedStorage) -> None:
        """Adds the bytes of a storage."""
        self.sizes[id(storage)] = size = storage.nbytes()
        self.now += size
        self.total += size
        self.peak = max(self.peak, self.now)
        self.largest = max(self.largest, size)

    def forget(self, number: int) -> None:
        """Takes the bytes of a storage away. number: its id."""
        self.now -= self.sizes.pop(number)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {id(storage) for storage in storages((args, kwargs))}  # a view makes nothing
        for storage in storages(out):
            if id(storage) not in self.sizes and id(storage) not in given:
                weakref.finalize(storage, self.forget, id(storage))
                self.count(storage)
        return out


def storages(tree) -> list[torch.UntypedStorage]:
    """Of all tensors in it; of a sharded one, this rank's part."""
    tensors = [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
    return [(t._local_tensor if isinstance(t, DTensor) else t).untyped_storage() for t in tensors]
