"""Live bytes of tensors, exactly: every storage that an operation makes, until it is freed."""
import weakref

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """with Live() as live: …; live.peak is the most bytes that were live at once of those made
    inside, live.largest those of the largest storage. A storage is live until its last tensor is
    gone, or until it is resized to nothing."""

    def __init__(self):
        super().__init__()
        self.sizes, self.peak, self.largest = {}, 0, 0

    def __enter__(self):
        self.resize = resize = torch.UntypedStorage.resize_

        def resized(storage, size):  # FSDP frees a gathered weight so, and makes it again
            resize(storage, size)
            if id(storage) in self.sizes:
                self.count(storage)
        torch.UntypedStorage.resize_ = resized
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self.resize
        return super().__exit__(*error)

    def count(self, storage: torch.UntypedStorage) -> None:
        """Notes the bytes of a storage, and the largest sums."""
        self.sizes[id(storage)] = size = storage.nbytes()
        self.peak = max(self.peak, sum(self.sizes.values()))
        self.largest = max(self.largest, size)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {id(storage) for storage in storages((args, kwargs))}  # a view makes nothing
        for storage in storages(out):
            if id(storage) not in self.sizes and id(storage) not in given:
                weakref.finalize(storage, self.sizes.pop, id(storage))
                self.count(storage)
        return out


def storages(tree) -> list[torch.UntypedStorage]:
    """Of all tensors in it; of a sharded one, this rank's part."""
    tensors = [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
    return [(t._local_tensor if isinstance(t, DTensor) else t).untyped_storage() for t in tensors]
