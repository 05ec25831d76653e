"""Seconds to save and to load a checkpoint: a policy of Qwen2.5-0.5B's shape with AdamW's state.

    python bench/checkpoint.py                            one rank
    torchrun --nproc_per_node 2 bench/checkpoint.py       two ranks
    python bench/checkpoint.py --where /dev/shm           a disk in memory: only torch's own work
    python bench/checkpoint.py --shape tiny               only to see that it runs

The weights are random: nothing is downloaded. It writes about 5.9 GB under --where, removes them,
and prints one line of JSON. The loop waits for as long as a save takes.
"""
import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import dist
from keeping import checkpoint
from trainer import model

SHAPES = {
    "0.5b": dict(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                 num_attention_heads=14, num_key_value_heads=2),
    "tiny": dict(vocab_size=320, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=4)}


def make_weights(folder: Path, shape: str) -> None:
    """A Hugging Face folder of that shape with random weights, in bfloat16."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    with torch.device("meta"):
        lm = Qwen2ForCausalLM(Qwen2Config(
            **SHAPES[shape], tie_word_embeddings=True, dtype="bfloat16"))
    lm = lm.to(torch.bfloat16).to_empty(device="cpu")
    for p in lm.parameters():
        torch.nn.init.uniform_(p, -0.02, 0.02)
    lm.tie_weights()
    lm.save_pretrained(folder)


def make_policy(folder: Path, world: dist.World) -> model.Policy:
    """A policy with optimizer state, as after a step."""
    args = model.ModelArgs(dtype="float32")
    module = model.build(model.LogprobModel, str(folder), world, args)
    policy = model.Policy(module, world, args, model.OptimizerArgs())
    for p in policy.module.parameters():
        policy.optimizer.state[p] = {"step": torch.ones(()), "exp_avg": p.detach().clone(),
                                     "exp_avg_sq": p.detach().square()}
    return policy


def main(shape: str, times: int, where: str) -> None:
    world = dist.join()
    folder = Path(where) / f"bench-checkpoint-{shape}"
    if world.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        make_weights(folder / "model", shape)
    world.barrier()
    policy = make_policy(folder / "model", world)
    trained, seconds = {"policy": policy}, {"save": [], "find": [], "load": []}

    def timed(name, function, *args):
        world.barrier()
        began = time.perf_counter()
        result = function(*args)
        world.barrier()
        seconds[name].append(round(time.perf_counter() - began, 2))
        return result

    for step in range(1, times + 1):
        state = {"step": step, "settings": {}}
        error = timed("save", checkpoint.save, folder / "checkpoints", world, trained, state, 1)
        assert error is None, error
    for _ in range(times):
        saved = timed("find", checkpoint.find, folder / "checkpoints", world)
        timed("load", checkpoint.load, saved, world, trained)
    if world.rank == 0:
        size = sum(p.stat().st_size for p in saved.path.iterdir())
        print(json.dumps({
            "shape": shape, "parameters": sum(p.numel() for p in policy.module.parameters()),
            "ranks": world.size, "gigabytes": round(size / 1e9, 2), "device": world.device.type,
            "cores": len(os.sched_getaffinity(0)), "load_average": os.getloadavg()[0],
            "seconds": seconds}))
        shutil.rmtree(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--where", default=str(Path(__file__).resolve().parent.parent / "runs"))
    a = parser.parse_args()
    dist.run(main, a.shape, a.times, a.where)
