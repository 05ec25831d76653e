"""bench/host.py in small: what the host does for a step grows with real tokens alone."""
import sys
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
import host  # noqa: E402


class Made(TorchDispatchMode):
    """Counts the bytes of the results of all operations, and notes the largest."""
    total = largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor) and not x._is_view():
                self.total += x.nbytes
                self.largest = max(self.largest, x.nbytes)
        return result


def made(longest: int) -> tuple[Made, int]:
    """By one `learn` as one of 64 ranks, and the batch's tokens. The last completion is long."""
    samples = host.make_samples(64, 8, 256, longest)
    with Made() as found:
        host.learn(samples, 8, 64, 4, 512 + longest)
    return found, sum(s.completion.tokens for s in samples)


def test_padding_costs_nothing():
    """A matrix of all completions would double with the longest one."""
    (short, tokens), (long, more) = made(16_000), made(32_000)
    assert more == tokens + 16_000
    assert long.total / short.total < 1.1 * more / tokens
    assert long.largest <= 8 * more        # no tensor has more than one number a token
