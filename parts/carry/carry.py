"""carry.py: --carry: a completion may go on in the next step, so no step waits for its longest one.

    step 1    trains on a, b      a a a <end>   b b b b <end>   c c c <end>   d d d d
    step 2    trains on c, d      d d d <end>   e e e           f f f <end>   (c had ended)

With C batches ahead, P·(1 + C) prompts are in flight, in the order of the data. A step gives each
unfinished completion --carry_tokens more tokens, round after round, until the oldest P prompts have
ended, and trains on these. The others go on with the next weights.

What a step trains on depends on positions in the data alone. The first P prompts that are *ready*
would be the short ones, and their mean is not the mean of all.
Partial rollouts: https://arxiv.org/abs/2501.12599, https://arxiv.org/abs/2509.18521
"""
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from batch import Sample
from data import Prompt
from rollout import Engine, hash_seed
from settings import Count, Flags, Range


@dataclass
class CarryArgs(Flags):
    """Long completions continue in later steps."""
    carry: Annotated[int, Range(0, 8)] = 0
    """C: batches in flight ahead of the one that a step trains on. 0: a step waits for its longest
    completion."""
    carry_tokens: Count = 256
    """Tokens per round. After each round the step checks whether its prompts have finished."""
    switch: ClassVar[str] = "carry"

    def rules(self, plan):
        """Yields a sentence for each broken rule (settings.Flags)."""
        flags = vars(plan.args)
        if self.carry and "engine_correction" not in flags:
            yield f"--carry is for completions to learn from, which {plan.args.script} has not."
        elif self.carry and flags["engine_correction"] == "none":
            yield ("--carry needs --engine_correction: older policies sampled some of a step's "
                   "tokens. Would work: --engine_correction truncate.")
        for other in "reply", "stop", "replay_routing":
            if self.carry and flags.get(other):
                yield (f"--{other} needs whole completions, and --carry stops them between rounds: "
                       "give one of them.")
        if self.carry and plan.shape and plan.shape.kind == "pictures":
            yield "--carry is for models that read text alone, and --model sees pictures."

    @property
    def fixed(self) -> tuple[str, ...]:
        """Flags that a resume may not change. --max_tokens: of what is in flight."""
        return ("carry", "max_tokens") if self.carry else ("carry",)


def ended(sample: Sample, max_tokens: int) -> bool:
    """Has it an end token, or all the tokens that it may have? Before that `truncated` says that it
    may have more."""
    return len(sample.ids) > 0 and (not sample.truncated or len(sample.ids) == max_tokens)


class Carry:
    """The groups in flight, in the order of the data: of each prompt its G samples. The same on
    every rank. stream: of the run, whose data has these rows.

    extras["steps"] of a sample, (T,) int32: of each token the step whose policy sampled it."""

    def __init__(self, args, stream):
        self.args, self.stream = args, stream
        self.flight: list[list[Sample]] = []
        # Of a step: its number, the groups that it took, the new tokens of each round.
        self.step, self.taken, self.rounds = -1, [], []

    def sample(self, engine, prompts: list[Prompt]) -> list[Sample]:
        """G completions of each of the oldest P prompts. `prompts` are the newest in flight. It
        sets engine.metrics. A collective."""
        if self.step != engine.world.step:  # --dynamic_sampling comes here again in a step
            self.step, self.taken, self.rounds = engine.world.step, [], []
        most = self.args.batch * (1 + self.args.carry)
        self.start(prompts)
        while len(self.flight) < most:  # an epoch may end in between
            self.start(self.stream.next(most - len(self.flight)))
        oldest = self.flight[:self.args.batch]
        while any(self.unfinished(oldest)):
            self.rounds.append(self.round(engine))
        self.flight = self.flight[self.args.batch:]
        self.taken += oldest
        engine.metrics = self.metrics(engine.log.times["time/rollout"])
        return sum(oldest, [])

    def start(self, prompts: list[Prompt]):
        """The prompts are in flight, each with G empty samples."""
        for prompt in prompts:
            self.flight.append([Sample(prompt, extras={"steps": np.zeros(0, np.int32)})
                                for _ in range(self.args.group)])

    def unfinished(self, groups: list[list[Sample]]):
        """Yields (number in its group, sample)."""
        for group in groups:
            for i, s in enumerate(group):
                if not ended(s, self.args.max_tokens):
                    yield i, s

    def round(self, engine) -> list[int]:
        """Each unfinished completion gets at most --carry_tokens more → how many. A collective."""
        growing, added = [], []
        for i, s in self.unfinished(self.flight):
            # The seed of what is behind the first tokens: a seed used twice draws the same again.
            begun = [len(s.ids)] if len(s.ids) else []
            s.seed = hash_seed(self.args.seed, "train", s.prompt.position, i, *begun)
            s.room = self.args.carry_tokens
            growing.append(s)
        engine.world.same_phase("rollout", len(growing))
        with engine.log.time("rollout"):
            engine.complete(growing, self.args.temperature)
        for s in growing:
            steps = s.extras["steps"]
            added.append(len(s.ids) - len(steps))
            s.extras["steps"] = np.append(steps, np.full(added[-1], self.step, np.int32))
        return added

    def metrics(self, seconds: float) -> dict[str, float]:
        """Of all completions that this step took, and of its rounds. Ages are in steps."""
        ages = [self.step - s.extras["steps"] for group in self.taken for s in group]
        first, ages = np.array([of_one[0] for of_one in ages]), np.concatenate(ages)  # of tokens
        new = sum(map(sum, self.rounds))
        return {"carry/age_mean": float(first.mean()), "carry/age_max": int(first.max()),
                "carry/token_age_mean": float(ages.mean()), "carry/token_age_max": int(ages.max()),
                "carry/old_tokens_frac": float((ages > 0).mean()),
                "carry/in_flight": len(self.flight) * self.args.group,
                "rollout/decode_steps": sum(map(max, self.rounds)),
                "rollout/tokens_per_s": new / seconds if new else math.nan}  # no round: no rate

    def state_dict(self) -> list[dict]:
        """What is in flight, for a checkpoint. A float32 number is exact in JSON."""
        return [{"position": group[0].prompt.position, "row": group[0].prompt.row.index,
                 "completions": [[s.ids.tolist(), s.logprobs.tolist(), s.extras["steps"].tolist(),
                                  s.truncated] for s in group]} for group in self.flight]

    def load_state_dict(self, state: list[dict]):
        """Goes on from what `state_dict` returned."""
        by_index = {row.index: row for row in self.stream.rows}
        self.flight = []
        for group in state:
            prompt = Prompt(group["position"], by_index[group["row"]])
            self.flight.append([
                Sample(prompt, np.array(ids, np.int32), np.array(logprobs, np.float32), cut,
                       extras={"steps": np.array(steps, np.int32)})
                for ids, logprobs, steps, cut in group["completions"]])


class CarryingEngine(Engine):
    """An engine whose completions may go on in the next step."""

    carry: Carry  # set before the first step

    def sample(self, prompts, group, temperature, purpose="train"):
        """See Engine. An evaluation is whole."""
        if purpose != "train":
            return super().sample(prompts, group, temperature, purpose)
        return self.carry.sample(self, prompts)
