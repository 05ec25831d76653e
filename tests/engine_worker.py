"""Run by torchrun from test_engine.py: `engine_worker.py FOLDER OUT` compares engine and trainer.

Several things are measured with one engine, because its start takes the time. Rank 0 writes OUT.
"""
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch
import torch._dynamo

import data
import dist
import families
import model
import rewards
from batch import Batch, Sample
from checkpoint import export_model
from errors import SettingsError
from rollout import Request, hash_seed
from same_policy import compare_policies


def main(folder: str, out: str) -> None:
    world = dist.join(120)
    policy, vocab = families.trainer_of(folder, world), model.config_of(folder).vocab_size
    engine = families.engine_of(folder, world, policy)
    # 200 tokens are more than a cache block (128 on CPU), and the prompts are the same every time:
    # a stale prefix would be used.
    prompts = [[(7 * i + j) % (vocab - 3) + 3 for j in range(200)] for i in range(7)]
    requests = [Request(p, hash_seed(0, i)) for i, p in enumerate(prompts)]
    owners = [data.Prompt(i, data.Row(i, "", p, None, {}, "")) for i, p in enumerate(prompts)]
    found = {"gap": {}, "same": {}, "rounding": {}}

    def samples(temperature: float) -> list[Sample]:
        """What the engine samples now."""
        done = engine.complete(requests, temperature)
        score = rewards.Score(0.0, {}, None)
        return [Sample(p, c, "", score) for p, c in zip(owners, done, strict=True)]

    def sampled(temperature: float) -> Batch:
        return Batch(samples(temperature))

    run = families.run_of(world, policy, SimpleNamespace(
        generating=lambda policy: nullcontext(), generate=engine.generate), owners)

    def guard() -> str:
        """What compare_policies says of engine and trainer as they are now: nothing is loaded."""
        try:
            compare_policies(run)
        except SettingsError as error:
            return str(error)
        return "they agree"

    def one_wrong(weights, wrong: str):
        """The weights, with one tensor that is another's, on the last rank only."""
        for name, tensor in weights:
            bad = name.endswith(wrong) and world.rank == world.size - 1
            yield name, tensor.flip(0) if bad else tensor

    def gap(temperature: float) -> float:
        """The largest |engine - trainer| log-prob of what the engine samples now."""
        batch = sampled(temperature)
        trainer = batch.score(world, 256, "score",
                              lambda micro: policy.logprobs(micro, temperature)[0])
        return float((trainer - families.engine_logprobs(batch)).abs().max())

    def learn() -> None:
        """One step that moves the weights: towards the tokens that one greedy pass likes least."""
        batch = sampled(1.0)
        for micro in batch.micros(world, list(range(len(prompts))), 256, "update"):
            logprobs, _ = policy.logprobs(micro, 1.0)
            policy.backward(logprobs.sum() / len(prompts))
        assert policy.step(3e-3) > 0

    for sync in range(3):
        engine.load(policy)
        export_model(policy, folder, f"{out}.{sync}")
        world.barrier()
        found["gap"][f"sync {sync}"] = [gap(1.0), gap(0.7)]
        found["rounding"][f"sync {sync}"] = [
            families.rounding(f"{out}.{sync}", sampled(heat), heat) for heat in (1.0, 0.7)]
        alone, among = engine.generate(requests[:1], 1.0)[0], engine.generate(requests, 1.0)[0]
        found["same"][f"sync {sync}"] = alone.ids.tolist() == among.ids.tolist()
        learn()

    def tensors() -> dict[str, torch.Tensor]:
        """The engine's own, in vLLM's form."""
        return engine.llm.apply_model(
            lambda lm: {name: p.clone() for name, p in lm.named_parameters()})[0]

    engine.load(policy)
    copied, places = tensors(), engine.places
    engine.places = {}  # by vLLM's loader
    engine.load(policy)
    loaded = tensors()
    found["copied"] = len(places) == len([*policy.weights()]) and all(
        torch.equal(copied[name], loaded[name]) for name in loaded)
    engine.places = places
    learn()
    found["gap"]["no sync"] = [gap(1.0)]
    found["guard"] = {"no sync": guard()}
    for wrong in ("layers.1.self_attn.v_proj.bias", "layers.0.mlp.up_proj.weight"):
        engine.load(SimpleNamespace(
            weights=lambda dtype, wrong=wrong: one_wrong(policy.weights(dtype), wrong)))
        found["guard"][wrong] = guard()
    reset, engine.llm.reset_prefix_cache = engine.llm.reset_prefix_cache, lambda: True
    engine.load(policy)
    found["gap"]["no cache reset"] = [gap(1.0)]
    engine.llm.reset_prefix_cache = lambda: False
    try:
        engine.load(policy)
    except RuntimeError as error:
        found["refused"] = str(error)
    engine.llm.reset_prefix_cache = reset
    engine.load(policy)
    export_model(policy, folder, out + ".model")
    world.barrier()
    found["gap"]["sync again"] = [gap(1.0)]
    found["rounding"]["sync again"] = [families.rounding(out + ".model", sampled(1.0), 1.0)]
    found["guard"]["well"] = guard()
    shipped = model.token_logprobs
    model.token_logprobs = lambda hidden, *rest: shipped(hidden * 2, *rest)
    found["guard"]["head x 2"] = guard()
    model.token_logprobs = shipped
    greedy = engine.complete(requests, 0.0)
    found["greedy"] = [c.ids.tolist() for c in greedy]
    crowd = [Request([(11 * i + j) % (vocab - 3) + 3 for j in range(200)],
                     hash_seed(1, i)) for i in range(48)]                         # 9,600 tokens
    engine.max_tokens = 3

    def ids_of(some):
        return [c.ids.tolist() for c in engine.generate(some, 1.0)]

    found["crowd"] = ids_of(crowd) == [ids for i in range(0, 48, 16)
                                       for ids in ids_of(crowd[i:i + 16])]
    found["compiled"] = dict(torch._dynamo.utils.counters["frames"])
    if world.rank == 0:
        Path(out).write_text(json.dumps(found | {"prompts": prompts}))
    engine.close()


if __name__ == "__main__":
    dist.run(main, *sys.argv[1:])
