"""The engine's new weights, beside another checkout: CPU seconds of one sync, of all ranks.
With --completions N, those of sampling N completions of 32 tokens instead.

    python bench/sync.py --beside FOLDER               FOLDER: a checkout of another commit
    python bench/sync.py --beside FOLDER --only tiny   one model; --ranks 2: the ranks of both
    python bench/sync.py --beside FOLDER --completions 64   what the engine's kernels cost

Both load the same weights; after each sync the engine samples, and the table says whether the token
ids are equal. That the engine's tensors are equal bit for bit: tests/test_engine.py. Both
contestants are in memory at once.
"""
import argparse
import hashlib
import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

# Whose code is timed: see Contestant.
sys.path.insert(0, os.environ.get("CONTESTANT", str(Path(__file__).resolve().parent.parent)))

import torch

import dist
import grpo
import model
from batch import Sample
from beside import ROOT, Contestant, measure
from data import Prompt, Row
from examples import tiny
from rollout import Engine

SIZES = {"tiny": dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                      num_attention_heads=4, num_key_value_heads=4),
         "106m": dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                      num_attention_heads=9, num_key_value_heads=3)}


def random_model(size: str, longest: int = 256) -> str:
    """A folder with random weights in float32, of SmolLM2's shapes, with tiny.py's tokenizer, for
    sequences of `longest` tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM
    folder = ROOT / "runs" / (f"bench-sync-{size}" + "-long" * (longest > 256))
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=tiny.VOCAB, max_position_embeddings=longest, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=2, dtype="float32", **SIZES[size])).save_pretrained(folder)
    tiny.make_tokenizer().save_pretrained(folder)
    return str(folder)


def serve(size: str, completions: int) -> None:
    """The process of a Contestant: a sync, then samples, for each line of rank 0's input. Its
    seconds are those of the sync, or of the samples if their number is given."""
    world = dist.join(120)
    args = grpo.Args(max_tokens=32 if completions else 8,
                     max_num_seqs=256)
    torch.set_num_threads(1)
    folder = str(ROOT / "runs" / f"bench-sync-{size}")
    policy = model.Policy(model.build(model.LogprobModel, folder, world, args), world, args)
    inputs = SimpleNamespace(source=folder, ends=[], plan=SimpleNamespace(longest=64),
                             kv_cache=2**29 if completions else 2**26)
    engine = Engine(args, world, inputs, SimpleNamespace(time=lambda name: nullcontext()), [policy])
    while any(world.gather([sys.stdin.readline() if world.rank == 0 else ""])):
        began = time.process_time()
        engine.load(policy)
        brought = time.process_time()
        done = [Sample(Prompt(i, Row(i, "", [5, 6, 7 + i], None, {}, "")), seed=i)
                for i in range(completions or 8)]
        engine.complete(done, 1.0)
        sampled = time.process_time() - brought
        seconds = sum(world.gather([sampled if completions else brought - began]))
        made = hashlib.sha256(b"".join(c.ids.tobytes() for c in done))
        if world.rank == 0:
            print(json.dumps({"seconds": seconds, "made": made.hexdigest()}), flush=True)
    engine.close()


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="a checkout of another commit")
    parser.add_argument("--only", choices=SIZES)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--completions", type=int, default=0, help="time their sampling instead")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not (options.serve or options.beside):
        parser.error("--beside FOLDER must be given: seconds of one checkout say nothing.")
    return options


def main(options: argparse.Namespace) -> None:
    if options.serve:
        return serve(options.only, options.completions)
    print("| model | ranks | CPU seconds | ratio | the same samples |\n|---|---|---|---|---|")
    for size in [options.only] if options.only else SIZES:
        random_model(size)
        other, ours = (Contestant("sync.py", folder, "--only", size, "--completions",
                                  str(options.completions), ranks=options.ranks)
                       for folder in (options.beside, ROOT))
        cells, (theirs, mine) = measure(size, other, ours, options.times)
        same = "yes" if theirs["made"] == mine["made"] else "no"
        print(f"| {size} | {options.ranks} | {cells} | {same} |", flush=True)
        other.close()
        ours.close()


if __name__ == "__main__":
    dist.run(main, options_of())  # which ends the process
