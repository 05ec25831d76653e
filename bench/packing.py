"""One update, packed and without useless gradients, beside padded rows that all have a gradient.

    python bench/packing.py                    all cases, random weights, no engine, one thread
    python bench/packing.py --only tiny,real   some of them
    python bench/packing.py --model FOLDER --only real    a model on disk

Both contestants are the shipped `grpo.learn` on equal samples, in turns. CPU seconds of this
process (on a GPU, seconds). A ratio is the median over rounds, with the smallest and the largest.
The bound counts FLOPs: 6 per parameter of the layers and token, 14 per channel of attention and
(query, key) pair, 6 per parameter of the head and predicted token; a third without a backward.
"""
import argparse
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import dist  # isort: skip  (before torch: it sets what torch reads)
import numpy as np
import torch

import grpo
import model
from batch import Batch, Completion, Sample
from check import find_model
from data import Prompt, Row
from rewards import Score
from step import random_model

# name: (model, prompts, completions of each, prompt tokens, completion tokens, equal groups)
CASES = {"tiny": ("tiny", 64, 8, (16, 16), (7, 7), 0.2),
         "tiny later": ("tiny", 64, 8, (16, 16), (7, 7), 0.85),
         "3m 1:20": ("3m", 16, 8, (128, 128), (16, 320), 0.0),
         "3m long prompts": ("3m", 4, 8, (1024, 1024), (128, 128), 0.0),
         "tiny one completion": ("tiny", 128, 1, (16, 16), (7, 7), 0.0),
         "real": (None, 8, 8, (48, 48), (18, 38), 0.0)}


def make_samples(vocab: int, prompts: int, group: int, prompt, completion, equal) -> list[Sample]:
    """Random tokens, lengths log-uniform; the rewards of a share `equal` of the groups do not
    differ."""
    rng = np.random.default_rng(0)
    length = lambda low, high: round(np.exp(rng.uniform(np.log(low), np.log(high))))
    samples = []
    for p in range(prompts):
        ids = rng.integers(3, vocab, length(*prompt)).tolist()
        owner = Prompt(p, Row(p, "", ids, None, {}, ""))
        for g in range(group):
            n = length(*completion)
            done = Completion(rng.integers(3, vocab, n).astype(np.int32),
                              np.full(n, -5.7, np.float32), False)
            samples.append(Sample(owner, done, "", Score(
                float((p + g) % 2 and p >= equal * prompts), {}, None)))
    return samples


def bound(policy, samples: list[Sample]) -> float:
    """FLOPs of padded rows / FLOPs of what is shipped."""
    config = policy.module.lm.config
    sizes = sum(p.numel() for p in policy.module.lm.parameters())
    head = config.vocab_size * config.hidden_size
    body = sizes - head * (1 if config.tie_word_embeddings else 2)
    pair = 14 * config.num_hidden_layers * config.hidden_size

    def flops(tokens, pairs, predicted, grad=True):
        return (6 * body * tokens + pair * pairs + 6 * head * predicted) * (1 if grad else 1 / 3)

    batch, groups = Batch(samples), {}
    for row, (owner, p, c) in enumerate(batch.sizes):
        groups.setdefault(owner, (p, []))[1].append((c, float(batch.rewards[row])))
    rows = sum(flops(p + c, (p + c) * (p + c + 1) / 2, c) for _, p, c in batch.sizes)
    packed = 0.0
    for p, completions in groups.values():
        grad = len(completions) == 1 or len({reward for _, reward in completions}) > 1
        packed += flops(p, p * (p + 1) / 2, 0, grad) + sum(
            flops(c - 1, (c - 1) * (c / 2 + p), c, grad) for c, _ in completions)
    return rows / packed


def every_row(self, world, rows, budget, phase, learns=None):
    """Batch.micros that gives every row a gradient."""
    return MICROS(self, world, rows, budget, phase, None if learns is None else learns | True)


MICROS = Batch.micros


def measure(world, name: str, case: tuple, times: int, folder: str | None) -> None:
    size, prompts, group, *rest = case
    folder = folder or (find_model("tiny", make=True) if size == "tiny" else random_model(size))
    args = grpo.Args(group=group, max_tokens=1024, lr=1e-9,
                     advantage="dr_grpo" if group > 1 else "reinforce++")
    module = model.build(model.LogprobModel, folder, world, args.model_args)
    policy = model.Policy(module, world, args.model_args, args.optimizer_args)
    samples = make_samples(min(320, module.lm.config.vocab_size), prompts, group, *rest)
    took, metrics = {False: [], True: []}, {}
    def now() -> float:
        if world.device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    for turn in range(times + 1):
        for shipped, seconds in took.items():
            policy.pack(shipped)
            Batch.micros = MICROS if shipped else every_row
            began = now()
            metrics[shipped] = grpo.learn(args, world, policy, samples, lr=1e-9)
            if turn:
                seconds.append(now() - began)
    gap = abs(metrics[True]["grad/norm"] / metrics[False]["grad/norm"] - 1)
    ratios = [a / b for a, b in zip(*took.values(), strict=True)]
    print(f"| {name} | {statistics.median(took[False]):.2f} → {statistics.median(took[True]):.2f} "
          f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f}) | "
          f"{bound(policy, samples):.2f} | {gap:.0e} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of cases, with commas between")
    parser.add_argument("--model", help="a folder, for the case `real`")
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    world = dist.join(60)
    print(f"load average {os.getloadavg()[0]:.1f}\n\n| case | CPU seconds | ratio | by FLOPs | "
          "gradient norms differ by |\n|---|---|---|---|---|")
    for name, case in CASES.items():
        if options.only is None or name in options.only.split(","):
            if name != "real" or options.model:
                measure(world, name, case, options.times, options.model)


if __name__ == "__main__":
    dist.run(main)
