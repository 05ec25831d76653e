"""Run by torchrun from test_engine.py: `engine_worker.py FOLDER OUT` measures how far the engine is from the trainer, rank 0 writes OUT.

Several things are measured with one engine, because starting one is what takes the time.
"""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import dist                                             # noqa: E402  (first: it sets what torch reads)
import torch                                            # noqa: E402
import torch._dynamo                                    # noqa: E402

import model                                            # noqa: E402
from batch import Batch                                 # noqa: E402
from rollout import Engine, Request, hash_seed          # noqa: E402


def main(folder: str, out: str) -> None:
    world = dist.start(120)
    policy = model.Policy(model.build(model.Scorer, folder, world, compute=torch.float32), world,
                          betas=(0.9, 0.999), weight_decay=0.0, max_grad_norm=1.0)
    config = model.config_of(folder)
    engine = Engine(folder, world, tp=1, dtype=torch.float32, max_len=256, vocab_size=config.vocab_size, eos_ids=[2], seed=0,
                    gpu_memory_utilization=0.3, kv_cache=2**28, max_num_seqs=64, sleep_level=2, eager=True, log_level="ERROR")
    # 200 tokens are more than a cache block (128 on CPU), and the prompts are the same every time: a stale prefix would be used.
    prompts = [[(7 * i + j) % (config.vocab_size - 3) + 3 for j in range(200)] for i in range(7)]
    requests = [Request(p, hash_seed(0, i)) for i, p in enumerate(prompts)]
    found = {"gap": {}, "same": {}}

    def gap(temperature: float) -> float:
        """The largest |engine - trainer| log-prob of what the engine samples now."""
        done = world.gather(engine.generate(engine.mine(requests), temperature=temperature, max_tokens=24))
        batch = Batch(prompts, done)
        trainer = batch.score(world, 256, "score", 0, lambda micro: policy.logprobs(micro, temperature)[0])
        return float((trainer - batch.engine_logprobs).abs()[batch.present].max())

    def learn() -> None:
        """One step that moves the weights: towards the tokens that one greedy pass likes least."""
        batch = Batch(prompts, world.gather(engine.generate(engine.mine(requests), temperature=1.0, max_tokens=24)))
        for micro in batch.micros(world, list(range(len(batch))), 256, "update", 0):
            logprobs, _ = policy.logprobs(micro, 1.0)
            policy.backward((logprobs * micro.present * bool(micro.rows)).sum() / len(batch))
        assert policy.step(3e-3) > 0

    for sync in range(3):
        engine.load(policy.weights(engine.dtype))
        found["gap"][f"sync {sync}"] = [gap(1.0), gap(0.7)]
        alone = engine.generate(requests[:1], temperature=1.0, max_tokens=24)[0]
        among = engine.generate(requests, temperature=1.0, max_tokens=24)[0]
        found["same"][f"sync {sync}"] = alone.ids.tolist() == among.ids.tolist()
        learn()
    found["gap"]["no sync"] = [gap(1.0)]
    reset, engine.llm.reset_prefix_cache = engine.llm.reset_prefix_cache, lambda: True
    engine.load(policy.weights(engine.dtype))
    found["gap"]["no cache reset"] = [gap(1.0)]
    engine.llm.reset_prefix_cache = lambda: False
    try:
        engine.load(policy.weights(engine.dtype))
    except RuntimeError as error:
        found["refused"] = str(error)
    engine.llm.reset_prefix_cache = reset
    engine.load(policy.weights(engine.dtype))
    found["gap"]["sync again"] = [gap(1.0)]
    found["greedy"] = [c.ids.tolist() for c in world.gather(engine.generate(engine.mine(requests), temperature=0.0, max_tokens=24))]
    crowd = [Request([(11 * i + j) % (config.vocab_size - 3) + 3 for j in range(200)], hash_seed(1, i)) for i in range(48)]  # 9,600 tokens
    told = lambda some: [c.ids.tolist() for c in engine.generate(some, temperature=1.0, max_tokens=3)]
    found["crowd"] = told(crowd) == [ids for i in range(0, 48, 16) for ids in told(crowd[i:i + 16])]
    try:
        engine.generate([Request([config.vocab_size], 0)], temperature=1.0, max_tokens=4)
    except ValueError as error:
        found["bad id"] = str(error)
    found["compiled"] = dict(torch._dynamo.utils.counters["frames"])
    policy.export(folder, out + ".model")
    if world.rank == 0:
        Path(out).write_text(json.dumps(found | {"prompts": prompts}))
    engine.close()


if __name__ == "__main__":
    dist.run(main, *sys.argv[1:])
