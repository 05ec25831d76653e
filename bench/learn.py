"""One update, `grpo.learn`, beside rows that share nothing, or beside another checkout.

    python bench/learn.py                      rows that share nothing → packed, no engine
    python bench/learn.py --beside FOLDER      beside a checkout of another commit instead
    python bench/learn.py --only 'tiny;real'   some of the cases
    python bench/learn.py --model FOLDER --only real    a model on disk

Both contestants are the shipped `grpo.learn` on equal samples (beside.py). CPU seconds of the
process (on a GPU, seconds), one thread. The bound counts FLOPs: 6 per parameter of the layers and
token, 14 per channel of attention and (query, key) pair, 6 per parameter of the head and predicted
token, of the completions that learn; without --beside, of rows that share nothing to packed ones.
"""
import argparse
import json
import os
import sys
import time
from pathlib import Path

# Whose code is timed: see Contestant.
sys.path.insert(0, os.environ.get("CONTESTANT", str(Path(__file__).resolve().parent.parent)))

import numpy as np
import torch

import dist
import grpo
import model
from batch import Batch, Sample
from beside import ROOT, Contestant, measure
from data import Prompt, Row
from examples import tiny
from preflight import find_model

SHORT = (16, 64)
# name: (ids of a 3m model, or a model; prompts, completions of each, prompt tokens, completion
# tokens, share of equal groups)
CASES = {"tiny": ("tiny", 64, 8, (16, 16), (7, 7), 0.2),
         "tiny later": ("tiny", 64, 8, (16, 16), (7, 7), 0.85),
         "3m 1:20": (tiny.VOCAB, 16, 8, (128, 128), (16, 320), 0.0),
         "3m long prompts": (tiny.VOCAB, 4, 8, (1024, 1024), (128, 128), 0.0),
         "tiny one completion": ("tiny", 128, 1, (16, 16), (7, 7), 0.0),
         "3m one completion": (tiny.VOCAB, 64, 1, (16, 16), (16, 320), 0.0),
         "none equal": (tiny.VOCAB, 16, 8, (16, 16), (16, 320), 0.0),
         "half equal": (tiny.VOCAB, 16, 8, (16, 16), (16, 320), 0.5),
         "0.85 equal": (tiny.VOCAB, 16, 8, (16, 16), (16, 320), 0.85),
         "49,152 ids, none equal": (49152, 16, 8, (16, 16), SHORT, 0.0),
         "49,152 ids, half equal": (49152, 16, 8, (16, 16), SHORT, 0.5),
         "49,152 ids, 0.85 equal": (49152, 16, 8, (16, 16), SHORT, 0.85),
         "real": (None, 8, 8, (48, 48), (18, 38), 0.0)}


def random_model(vocab: int) -> str:
    """A folder with random weights in float32: 3 million parameters beside the embedding."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    folder = ROOT / "runs" / f"bench-learn-{vocab}"
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        Qwen2ForCausalLM(Qwen2Config(
            vocab_size=vocab, hidden_size=256, intermediate_size=640, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=4096,
            tie_word_embeddings=True, bos_token_id=None, eos_token_id=2, dtype="float32")
        ).save_pretrained(folder)
    return str(folder)


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
            samples.append(Sample(owner, rng.integers(3, vocab, n).astype(np.int32),
                                  np.full(n, -5.7, np.float32),
                                  reward=float((p + g) % 2 and p >= equal * prompts)))
    return samples


def bound(lm, samples: list[Sample], packed: bool) -> float:
    """FLOPs of an update of the completions that learn."""
    config, sizes = lm.config, sum(p.numel() for p in lm.parameters())
    head = config.vocab_size * config.hidden_size
    body = sizes - head * (1 if config.tie_word_embeddings else 2)
    pair = 14 * config.num_hidden_layers * config.hidden_size

    def flops(tokens, pairs, predicted):
        return 6 * body * tokens + pair * pairs + 6 * head * predicted

    batch, groups, total = Batch(samples), {}, 0.0
    for row, (owner, p, c) in enumerate(batch.sizes):
        groups.setdefault(owner, (p, []))[1].append((c, float(batch.rewards[row])))
    for p, completions in groups.values():
        if len(completions) > 1 and len({reward for _, reward in completions}) == 1:
            continue
        lengths = [c for c, _ in completions]
        if packed:
            total += flops(p, p * (p + 1) / 2, 0) + sum(
                flops(c - 1, (c - 1) * (c / 2 + p), c) for c in lengths)
        else:
            total += sum(flops(p + c - 1, (p + c - 1) * (p + c) / 2, c) for c in lengths)
    return total


class Alone(Batch):
    """A batch in which no row shares its prompt."""

    def __init__(self, samples):
        super().__init__(samples)
        self.sizes = [(row, p, c) for row, (_, p, c) in enumerate(self.sizes)]


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
                          "flops": bound(policy.module.lm, samples, not options.alone)}),
              flush=True)


def prepare(world, size, prompts, group, *rest, folder: str | None):
    """The arguments of `learn` for a case."""
    if size == "tiny":
        folder = find_model("tiny")
    elif size:
        folder = random_model(size)
    args = grpo.Args(group=group, max_tokens=1024, lr=1e-9,
                     advantage="dr_grpo" if group > 1 else "reinforce++")
    module = model.build(model.LogprobModel, folder, world, args)
    policy = model.Policy(module, world, args)
    vocab = min(320, module.lm.config.vocab_size)
    return args, policy, make_samples(vocab, prompts, group, *rest)


def now(world) -> float:
    if world.device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of cases, with semicolons between")
    parser.add_argument("--model", help="a folder, for the case `real`")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--beside", type=Path, help="a checkout of another commit")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options)
    find_model("tiny")  # here: in a contestant its message would be read as an answer
    flags = ["--model", options.model] if options.model else []
    other = Contestant("learn.py", options.beside or ROOT, *flags,
                       *([] if options.beside else ["--alone"]))
    ours = Contestant("learn.py", ROOT, *flags)
    print(f"load average {os.getloadavg()[0]:.1f}\n\n| case | CPU seconds | ratio | by FLOPs | "
          "gradient norms differ by |\n|---|---|---|---|---|")
    for name in CASES:
        wanted = options.only is None or name in options.only.split(";")
        if wanted and (name != "real" or options.model):
            cells, (theirs, mine) = measure(name, other, ours, options.times)
            print(f"| {name} | {cells} | {theirs['flops'] / mine['flops']:.2f} | "
                  f"{abs(theirs['norm'] / mine['norm'] - 1):.0e} |", flush=True)


if __name__ == "__main__":
    main()
