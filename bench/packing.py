"""One update with each prompt once and without useless gradients, beside rows that share nothing
and all have a gradient.

    python bench/packing.py                    all cases, random weights, no engine, one thread
    python bench/packing.py --only tiny,real   some of them
    python bench/packing.py --model FOLDER --only real    a model on disk
    python bench/packing.py --before FOLDER    beside a checkout of another commit instead

Both contestants are the shipped `grpo.learn` on equal samples, each in a process of its own, in
turns. CPU seconds of the process (on a GPU, seconds). A ratio is the median over rounds, with the
smallest and the largest. The bound counts FLOPs: 6 per parameter of the layers and token, 14 per
channel of attention and (query, key) pair, 6 per parameter of the head and predicted token; a third
without a backward.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

# Whose code is timed: see Contestant.
sys.path.insert(0, os.environ.get("CONTESTANT", str(Path(__file__).resolve().parent.parent)))
sys.path.insert(1, f"{sys.path[0]}/bench")

import numpy as np
import torch

import dist
import grpo
import model
from batch import Batch, Completion, Sample
from data import Prompt, Row
from inputs import find_model
from rewards import Score
from step import random_model

ROOT = Path(__file__).resolve().parent.parent
# name: (model, prompts, completions of each, prompt tokens, completion tokens, equal groups)
CASES = {"tiny": ("tiny", 64, 8, (16, 16), (7, 7), 0.2),
         "tiny later": ("tiny", 64, 8, (16, 16), (7, 7), 0.85),
         "3m 1:20": ("3m", 16, 8, (128, 128), (16, 320), 0.0),
         "3m long prompts": ("3m", 4, 8, (1024, 1024), (128, 128), 0.0),
         "tiny one completion": ("tiny", 128, 1, (16, 16), (7, 7), 0.0),
         "3m one completion": ("3m", 64, 1, (16, 16), (16, 320), 0.0),
         "real": (None, 8, 8, (48, 48), (18, 38), 0.0)}


def make_samples(vocab: int, prompts: int, group: int, prompt, completion, equal) -> list[Sample]:
    """Random tokens, lengths log-uniform; the rewards of a share `equal` of the groups do not
    differ."""
    rng, samples = np.random.default_rng(0), []

    def length(low: int, high: int) -> int:
        return round(np.exp(rng.uniform(np.log(low), np.log(high))))

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


def bound(lm, samples: list[Sample]) -> float:
    """FLOPs of rows that share nothing / FLOPs of what is shipped."""
    config, sizes = lm.config, sum(p.numel() for p in lm.parameters())
    head = config.vocab_size * config.hidden_size
    body = sizes - head * (1 if config.tie_word_embeddings else 2)
    pair = 14 * config.num_hidden_layers * config.hidden_size

    def flops(tokens, pairs, predicted, grad=True):
        return (6 * body * tokens + pair * pairs + 6 * head * predicted) * (1 if grad else 1 / 3)

    batch, groups = Batch(samples), {}
    for row, (owner, p, c) in enumerate(batch.sizes):
        groups.setdefault(owner, (p, []))[1].append((c, float(batch.rewards[row])))
    rows = sum(flops(p + c - 1, (p + c - 1) * (p + c) / 2, c) for _, p, c in batch.sizes)
    packed = 0.0
    for p, completions in groups.values():
        grad = len(completions) == 1 or len({reward for _, reward in completions}) > 1
        packed += flops(p, p * (p + 1) / 2, 0, grad) + sum(
            flops(c - 1, (c - 1) * (c / 2 + p), c, grad) for c, _ in completions)
    return rows / packed


class Alone(Batch):
    """A batch in which no row shares its prompt and every row has a gradient."""

    def __init__(self, samples):
        super().__init__(samples)
        self.sizes = [(row, p, c) for row, (_, p, c) in enumerate(self.sizes)]

    def micros(self, world, rows, budget, phase, learns=None):
        return super().micros(world, rows, budget, phase)


class Contestant:
    """A process that runs `learn` of one checkout. It answers a case's name with a JSON line."""

    def __init__(self, folder: Path, alone: bool, model: str | None):
        command = [sys.executable, str(ROOT / "bench/packing.py"), "--serve"]
        if alone:
            command.append("--alone")
        if model:
            command += ["--model", model]
        self.process = subprocess.Popen(
            command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"CONTESTANT": str(folder)})

    def learn(self, case: str) -> dict:
        print(case, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


def serve(options) -> None:
    """The process of a Contestant."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    if options.alone:
        grpo.Batch = Alone
    world, ready = dist.join(60), {}
    for name in map(str.strip, sys.stdin):
        if name not in ready:
            ready[name] = prepare(world, *CASES[name], folder=options.model)
        args, policy, samples = ready[name]
        began = now(world)
        metrics = grpo.learn(args, world, policy, samples, lr=1e-9)
        print(json.dumps({"seconds": now(world) - began, "norm": metrics["grad/norm"],
                          "bound": bound(policy.module.lm, samples)}), flush=True)


def prepare(world, size, prompts, group, *rest, folder: str | None):
    """The arguments of `learn` for a case."""
    if size == "tiny":
        folder = find_model("tiny")
    elif size:
        folder = random_model(size)
    args = grpo.Args(group=group, max_tokens=1024, lr=1e-9,
                     advantage="dr_grpo" if group > 1 else "reinforce++")
    groups = vars(args)  # a checkout from before November 2026 names its groups otherwise
    weights = groups.get("model_args") or groups["weights"]
    optimizer = groups.get("optimizer_args") or groups["optimizer"]
    module = model.build(model.LogprobModel, folder, world, weights)
    policy = model.Policy(module, world, weights, optimizer)
    if hasattr(policy, "pack"):
        policy.pack(True)
    vocab = min(320, module.lm.config.vocab_size)
    return args, policy, make_samples(vocab, prompts, group, *rest)


def now(world) -> float:
    if world.device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def measure(name: str, contestants: list[Contestant], times: int) -> None:
    """A line of the table: `times` rounds after one to warm up."""
    rounds = [[one.learn(name) for one in contestants] for _ in range(times + 1)][1:]
    ratios = [other["seconds"] / ours["seconds"] for other, ours in rounds]
    other, ours = (statistics.median(one["seconds"] for one in column)
                   for column in zip(*rounds, strict=True))
    gap = abs(rounds[0][0]["norm"] / rounds[0][1]["norm"] - 1)
    print(f"| {name} | {other:.2f} → {ours:.2f} | {statistics.median(ratios):.2f} "
          f"({min(ratios):.2f}–{max(ratios):.2f}) | {rounds[0][1]['bound']:.2f} | {gap:.0e} |",
          flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of cases, with commas between")
    parser.add_argument("--model", help="a folder, for the case `real`")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--before", type=Path, help="a checkout of another commit")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options)
    find_model("tiny")  # here: in a contestant its message would be read as an answer
    contestants = [Contestant(options.before or ROOT, not options.before, options.model),
                   Contestant(ROOT, False, options.model)]
    print(f"load average {os.getloadavg()[0]:.1f}\n\n| case | CPU seconds | ratio | by FLOPs | "
          "gradient norms differ by |\n|---|---|---|---|---|")
    for name in CASES:
        wanted = options.only is None or name in options.only.split(",")
        if wanted and (name != "real" or options.model):
            measure(name, contestants, options.times)


if __name__ == "__main__":
    main()
