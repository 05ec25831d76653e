"""Run by torchrun from test_engine.py (`engine_worker.py FOLDER OUT TP`): engine against trainer.

Several things are measured with one engine, because its start takes the time. Rank 0 writes OUT.
"""
import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))
import numpy as np
import pytest
import torch
import torch._dynamo

import dist
import families
from batch import Batch, Sample
from checkpoint import export_model
from errors import SettingsError
from rollout import hash_seed


def main(folder: str, out: str, tp: str) -> None:
    world = dist.join(120)
    policy = families.trainer_of(folder, world)
    engine = families.engine_of(folder, world, policy, int(tp))
    # 200 tokens are more than a cache block, and prompts are the same every time: a stale prefix
    # would be used.
    draws = np.random.default_rng(7).integers(3, 320, (48, 200)).tolist()
    prompts = [families.prompt(i, ids) for i, ids in enumerate(draws)]
    samples = [Sample(p, reward=0.0, seed=hash_seed(0, p.position)) for p in prompts]
    few = samples[:7]
    cache = engine.llm.llm_engine.vllm_config.cache_config
    found = {"gap": {}, "rounding": {}, "cache": (cache.num_gpu_blocks, cache.block_size)}


    def measure(when: str) -> None:
        """The largest |engine - trainer| of what the engine samples now; then the policy moves."""
        done = [replace(sample) for sample in few]
        engine.complete(done, families.HEAT)
        batch = Batch(done)
        gap = families.trainer_logprobs(world, policy, batch) - batch.engine_logprobs
        found["gap"][when] = float(gap.abs().max())
        if when.startswith("sync"):
            export_model(policy, folder, f"{out}.{when}")
            world.barrier()
            found["rounding"][when] = families.rounding(f"{out}.{when}", batch)
        families.update(world, policy, batch)

    def one_wrong(dtype):
        """The weights, with one tensor that is another's, on the last rank only."""
        for name, tensor in policy.weights(dtype):
            bad = name == "model.layers.1.self_attn.v_proj.bias" and world.rank == world.size - 1
            yield name, tensor.flip(0) if bad else tensor

    def ids(some, temperature: float = 1.0) -> list[list[int]]:
        return [new["ids"].tolist() for new in engine.generate(some, temperature)]

    def shared(some: list[Sample]) -> list:
        """Completions and their log-probs, and the prompt tokens out of the cache of each."""
        engine.forget()
        return [(list(one.outputs[0].token_ids), list(one.outputs[0].logprobs.logprobs),
                 one.num_cached_tokens) for one in engine.outputs(some, 1.0)]

    for sync in range(3):
        engine.load(policy)
        measure(f"sync {sync}")
    measure("none")
    found["same"] = ids(few[:1]) == ids(few)[:1]
    done = [replace(sample) for sample in few]
    engine.complete(done, 1.0)
    found["held"] = [(s.ids.tolist(), bool(s.sampled.all()), s.truncated) for s in done], [
        (list(one.outputs[0].token_ids), True, one.outputs[0].finish_reason == "length")
        for one in engine.outputs(few, 1.0)]
    # Groups of 8, of prompts of 43 tokens and of less than a block; each engine has a part of each.
    group = [Sample(families.prompt(0, p.row.prompt_ids[:n]), seed=hash_seed(n, p.position, i))
             for i in range(8) for n in (43, 20) for p in prompts[:2]]
    alone = sum((shared([one]) for one in group), [])
    mine = dist.share(len(group), engine.engine_count, world.rank // int(tp))
    halves = world.gather(shared(group[mine]))[:len(group)]
    found["shared"] = alone, shared(group), halves
    engine.load(SimpleNamespace(weights=one_wrong))
    awake = mock.Mock(generating=mock.MagicMock(), generate=engine.generate)  # it loads nothing
    with pytest.raises(SettingsError) as caught:
        families.compare(families.run_of(world, policy, awake, prompts[:7]))
    found["said"] = str(caught.value)
    with mock.patch.object(engine.llm, "reset_prefix_cache", return_value=True):
        engine.load(policy)
        measure("no cache reset")
    with mock.patch.object(engine.llm, "reset_prefix_cache", return_value=False), pytest.raises(
            RuntimeError, match="prefix cache"):
        engine.load(policy)
    engine.load(policy)
    found["prompts"], found["greedy"] = [s.prompt.row.prompt_ids for s in few], ids(few, 0.0)
    measure("sync again")
    engine.max_tokens = 3
    found["crowd"] = ids(samples) == sum((ids(samples[i:i + 16]) for i in (0, 16, 32)), [])
    found["compiled"] = dict(torch._dynamo.utils.counters["frames"])
    if world.rank == 0:
        Path(out).write_text(json.dumps(found))
    engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for word in "folder", "out", "tp":
        parser.add_argument(word)
    options = parser.parse_args()
    dist.run(main, options.folder, options.out, options.tp)
