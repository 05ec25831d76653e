"""The engine's cache on a CPU: seconds of a rollout with blocks of 32, 64 and 128 tokens.

    python bench/blocks.py                     the tiny model, 64 completions: a few minutes
    python bench/blocks.py --size 106m --prompts_of_8 2

Each prompt has 8 completions, all of the given length. The engines of the three sizes take turns,
each on one thread, and each rollout begins with an empty cache. Below 32 vLLM's attention does not
run on a CPU (v1/attention/backends/cpu_attn.py); 128 is its own choice there.
"""
import argparse
import json
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from sync import SIZES, random_model

import dist
import grpo
import model
import rollout
from batch import Sample
from beside import ROOT, Contestant
from data import Prompt, Row

BLOCKS, PROMPTS, COMPLETIONS, TIMES = (32, 64, 128), (16, 48, 128, 512), (16, 256, 1024), 3


def serve(size: str, block: int, prompts: int) -> None:
    """The process of a Contestant: a line is "PROMPT COMPLETION", both in tokens."""
    rollout.block_tokens = lambda card, longest: block
    world = dist.join(120)
    args = grpo.Args(max_num_seqs=256)
    torch.set_num_threads(1)
    folder = str(ROOT / "runs" / f"bench-sync-{size}-long")
    policy = model.Policy(model.build(model.LogprobModel, folder, world, args), world, args)
    inputs = SimpleNamespace(source=folder, ends=[], kv_cache=2**31,
                             plan=SimpleNamespace(longest=PROMPTS[-1] + COMPLETIONS[-1]))
    engine = rollout.Engine(args, world, inputs, SimpleNamespace(time=lambda name: nullcontext()),
                            [policy])
    engine.load(policy)
    for line in sys.stdin:
        tokens, engine.max_tokens = map(int, line.split())
        draws = np.random.default_rng(tokens).integers(3, 100, (prompts, tokens)).tolist()
        samples = [Sample(Prompt(i, Row(i, "", ids, None, {}, "")), seed=i)
                   for i, ids in enumerate(draws * 8)]
        engine.forget()
        began, worked = time.perf_counter(), time.process_time()
        done = engine.outputs(samples, 1.0)
        print(json.dumps({
            "seconds": time.perf_counter() - began, "cpu": time.process_time() - worked,
            "cached": sum(one.num_cached_tokens for one in done),
            "made": [list(one.outputs[0].token_ids) for one in done]}), flush=True)
    engine.close()


def main(options: argparse.Namespace) -> None:
    if options.serve:
        return serve(options.size, options.block, options.prompts_of_8)
    random_model(options.size, longest=PROMPTS[-1] + COMPLETIONS[-1])
    engines = [Contestant("blocks.py", ROOT, "--block", str(block), *sys.argv[1:])
               for block in BLOCKS]
    print("| prompt | completion | seconds with " + ", ".join(map(str, BLOCKS)) +
          " | CPU seconds | prompt tokens out of the cache | equal completions |\n|---|---|---|---|"
          "---|---|")
    for prompt in PROMPTS:
        for completion in COMPLETIONS:
            rounds = [[one.run(f"{prompt} {completion}") for one in engines]
                      for _ in range(TIMES)]
            cells = [", ".join(f"{statistics.median(one[what] for one in column):,.3g}"
                               for column in zip(*rounds, strict=True))
                     for what in ("seconds", "cpu")]
            cached = ", ".join(f"{one['cached']:,}" for one in rounds[-1])
            made = [one["made"] for one in rounds[-1]]
            same = min(sum(map(list.__eq__, made[0], other)) for other in made[1:])
            print(f"| {prompt} | {completion} | {cells[0]} | {cells[1]} | {cached} | {same} of "
                  f"{len(made[0])} |", flush=True)
    for one in engines:
        one.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--prompts_of_8", type=int, default=8)
    parser.add_argument("--block", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    dist.run(main, parser.parse_args())  # which ends the process
