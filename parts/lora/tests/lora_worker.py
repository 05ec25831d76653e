"""Run by torchrun from test_lora.py: `lora_worker.py FOLDER OUT TP` compares an engine that takes
adapters, the same engine with merged weights, the exported folder and the trainer. Rank 0 writes
OUT."""
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
from rollout import Engine, Request

HEAT = 0.7  # the temperature


def main(folder: str, out: str, tp: str) -> None:
    world = dist.join(120)
    policy = families.trainer_of(folder, world, lora_rank=4, lora_sync="adapter", seed=7)
    base = families.trainer_of(folder, world)
    engine = families.engine_of(folder, world, policy, int(tp))
    # 200 tokens are more than a cache block (128 on CPU): a stale prefix would be used.
    rows = [data.Row(i, "", [(7 * i + j) % 317 + 3 for j in range(200)], None, {}, "")
            for i in range(5)]
    requests = [Request(row.prompt_ids, row.index) for row in rows]
    gaps, gradients = {}, []

    def scored(batch, who=policy):
        return batch.score(world, 256, "score", lambda micro: who.logprobs(micro, HEAT)[0])

    def look(when: str):
        """Gaps of engine and exported folder from the trainer, in what float32 rounds."""
        batch = families.scored([data.Prompt(row.index, row) for row in rows],
                                engine.complete(requests, HEAT))
        export_model(policy, folder, f"{out}.model")
        world.barrier()
        ours, rounding = scored(batch), families.rounding(f"{out}.model", batch, HEAT)
        gaps[when] = [float((ours - theirs).abs().max()) / rounding for theirs in (
            families.engine_logprobs(batch), families.plain(f"{out}.model", batch, HEAT))]
        world.barrier()
        return batch, ours

    def learn(batch) -> None:
        for micro in batch.micros(world, range(len(rows)), 256, "update"):
            policy.backward(policy.logprobs(micro, 1.0)[0].sum() / len(rows))
        gradients.append({name: float(p.grad.full_tensor().norm())
                          for name, p in policy.parameters.items()})
        assert policy.step(3e-2) > 0

    def everything() -> dict:
        return {name: p.detach().full_tensor().clone()
                for name, p in policy.module.named_parameters()}

    engine.load(policy)
    start = everything()
    batch, ours = look("at first")
    same = torch.equal(ours, scored(batch, base))  # B is 0
    for step in range(3):
        learn(batch)
        engine.load(policy)
        batch, ours = look(f"adapter {step}")
    same &= torch.equal(scored(batch, policy.reference(None)), scored(batch, base))
    effect = float((ours - scored(batch, base)).abs().max())
    engine.request = None  # the same engine, without an adapter
    Engine.load(engine, policy)
    look("merged")
    engine.load(policy)  # it takes the base again
    look("adapter again")
    engine.llm.reset_prefix_cache = lambda: True  # only the adapter's path protects the cache
    learn(batch)
    engine.load(policy)
    before = everything()
    look("no cache reset")
    same &= all(torch.equal(p, before[name]) for name, p in everything().items())
    lora.export(SimpleNamespace(policy=policy, args=policy.args, world=world, log=SimpleNamespace(
        folder=Path(out).parent), inputs=SimpleNamespace(source=folder)))
    if world.rank == 0:
        Path(out).write_bytes(pickle.dumps({
            "gaps": gaps, "gradients": gradients, "same": same, "effect": effect,
            "moved": {name for name, p in before.items() if not torch.equal(p, start[name])}}))
    engine.close()


if __name__ == "__main__":
    dist.run(main, *sys.argv[1:])
