"""What the host does for one update of a large global batch, on one rank of many, without a model.

    python bench/host.py                           512 x 16 completions of up to 8,192 tokens
    python bench/host.py --max_tokens 32768        longer ones
    python bench/host.py --longest 65536           one of them is longer: what padding would cost

It calls the shipped `grpo.learn` as one of --ranks ranks, with a policy that costs nothing. The
lengths are log-normal, with a mean of a third of --max_tokens. One thread. The memory is what
`learn` needs at its peak beside the samples, by a process of its own.
"""
import argparse
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy as np
import torch

import grpo
from batch import Sample
from data import Prompt, Row


def make_samples(prompts: int, group: int, max_tokens: int, longest: int) -> list[Sample]:
    """Completions of log-normal lengths; the last one has `longest` tokens, if it is not 0."""
    rng, samples = np.random.default_rng(0), []
    lengths = np.exp(rng.normal(np.log(max_tokens / 4), 0.75, prompts * group))
    lengths = np.clip(lengths, 16, max_tokens).astype(int)
    if longest:
        lengths[-1] = longest
    for i, length in enumerate(lengths):
        if i % group == 0:
            row = Row(i, "", rng.integers(0, 1000, 200).tolist(), None, {}, "")
        samples.append(Sample(Prompt(row.index, row), rng.integers(0, 1000, length, np.int32),
                              np.full(length, -1.0, np.float32), reward=float(i % 3 == 0)))
    return samples


class Free:
    """A policy whose log-probs cost nothing. They have a gradient, as those of a model."""
    metrics = {}

    def logprobs(self, micro, *options):
        values = torch.zeros(len(micro.targets), requires_grad=torch.is_grad_enabled())
        return values, values.detach()

    def backward(self, loss):
        loss.backward()

    def step(self, lr: float) -> float:
        return 1.0


def one_of(ranks: int):
    """A World of which only this rank is there."""
    def same(x):
        return x

    return SimpleNamespace(rank=ranks // 2, size=ranks, device=torch.device("cpu"), sum=same,
                           max=same, same_phase=lambda *_: None)


def resident() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def learn(samples: list[Sample], group: int, ranks: int, minibatches: int, budget: int) -> float:
    """→ seconds of the CPU."""
    args = grpo.Args(group=group, minibatches=minibatches, max_tokens=1 << 20,
                     update_tokens=budget, logprob_tokens=2 * budget)
    began = time.process_time()
    grpo.learn(args, one_of(ranks), Free(), samples, lr=1.0)
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"prompts": 512, "group": 16, "max_tokens": 8192, "longest": 0,
                          "ranks": 64, "minibatches": 4, "times": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    o = parser.parse_args()
    torch.set_num_threads(1)
    samples = make_samples(o.prompts, o.group, o.max_tokens, o.longest)
    budget = 512 + max(o.max_tokens, o.longest)
    learn(samples[:o.group * o.minibatches], o.group, 1, o.minibatches, budget)  # to warm up
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's peak starts again
    before, seconds = resident(), []
    for _ in range(o.times):
        seconds.append(learn(samples, o.group, o.ranks, o.minibatches, budget))
    tokens = sum(s.tokens for s in samples)
    print(f"{len(samples):,} completions, {tokens / 1e6:.1f} million tokens, rank of {o.ranks}, "
          f"{o.minibatches} minibatches: {min(seconds):.2f} s ({max(seconds):.2f} at most), "
          f"{(resident() - before) / 2**30:.2f} GiB above the samples")


if __name__ == "__main__":
    main()
