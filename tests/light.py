"""A script with a light engine, without vLLM: what stands between two commands, in a second.

    tests/python tests/light.py grpo FLAGS

The engine holds the policy in transformers' own model and draws token after token, each completion
by its seed alone, so a run on any ranks has the same numbers. FAULTS as in faulty.py.
"""
import sys
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch

import faulty
import rollout
from dist import assert_divisible
from model_files import config_of


class Light:
    """What an engine without vLLM has in the place of rollout.Engine's own."""

    def __init__(self, args, world, inputs, log, models):
        from transformers import AutoModelForCausalLM
        vars(self).update(
            world=world, args=args, log=log, dtype=torch.float32, movable=[],
            eos_ids=inputs.ends, metrics={}, on_gpu=False, asleep=False, sleep_level=0, bar=False,
            max_tokens=args.max_tokens, seed=args.seed,
            engine_count=assert_divisible(world.size, args.tp, "ranks", "--tp"),
            lm=AutoModelForCausalLM.from_config(config_of(inputs.source)).float().eval())

    @contextmanager
    def generating(self, policy):
        self.load(policy)
        yield

    def load(self, policy):
        self.lm.load_state_dict(dict(policy.weights(self.dtype)), strict=False)

    def generate(self, samples, temperature):
        return [self.one(sample, temperature) for sample in samples]

    @torch.no_grad()
    def one(self, sample, temperature) -> dict:
        """The next tokens of a sample, by its seed. Temperature 0 is greedy."""
        rng, ids, logprobs = np.random.default_rng(sample.seed), sample.prompt.row.prompt_ids, []
        ids, left = ids + sample.ids.tolist(), self.max_tokens - len(sample.ids)
        for _ in range(min(sample.room or left, left)):
            logits = self.lm(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()
            logp = (logits / (temperature or 1)).log_softmax(-1)
            noise = torch.from_numpy(rng.gumbel(size=len(logp))).float() * bool(temperature)
            ids.append(int((logp + noise).argmax()))
            logprobs.append(float(logp[ids[-1]]))
            if ids[-1] in self.eos_ids:
                break
        return dict(ids=ids[-len(logprobs):], logprobs=logprobs,
                    truncated=ids[-1] not in self.eos_ids)

    def close(self):
        self.world.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    for name in "__init__ generating load generate one close".split():
        setattr(rollout.Engine, name, vars(Light)[name])
    faulty.main()
