"""bench/head.py: log π of the targets, by model.token_logprobs and by F.linear_cross_entropy.

    python bench/head.py            a table: CPU seconds, peak memory, errors

Forward and backward of (n, H) hidden states through a head (V, H), each way in a process of its
own.
"""
import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.nn import functional as F

SIZES = [(2048, 576, 49_152), (4096, 64, 512)]  # n, H, V: SmolLM2-135M's head; the tiny model's
TURNS = 5


def ours(hidden, head, targets):
    """(n,), as a step computes it."""
    from model import HEAD_LOGITS, token_logprobs
    chunk = max(1, HEAD_LOGITS // len(head))
    return token_logprobs(hidden, lambda x: (x @ head.T).float() if x.dtype == torch.bfloat16
                          else x @ head.T, targets, 1.0, chunk, False)[0]


def torchs(hidden, head, targets):
    """(n,), by the library."""
    return -F.linear_cross_entropy(hidden, head, targets, reduction="none")


WAYS = {"ours": ours, "torch": torchs}


def made(n, width, vocab, dtype):
    """Hidden states, a head and targets from one seed."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, width, generator=generator, dtype=torch.float64)
    head = torch.randn(vocab, width, generator=generator, dtype=torch.float64) / width**0.5
    targets = torch.randint(vocab, (n,), generator=generator)
    return hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_(), targets


def measure(way: str, sizes) -> None:
    """Prints the median of the CPU seconds of forward and backward, and the peak in MB."""
    torch.set_num_threads(1)
    hidden, head, targets = made(*sizes, torch.float32)
    spent = []
    for _ in range(TURNS):
        began = time.process_time()
        WAYS[way](hidden, head, targets).sum().backward()
        spent.append(time.process_time() - began)
        hidden.grad = head.grad = None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{sorted(spent)[TURNS // 2]:.3f} {peak}")


def errors(dtype) -> tuple[float, float]:
    """The largest difference of each way from float64, relative to the largest log-prob."""
    sizes = 256, 64, 4096
    exact = ours(*made(*sizes, torch.float64)).detach()
    found = [way(*made(*sizes, dtype)).detach().double() for way in WAYS.values()]
    return tuple(float((x - exact).abs().max() / exact.abs().max()) for x in found)


def main() -> None:
    print("| (n, H, V) | way | CPU seconds | peak, MB |\n|---|---|---|---|")
    for sizes in SIZES:
        for way in WAYS:
            words = [sys.executable, __file__, way, *map(str, sizes)]
            seconds, peak = subprocess.run(words, capture_output=True, text=True,
                                           check=True).stdout.split()
            print(f"| {sizes} | {way} | {seconds} | {peak} |")
    for dtype in torch.float64, torch.float32, torch.bfloat16:
        print(dtype, "relative error, ours and torch's:", *(f"{x:.1e}" for x in errors(dtype)))
    hidden, head, targets = made(8, 4, 16, torch.float32)
    F.linear_cross_entropy(hidden, head, torch.full_like(targets, -100)).backward()
    print("all targets ignored: gradient finite:", bool(hidden.grad.isfinite().all()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("one", nargs="*", help=argparse.SUPPRESS)  # a way and its sizes
    one = parser.parse_args().one
    if one:
        measure(one[0], tuple(map(int, one[1:])))
    else:
        main()
