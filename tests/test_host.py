"""bench/host.py in small: what the host does for a step grows with real tokens alone."""
from torch.utils._python_dispatch import TorchDispatchMode

from bench import host


class Made(TorchDispatchMode):
    """Counts the bytes of the results of all operations, and notes the largest."""
    total = largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if hasattr(x, "nbytes") and not x._is_view():
                self.total += x.nbytes
                self.largest = max(self.largest, x.nbytes)
        return result


def test_padding_costs_nothing():
    """A matrix of all completions would double with the longest one, which is the last."""
    found = []
    for longest in 16_000, 32_000:
        samples = host.make_samples(64, 8, 256, longest)
        with Made() as made:
            host.learn(samples, 8, 64, 4, 512 + longest)
        found.append((made, sum(s.completion.tokens for s in samples)))
    (short, tokens), (long, more) = found
    assert more == tokens + 16_000
    assert long.total / short.total < 1.1 * more / tokens
    assert long.largest <= 8 * more  # no tensor has more than one number a token
