"""carry.py: --carry: a completion may go on in the next step, so no step waits for its longest one.

    step 1    a a a <end>   b b <end>   c c c c     a and b have ended: the step trains on them
    step 2                  d d d       c c <end>   c goes on with the new weights; d is new

ceil(P·(1 + C)) prompts are in flight. In a round each unfinished completion gets at most
--carry_tokens tokens. A prompt is ready when its G completions have ended. When P prompts are
ready, the step trains on the P of them that started first. The others stay in flight.

All of this follows from the list of completions, the same on every rank. To go on, the engine gets
the prompt and the tokens so far as one prompt. Each token keeps the log-prob and the step of the
policy that sampled it.
Partial rollouts: https://arxiv.org/abs/2501.12599, https://arxiv.org/abs/2509.18521
"""
import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from chats.turns import append
from data import Prompt, Row
from errors import Count, Range
from rollout import Request, hash_seed
from trainer.batch import Completion, Sample


@dataclass
class CarryArgs:
    """Long completions go on in later steps."""
    carry: Annotated[float, Range(0, 8)] = 0.0
    """C: --batch x (1 + C) prompts are in flight, and a step trains on the first --batch of them
    that have ended. 0: a step waits for its longest completion."""
    carry_tokens: Count = 256
    """Tokens of a round. After each round the step looks whether --batch prompts have ended."""
    carry_age: int = 0
    """A step waits for a prompt that started this many steps ago. 0: for none."""

    def rules(self, plan):
        """Yields a sentence for each broken rule (plan.problems)."""
        if not self.carry:
            return
        if plan.args.engine_correction == "none":
            yield ("--carry needs --engine_correction: older policies sampled some of a step's "
                   "tokens. Would work: --engine_correction truncate.")
        whole = plan.args.turn_args.reply, plan.args.turn_args.tools, plan.args.engine_args.stop
        for name, value in zip(("reply", "tools", "stop"), whole, strict=True):
            if value:
                yield (f"--{name} needs whole completions, and --carry stops them between rounds: "
                       "give one of them.")
        if plan.shape and plan.shape.tower:
            yield "--carry is for models that read text alone, and --model sees pictures."


@dataclass
class Group:
    """A prompt in flight with its G completions, which may not have ended."""
    prompt: Prompt
    started: int  # the step
    completions: list[Completion]


def ended(c: Completion, max_tokens: int) -> bool:
    """Has it an end token, or all the tokens that it may have? truncated: of its last round."""
    return len(c.ids) > 0 and (not c.truncated or len(c.ids) == max_tokens)


class Carry:
    """The groups in flight, in the order of the data. The same on every rank."""

    def __init__(self, args, stream, engine):
        self.args, self.flags, self.stream, self.engine = args, args.carry_args, stream, engine
        self.flight: list[Group] = []
        # Of a step: its number, new tokens by round, what it took.
        self.step, self.rounds, self.taken = -1, [], []

    def in_place_of(self, whole, prompts, group: int, temperature: float, purpose: str = "train"):
        """Of Engine.sample, which is `whole`: an evaluation waits for all of its completions."""
        if purpose != "train":
            return whole(prompts, group, temperature, purpose)
        self.start(prompts)
        return self.sample()

    def sample(self) -> list[Sample]:
        """G completions of each of the first P prompts that are ready. A collective."""
        if self.step != self.engine.world.step:
            self.step, self.rounds, self.taken = self.engine.world.step, [], []
        while len(self.ready()) < self.args.batch or self.too_old():
            self.round()
        taken = self.ready()[:self.args.batch]
        self.flight = [group for group in self.flight if group not in taken]
        self.taken += [group.completions for group in taken]
        self.engine.log.times |= self.metrics()
        return [Sample(group.prompt, c) for group in taken for c in group.completions]

    def start(self, prompts: list[Prompt]):
        none = np.zeros(0, np.int32)
        for prompt in prompts:
            self.flight.append(Group(prompt, self.engine.world.step, [
                Completion(none, none.astype(np.float32), truncated=True, steps=none)
                for _ in range(self.args.group)]))

    def fill(self):
        """New prompts, until P·(1+C) are in flight. An epoch may end in between."""
        most = math.ceil(self.args.batch * (1 + self.flags.carry))
        while len(self.flight) < most:
            self.start(self.stream.next(most - len(self.flight)))

    def ready(self) -> list[Group]:
        return [group for group in self.flight
                if all(ended(c, self.args.max_tokens) for c in group.completions)]

    def too_old(self) -> bool:
        """--carry_age: is a group unfinished that the step must wait for?"""
        waits = [self.step - group.started for group in self.flight if group not in self.ready()]
        return self.flags.carry_age > 0 and max(waits, default=0) >= self.flags.carry_age

    def round(self):
        """Each unfinished completion gets at most --carry_tokens more. A collective."""
        self.fill()
        a, growing, requests = self.args, [], []
        for group in self.flight:
            for i, c in enumerate(group.completions):
                if not ended(c, a.max_tokens):
                    room = min(self.flags.carry_tokens, a.max_tokens - len(c.ids))
                    growing.append(c)
                    requests.append(Request(group.prompt.row.prompt_ids + c.ids.tolist(),
                                            self.seed(group.prompt, i, len(c.ids)), room))
        self.engine.world.same_phase("rollout", len(requests))
        with self.engine.log.time("rollout"):
            new = self.engine.complete(requests, a.temperature)
        for c, more in zip(growing, new, strict=True):
            append(c, more.ids, more.logprobs, True)
            c.steps = np.append(c.steps, np.full(len(more.ids), self.step, np.int32))
            c.truncated = more.truncated
        self.rounds.append([len(more.ids) for more in new])

    def seed(self, prompt: Prompt, i: int, tokens: int) -> int:
        """Of completion i behind its first `tokens`: a seed used twice draws the same again."""
        begun = [tokens] if tokens else []
        return hash_seed(self.args.seed, "train", prompt.position, i, *begun)

    def metrics(self) -> dict[str, float]:
        """Of the completions that this step has taken. Ages are in steps."""
        seconds = self.engine.log.times["time/rollout"] or math.nan  # no round: no rate
        ages = [self.step - c.steps for group in self.taken for c in group]
        oldest, ages = np.array([of_one[0] for of_one in ages]), np.concatenate(ages)  # of tokens
        return {"carry/age_mean": float(oldest.mean()), "carry/age_max": int(oldest.max()),
                "carry/token_age_mean": float(ages.mean()), "carry/token_age_max": int(ages.max()),
                "carry/old_tokens_frac": float((ages > 0).mean()),
                "carry/in_flight": len(self.flight) * self.args.group,
                "rollout/decode_steps": sum(map(max, self.rounds)),
                "rollout/tokens_per_s": sum(map(sum, self.rounds)) / seconds}

    def state(self) -> dict:
        """What is in flight. A float32 number is exact in JSON."""
        return {"flight": [{
            "position": group.prompt.position, "row": group.prompt.row.index,
            "started": group.started, "completions": [
                [c.ids.tolist(), c.logprobs.tolist(), c.steps.tolist(), c.truncated]
                for c in group.completions]} for group in self.flight]}

    def restore(self, state: dict, rows: list[Row]):
        by_index = {row.index: row for row in rows}
        for group in state["flight"]:
            prompt = Prompt(group["position"], by_index[group["row"]])
            self.flight.append(Group(prompt, group["started"], [
                Completion(np.array(ids, np.int32), np.array(logprobs, np.float32), cut,
                           steps=np.array(steps, np.int32))
                for ids, logprobs, steps, cut in group["completions"]]))
