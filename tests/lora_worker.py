"""Run by torchrun from test_lora.py: `lora_worker.py FOLDER OUT TP` compares an engine that takes
adapters, the same engine with merged weights, and the trainer. Rank 0 writes OUT."""
import pickle
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))
import dist  # isort: skip  (it sets what torch reads)
import torch

import data
import families
import rollout
from keeping.export import export_adapter, export_model
from rollout import EngineArgs, Request, hash_seed
from trainer import lora, model


def main(folder: str, out: str, tp: str) -> None:
    world, weights, args = dist.join(120), model.ModelArgs(), lora.LoraArgs(lora_rank=4)

    def build(*more):
        return model.Policy(
            model.build(model.LogprobModel, folder, world, weights, *more), world, weights,
            model.OptimizerArgs())

    policy, base = build(True, args, 7), build()
    lm, config = policy.module.lm, lora.peft_config(policy.module.lm, args, folder)
    engine = rollout.Engine(
        folder, world, EngineArgs(max_num_seqs=64, tp=int(tp)), dtype=torch.float32, max_len=256,
        max_tokens=24, eos_ids=[2], seed=0, kv_cache=2**28, trained=[policy], tokenizer=None,
        adapter=config, log=SimpleNamespace(phase=lambda name: nullcontext(), count=False))
    # 200 tokens are more than a cache block (128 on CPU): a stale prefix would be used.
    rows = [data.Row(i, "", [(7 * i + j) % 317 + 3 for j in range(200)], None, {}, "")
            for i in range(5)]
    prompts = [data.Prompt(row.index, row) for row in rows]
    requests = [Request(row.prompt_ids, hash_seed(0, row.index)) for row in rows]
    found = {"gap": {}, "gradients": []}

    def sampled():
        done = engine.complete(requests, 0.7)
        return families.scored(prompts, done)

    def scored(batch, who=policy):
        return batch.score(world, 256, "score", lambda micro: who.logprobs(micro, 0.7)[0])

    def gap(when: str) -> None:
        """The largest |engine - trainer| log-prob of what the engine samples now."""
        batch = sampled()
        found["gap"][when] = float(
            (scored(batch) - families.engine_logprobs(batch)).abs()[batch.sampled].max())

    def adapt() -> None:
        engine.load(policy.weights(engine.dtype, merge=False), lora.tensors(lm, world.device))

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
    engine.load(policy.weights(engine.dtype))  # the same engine, without an adapter
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
    export_adapter(policy, config, f"{out}.adapter")
    export_model(policy, folder, f"{out}.model")
    if world.rank == 0:
        Path(out).write_bytes(pickle.dumps(found))
    engine.close()


if __name__ == "__main__":
    dist.run(main, *sys.argv[1:])
