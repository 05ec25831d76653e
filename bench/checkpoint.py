"""Seconds to save and to load a checkpoint, and so the stall of the loop: a policy of Qwen2.5-0.5B's shape with AdamW's state.

    python bench/checkpoint.py                                     one rank
    torchrun --nproc_per_node 2 bench/checkpoint.py                two
    python bench/checkpoint.py --where /dev/shm                    on a disk that costs nothing: what is left is torch's own work
    python bench/checkpoint.py --shape tiny                        only to see that it runs

Random weights: nothing is downloaded. Writes about 5.9 GB beside this checkout and removes them. Prints one JSON line.
"""
import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import dist  # first: it sets what torch reads
import torch

import checkpoint
import model

SHAPES = {"0.5b": dict(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2),
          "tiny": dict(vocab_size=320, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)}


def weights(folder: Path, shape: str) -> None:
    """A Hugging Face folder of that shape with random weights, in bfloat16."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    with torch.device("meta"):
        lm = Qwen2ForCausalLM(Qwen2Config(**SHAPES[shape], tie_word_embeddings=True, dtype="bfloat16"))
    lm = lm.to(torch.bfloat16).to_empty(device="cpu")
    for p in lm.parameters():
        torch.nn.init.uniform_(p, -0.02, 0.02)
    lm.tie_weights()
    lm.save_pretrained(folder)


def main(shape: str, times: int, where: str) -> None:
    world = dist.start()
    folder = Path(where) / f"bench-checkpoint-{shape}"
    if world.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        weights(folder / "model", shape)
    world.barrier()
    policy = model.Policy(model.build(model.Scorer, str(folder / "model"), world, compute=torch.float32), world, betas=(0.9, 0.999), weight_decay=0.0, max_grad_norm=1.0)
    for p in policy.module.parameters():               # as after a step
        policy.optimizer.state[p] = {"step": torch.ones(()), "exp_avg": p.detach().clone(), "exp_avg_sq": p.detach().square()}
    trained, seconds = {"policy": policy}, {"save": [], "find": [], "load": []}

    def timed(what, function, *args):
        world.barrier()
        began = time.perf_counter()
        result = function(*args)
        world.barrier()
        seconds[what].append(round(time.perf_counter() - began, 2))
        return result

    for step in range(1, times + 1):
        said = timed("save", checkpoint.save, folder / "checkpoints", world, trained, {"step": step, "settings": {}}, 1)
        assert said is None, said
    for _ in range(times):
        saved, _ = timed("find", checkpoint.find, folder / "checkpoints", world)
        timed("load", checkpoint.load, saved, world, trained)
    if world.rank == 0:
        size = sum(p.stat().st_size for p in saved.path.iterdir())
        print(json.dumps({"shape": shape, "parameters": sum(p.numel() for p in policy.module.parameters()), "ranks": world.size, "gigabytes": round(size / 1e9, 2),
                          "device": world.device.type, "cores": len(os.sched_getaffinity(0)), "load_average": os.getloadavg()[0], "seconds": seconds}))
        shutil.rmtree(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--where", default=str(ROOT / "runs"))
    a = parser.parse_args()
    dist.run(main, a.shape, a.times, a.where)
