"""Run by torchrun or alone from test_turns.py: `turns_worker.py MODEL REPLY OUT`: episodes with the
real engine, and the trainer's log-probs of all their turns. Rank 0 writes OUT."""
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(1, str(Path(__file__).parents[3] / "tests"))
import torch
from transformers import AutoTokenizer

import data
import dist
import families
import part
from batch import Batch
from rewards import Score
from rollout import Engine


def main(folder: str, reply: str, out: str) -> None:
    world, tokenizer = dist.join(120), AutoTokenizer.from_pretrained(folder)
    policy = families.trainer_of(
        folder, world, reply=reply, max_turns=4, max_tokens=240, reward_workers=1,
        reward_timeout=3.0, reward=())
    run = SimpleNamespace(
        world=world, dtype=torch.float32, policy=policy, reference=None, critic=None,
        args=policy.args,
        log=SimpleNamespace(time=lambda name: nullcontext(), say=lambda text: None),
        inputs=SimpleNamespace(
            source=folder, tokenizer=tokenizer, ends=[0, 2], kv_cache=2**28, rows=[], eval_rows=[],
            plan=SimpleNamespace(longest=640), shape=SimpleNamespace(vocab=320)))
    engine = part.extended("engine", Engine, run)(run)
    engine.load(policy)
    seeds, generate = [], engine.generate

    def noted(requests, temperature):
        seeds.extend(r.seed for r in requests)
        return generate(requests, temperature)

    engine.generate = noted
    kinds = ("plain", "raise", "tools", "hang", "long")
    prompts = []
    for i in range(15):
        asked = f"Game {i:05d}. " * 12  # so long that packing pays
        ids = tokenizer(f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n")
        row = data.Row(i, "", ids["input_ids"], "7", {"kind": kinds[i % 5]}, "")
        prompts.append(data.Prompt(i, row))
    samples = engine.sample(prompts, 3, 0.9)
    for sample in samples:
        sample.score = Score(0.0, {}, None)
    there = Batch(samples)
    found = there.score(world, 2048, "score", lambda micro: policy.logprobs(micro, 0.9)[0])
    gap = float((found - families.engine_logprobs(there)).abs().max())
    rounding = families.rounding(folder, there, 0.9)
    if world.rank == 0:
        Path(out).write_text(json.dumps({
            "seeds": len({*seeds}), "turns": len(seeds), "gap": gap, "rounding": rounding,
            "reply_failed": engine.metrics["rollout/reply_failed"],
            "samples": [dict(truncated=s.completion.truncated, failed=s.completion.failed,
                             turns=s.completion.turns, kind=s.prompt.row.columns["kind"])
                        for s in samples]}))
    engine.close()


if __name__ == "__main__":
    dist.run(main, *sys.argv[1:])
