"""Run by torchrun from test_lora.py: `lora_worker.py FOLDER OUT TP` compares an engine that takes
adapters, the same engine with merged weights, and the trainer. Rank 0 writes OUT."""
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(1, str(Path(__file__).parents[3] / "tests"))
import torch

import data
import dist
import families
from checkpoint import export_model
from parts.lora import lora
from rollout import Engine, Request, hash_seed


def main(folder: str, out: str, tp: str) -> None:
    world = dist.join(120)
    policy = families.trainer_of(folder, world, lora_rank=4, lora_sync="adapter", seed=7)
    base = families.trainer_of(folder, world)
    engine = families.engine_of(folder, world, policy, int(tp))
    # 200 tokens are more than a cache block (128 on CPU): a stale prefix would be used.
    rows = [data.Row(i, "", [(7 * i + j) % 317 + 3 for j in range(200)], None, {}, "")
            for i in range(5)]
    prompts = [data.Prompt(row.index, row) for row in rows]
    requests = [Request(row.prompt_ids, hash_seed(0, row.index)) for row in rows]
    found = {"gap": {}, "rounding": {}, "gradients": []}

    def sampled():
        done = engine.complete(requests, 0.7)
        return families.scored(prompts, done)

    def scored(batch, who=policy):
        return batch.score(world, 256, "score", lambda micro: who.logprobs(micro, 0.7)[0])

    def gap(when: str) -> None:
        """The largest |engine - trainer| log-prob of what the engine samples now."""
        batch = sampled()
        found["gap"][when] = float(
            (scored(batch) - families.engine_logprobs(batch)).abs().max())
        export_model(policy, folder, f"{out}.now")
        world.barrier()
        found["rounding"][when] = families.rounding(f"{out}.now", batch)
        world.barrier()

    def adapt() -> None:
        engine.load(policy)

    def learn() -> None:
        batch = sampled()
        for micro in batch.micros(world, range(len(rows)), 256, "update"):
            logprobs, _ = policy.logprobs(micro, 1.0)
            policy.backward(logprobs.sum() / len(rows))
        found["gradients"].append({
            name: float(p.grad.full_tensor().norm()) for name, p in policy.parameters.items()})
        assert policy.step(3e-2) > 0

    def everything() -> dict:
        return {name: p.detach().full_tensor().clone()
                for name, p in policy.module.named_parameters()}

    adapt()
    start, batch = everything(), sampled()
    found["start"] = bool(torch.equal(scored(batch), scored(batch, base)))
    for step in range(3):
        learn()
        adapt()
        gap(f"adapter {step}")
    after, batch = everything(), sampled()
    found["moved"] = {n: float((after[n] - start[n]).abs().max()) for n in start}
    found["reference"] = bool(torch.equal(scored(batch, lora.Base(policy)), scored(batch, base)))
    found["effect"] = float((scored(batch) - scored(batch, base)).abs().max())
    engine.request = None  # the same engine, without an adapter
    Engine.load(engine, policy)
    gap("merged")
    adapt()  # it takes the base again
    gap("adapter again")
    # The prefix cache is never reset from here on: only the adapter's path protects it.
    reset, engine.llm.reset_prefix_cache = engine.llm.reset_prefix_cache, lambda: True
    learn()
    adapt()
    gap("no cache reset")
    learn()
    engine.syncs -= 1  # the path of the sync before
    adapt()
    gap("no cache reset, old path")
    engine.llm.reset_prefix_cache = reset
    adapt()
    last, batch = everything(), sampled()
    adapt()
    found["untouched"] = all(torch.equal(p, last[n]) for n, p in everything().items())
    found["batch"], found["logprobs"] = batch, scored(batch)
    lora.export(SimpleNamespace(policy=policy, args=policy.args, world=world, log=SimpleNamespace(
        folder=Path(out).parent), inputs=SimpleNamespace(source=folder)))
    export_model(policy, folder, f"{out}.model")
    if world.rank == 0:
        Path(out).write_bytes(pickle.dumps(found))
    engine.close()


if __name__ == "__main__":
    dist.run(main, *sys.argv[1:])
