"""What test_vision.py asks of an engine that sees, on two ranks: FOLDER, the answers' file,
--tp."""
import os
import pickle
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch

import dist
import families
from preflight import inputs
from rollout import EngineArgs, Request, SeeingEngine
from running import same_policy
from test_vision import fabricate
from trainer import model


def engine_run(folder: str, out: str, tp: str) -> None:
    """Three loads of weights, with an update of all of them between: gaps of the engine."""
    world, path = dist.join(120), Path(folder)
    weights, source = model.ModelArgs(), f"{folder}/split"
    module = model.build(model.LogprobModel, source, world, weights)
    policy = model.Policy(module, world, weights, model.OptimizerArgs(train_vision=True))
    rows = list({id(s.prompt.row): s.prompt for s in fabricate(path, "split")}.values())
    eyes = rows[0].row.pictures.eyes
    options = inputs.Inputs.for_pictures.fget(SimpleNamespace(
        rows=[prompt.row for prompt in rows], eval_rows=[], eyes=eyes))
    engine = SeeingEngine(
        source, world, EngineArgs(max_num_seqs=16, tp=int(tp)), dtype=torch.float32, max_len=256,
        seed=0, max_tokens=24, eos_ids=[2], kv_cache=2**28, trained=[policy], tokenizer=None,
        log=SimpleNamespace(time=lambda name: nullcontext(), count=False), pictures=options)
    found = {"gaps": [], "plain": [], "sampled": 0}
    run = SimpleNamespace(policy=policy, world=world, args=SimpleNamespace(temperature=1.0))
    for _ in range(3):
        engine.load(policy.weights(engine.dtype))
        samples = engine.sample(rows, 4, 1.0)
        batch = families.scored([s.prompt for s in samples], [s.completion for s in samples])
        ours = batch.score(world, 400, "score", lambda m: policy.logprobs(m, 1.0)[0])
        found["gaps"].append(float((ours - families.engine_logprobs(batch)).abs().max()))
        found["sampled"] += sum(int((s.completion.ids == eyes.token).sum()) for s in samples)
        for sample, own in zip(batch.samples, batch.split(ours), strict=True):
            plain = same_policy.plain_logprobs(run, sample)
            found["plain"].append(float((plain - own).abs().max()))
        for micro in batch.micros(world, [*range(len(samples))], 400, "update"):
            logprobs, _ = policy.logprobs(micro, 1.0)
            policy.backward(logprobs.sum() / 100)
        assert policy.step(3e-3) > 0
    a, b = samples[0], samples[4]  # equal ids, other pictures
    swapped = families.scored([b.prompt, a.prompt], [a.completion, b.completion])
    ours = swapped.score(world, 400, "score", lambda m: policy.logprobs(m, 1.0)[0])
    found["swapped"] = float((ours - families.engine_logprobs(swapped)).abs().max())
    long = rows[0].row.pictures._replace(short_ids=rows[0].row.prompt_ids)
    try:
        engine.generate([Request(rows[0].row.prompt_ids, 0, pictures=long)], 1.0)
    except RuntimeError as error:
        found["expanded"] = str(error)
    engine.llm.llm_engine.reset_encoder_cache = lambda: None
    engine.sample(rows, 1, 1.0)
    engine.load(policy.weights(engine.dtype))
    try:
        engine.sample(rows, 1, 1.0)
    except Exception as error:
        found["stale"] = f"{type(error).__name__}: {error}"
    if world.rank == 0:
        Path(out).write_bytes(pickle.dumps(found))
    os._exit(0)  # the engine is broken now


if __name__ == "__main__":
    dist.run(engine_run, *sys.argv[1:])
