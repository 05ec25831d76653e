"""carry.py: --carry: a completion may go on in the next step, so no step waits for its longest one.

    step 1    a a a <end>   b b <end>   c c c c     a and b have ended: the step trains on them
    step 2                  d d d       c c <end>   c goes on with the new weights; d is new

ceil(P·(1 + C)) prompts are in flight. In a round each unfinished completion gets at most
--carry_tokens tokens. A prompt is ready when its G completions have ended. When P prompts are
ready, the step trains on the P of them that started first. The others stay in flight.

All of this is computed from the list of completions, which is the same on every rank: no clock is
read, and no rank decides alone. To go on, the engine gets the prompt and the tokens so far as one
prompt. Each token keeps the log-prob and the step of the policy that sampled it.
Partial rollouts: https://arxiv.org/abs/2501.12599 (Kimi k1.5), https://arxiv.org/abs/2509.18521
"""
import math
from dataclasses import dataclass

import numpy as np

from chats.turns import append
from data import Prompt, Row
from rollout import Request, hash_seed
from trainer.batch import Completion, Sample


@dataclass
class CarryArgs:
    """Long completions go on in later steps."""
    carry: float = 0.0
    """C: --batch x (1 + C) prompts are in flight, and a step trains on the first --batch of them
    that have ended. 0: a step waits for its longest completion."""
    carry_tokens: int = 256
    """Tokens of a round. After each round the step looks whether --batch prompts have ended."""
    carry_age: int = 0
    """A step waits for a prompt that started this many steps ago. 0: for none."""


@dataclass
class Group:
    """A prompt in flight with its G completions, which may not have ended."""
    prompt: Prompt
    started: int  # the step
    completions: list[Completion]

    def ready(self, max_tokens: int) -> bool:
        return all(ended(c, max_tokens) for c in self.completions)


def ended(c: Completion, max_tokens: int) -> bool:
    """Has it an end token, or all the tokens that it may have? truncated: of its last round."""
    return len(c.ids) > 0 and (not c.truncated or len(c.ids) == max_tokens)


def nothing_yet() -> Completion:
    return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), truncated=True,
                      steps=np.zeros(0, np.int32))


class Carry:
    """The groups in flight, in the order of the data. The same on every rank."""

    def __init__(self, args, stream, engine):
        self.args, self.flags, self.stream, self.engine = args, args.carry_args, stream, engine
        self.flight: list[Group] = []
        self.decode_steps = 0  # of the engine, since `metrics` was called

    def sample(self) -> list[Sample]:
        """G completions of each of P prompts: the first that started, of those that are ready. A
        collective."""
        step = self.engine.world.step
        while len(self.ready()) < self.args.batch or self.too_old(step):
            self.round(step)
        taken = self.ready()[:self.args.batch]
        left = {id(group) for group in self.flight} - {id(group) for group in taken}
        self.flight = [group for group in self.flight if id(group) in left]
        return [Sample(group.prompt, c) for group in taken for c in group.completions]

    def fill(self, step: int):
        """New prompts, until P·(1+C) are in flight. An epoch may end in between."""
        most = math.ceil(self.args.batch * (1 + self.flags.carry))
        while len(self.flight) < most:
            for prompt in self.stream.next(most - len(self.flight)):
                self.flight.append(Group(prompt, step, [
                    nothing_yet() for _ in range(self.args.group)]))

    def ready(self) -> list[Group]:
        return [group for group in self.flight if group.ready(self.args.max_tokens)]

    def too_old(self, step: int) -> bool:
        """--carry_age: is a group unfinished that the step must wait for?"""
        age, most = self.flags.carry_age, self.args.max_tokens
        return age > 0 and any(
            step - group.started >= age and not group.ready(most) for group in self.flight)

    def round(self, step: int):
        """Each unfinished completion gets at most --carry_tokens more. A collective."""
        self.fill(step)
        a, growing, requests = self.args, [], []
        for group in self.flight:
            for i, c in enumerate(group.completions):
                if not ended(c, a.max_tokens):
                    room = min(self.flags.carry_tokens, a.max_tokens - len(c.ids))
                    growing.append(c)
                    requests.append(Request(group.prompt.row.prompt_ids + c.ids.tolist(),
                                            self.seed(group.prompt, i, len(c.ids)), room))
        self.engine.world.same_phase("rollout", len(requests))
        with self.engine.log.phase("rollout"):
            new = self.engine.complete(requests, a.temperature)
        for c, more in zip(growing, new, strict=True):
            append(c, more.ids, more.logprobs, True)
            c.steps = np.append(c.steps, np.full(len(more.ids), step, np.int32))
            c.truncated = more.truncated
        self.decode_steps += max(len(more.ids) for more in new)

    def seed(self, prompt: Prompt, i: int, tokens: int) -> int:
        """Of completion i behind its first `tokens`: the same stream must not begin again."""
        begun = [tokens] if tokens else []  # without a token: the seed of a run without --carry
        return hash_seed(self.args.seed, "train", prompt.position, i, *begun)

    def metrics(self, samples: list[Sample]) -> dict[str, float]:
        """Of the samples that this step trains on. Ages are in steps."""
        step = self.engine.world.step
        ages = step - np.concatenate([s.completion.steps for s in samples])  # of tokens
        oldest = np.array([step - s.completion.steps[0] for s in samples])
        found = {"carry/age_mean": float(oldest.mean()), "carry/age_max": int(oldest.max()),
                 "carry/token_age_mean": float(ages.mean()),
                 "carry/token_age_max": int(ages.max()),
                 "carry/old_tokens_frac": float((ages > 0).mean()),
                 "carry/in_flight": len(self.flight) * self.args.group,
                 "rollout/decode_steps": self.decode_steps}
        self.decode_steps = 0
        return found

    # ---- for a checkpoint ----

    def state(self) -> dict:
        """What is in flight. A float32 number is exact in JSON."""
        return {"flight": [{
            "position": group.prompt.position, "row": group.prompt.row.index,
            "started": group.started, "completions": [
                [c.ids.tolist(), c.logprobs.tolist(), c.steps.tolist(), c.truncated]
                for c in group.completions]} for group in self.flight]}

    def restore(self, state: dict, rows: list[Row]):
        by_index = {row.index: row for row in rows}
        self.flight = [Group(
            Prompt(group["position"], by_index[group["row"]]), group["started"],
            [Completion(np.array(ids, np.int32), np.array(logprobs, np.float32), truncated,
                        steps=np.array(steps, np.int32))
             for ids, logprobs, steps, truncated in group["completions"]])
            for group in state["flight"]]
