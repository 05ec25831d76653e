"""What test_vision.look asks of an engine that sees, on two ranks: FOLDER, the answers' file, the
model in FOLDER, --tp, --lora_rank."""
import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(1, str(Path(__file__).parents[3] / "tests"))
import torch

import dist
import families
import same_policy
from checkpoint import export_model
from parts.pictures import seeing
from rollout import Request
from test_vision import fabricate, in_float64, naive

HEAT = 0.9  # the temperature


def gap_to_transformers(world, policy, samples, folder: str) -> tuple[float, float]:
    """The largest one of the trainer's log-probs, each row alone; and that of transformers' float32
    to its float64, from the exported folder. Not of image tokens: that of one is about -100, which
    float32 rounds."""
    batch = families.scored([s.prompt for s in samples], [s.completion for s in samples])
    ours = batch.score(world, 400, "score", lambda m: policy.logprobs(m, HEAT)[0])
    lm, gaps, rounds = in_float64(folder), [0.0], [0.0]
    for sample, own in zip(batch.samples, batch.split(ours), strict=True):
        plain = same_policy.plain_logprobs(policy, sample, HEAT, world.device)
        ids = torch.tensor(sample.completion.ids)
        with torch.no_grad():
            exact = (naive(lm, sample) / HEAT).log_softmax(-1)[range(len(ids)), ids.long()]
        for found, other in (gaps, own), (rounds, exact):
            found.append(float(((plain - other).abs() * (own > -50)).max()))
    return max(gaps), max(rounds)


def engine_run(folder: str, out: str, name: str, tp: str, rank: str) -> None:
    """Three loads of weights, with an update of all that is trained between: gaps of the engine, in
    roundings."""
    world, path = dist.join(120), Path(folder)
    source, rank = f"{folder}/{name}", int(rank)
    flags = {"lora_rank": rank, "lora_sync": "adapter"} if rank else {"train_vision": True}
    policy = families.trainer_of(source, world, **flags)
    made = fabricate(path)
    rows = list({id(s.prompt.row): s.prompt for s in made}.values())
    engine = families.engine_of(source, world, policy, int(tp), rows=[it.row for it in rows])
    found = {"gaps": [], "plain": [], "sampled": 0}
    for step in range(3):
        engine.load(policy)
        samples = engine.sample(rows, 4, HEAT)
        batch = families.scored([s.prompt for s in samples], [s.completion for s in samples])
        export_model(policy, source, f"{out}.{step}")
        world.barrier()
        plain, rounding = gap_to_transformers(world, policy, samples + made, f"{out}.{step}")
        found["plain"].append(plain / rounding)
        found["gaps"].append(gap(world, policy, batch) / rounding)
        found["sampled"] += sum(int((s.completion.ids == engine.eyes.token).sum())
                                for s in samples)
        for micro in batch.micros(world, [*range(len(samples))], 400, "update"):
            logprobs, _ = policy.logprobs(micro, 1.0)
            policy.backward(logprobs.sum() / 100)
        assert policy.step(1e-2 if rank else 3e-3) > 0
    controls(world, folder, policy, engine, rows, samples, found)
    if world.rank == 0:
        Path(out).write_bytes(pickle.dumps(found))
    os._exit(0)  # the engine is broken now


def gap(world, policy, batch) -> float:
    """The largest |engine - trainer|."""
    ours = batch.score(world, 400, "score", lambda m: policy.logprobs(m, HEAT)[0])
    return float((ours - families.engine_logprobs(batch)).abs().max())


def controls(world, folder, policy, engine, rows, samples, found: dict) -> None:
    """What would be wrong, and what is caught."""
    engine.load(policy)
    samples = engine.sample(rows, 4, HEAT)
    turned = samples[4:8] + samples[:4]  # equal ids, other pictures
    swapped = families.scored([s.prompt for s in turned], [s.completion for s in samples[:8]])
    found["swapped"] = gap(world, policy, swapped)
    with patch.object(seeing, "positions_of", in_a_line):
        found["line"] = gap(world, policy, families.scored(
            [s.prompt for s in samples], [s.completion for s in samples]))
    row = rows[0].row
    long = replace(row, pictures=row.pictures._replace(short_ids=row.prompt_ids))
    try:
        engine.generate([Request(row.prompt_ids, 0, row=long)], 1.0)
    except RuntimeError as error:
        found["expanded"] = str(error)
    engine.llm.llm_engine.reset_encoder_cache = lambda: None
    engine.sample(rows, 1, 1.0)
    engine.places = None  # vLLM's loader forgets the features of pictures; copies do not
    engine.load(policy)
    try:
        engine.sample(rows, 1, 1.0)
    except Exception as error:
        found["stale"] = f"{type(error).__name__}: {error}"


def in_a_line(micro) -> torch.Tensor:
    return micro.inputs["position_ids"].expand(3, 1, -1)


if __name__ == "__main__":
    dist.run(engine_run, *sys.argv[1:])
