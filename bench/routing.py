"""What replayed routing (R3) is for: python bench/routing.py

The tiny model with experts in bfloat16 stands for an engine; in float32 it is the trainer. Both
score the same completions. Where rounding moves a token to another expert, their log-probs differ
more; with the engine's experts replayed they do not.
"""
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy as np
import torch

import dist
from data import Prompt, Row
from examples import tiny
from rewards import Score
from trainer import experts, model
from trainer.batch import Batch, Completion, Sample

ROWS = 256


def samples_of(folder: str) -> list[Sample]:
    """Right replies to ROWS questions."""
    from transformers import AutoTokenizer
    tokenizer, rng, found = AutoTokenizer.from_pretrained(folder), random.Random(0), []
    for i in range(ROWS):
        ids, labels = tiny.lesson(tokenizer, *tiny.sort_digits(rng, 0.0)[::2])
        prompt = int((labels < 0).sum())
        completion = Completion(ids[prompt:].numpy().astype(np.int32),
                                np.zeros(len(ids) - prompt, np.float32), False)
        row = Row(i, "", ids[:prompt].tolist(), None, {}, "")
        found.append(Sample(Prompt(i, row), completion, "", Score(0.0, {}, None)))
    return found


def policy_in(dtype: str, folder: str, world) -> model.Policy:
    args = model.ModelArgs(dtype=dtype)
    module = model.build(model.LogprobModel, folder, world, args, trained=dtype == "float32")
    return model.Policy(module, world, args, model.OptimizerArgs(),
                        experts.ExpertArgs(replay_routing=True))


def score(policy, samples, record: bool = False) -> torch.Tensor:
    """Log-probs of all tokens, each row alone. record: the rows get the experts that were used."""
    found, seen = [], []
    hooks = [router.register_forward_hook(lambda _, given, out: seen.append(out[2]))
             for router in policy.routing.routers]
    for sample in samples:
        batch = Batch([sample])
        seen.clear()
        found.append(batch.score(policy.world, 4096, "score", lambda m: policy.logprobs(m, 1.0)[0]))
        if record:
            sample.completion.routes = torch.stack(seen, 1).numpy()  # (tokens, layers, k)
    for hook in hooks:
        hook.remove()
    return torch.cat(found).double()


def main() -> None:
    world, folder = dist.join(), tiny.ensure(task="experts")
    samples, trainer, engine = samples_of(folder), *(
        policy_in(dtype, folder, world) for dtype in ("float32", "bfloat16"))
    alone = score(trainer, samples, record=True)
    own = [sample.completion.routes for sample in samples]
    for sample in samples:
        sample.completion.routes = None
    theirs = score(engine, samples, record=True)
    used = [sample.completion.routes for sample in samples]
    replayed = score(trainer, samples)
    moved = [(np.sort(a) != np.sort(b)).any((1, 2)).mean() for a, b in zip(own, used, strict=True)]
    print(f"tokens with another expert in some layer: {np.mean(moved):.2%}")
    for name, ours in ("own experts", alone), ("the engine's", replayed):
        gap = (ours - theirs).abs()
        print(f"{name:12}  |trainer - engine|: mean {gap.mean():.2g}, largest {gap.max():.2g} nats")


if __name__ == "__main__":
    dist.run(main)
