"""pool.py: the workers of `async def` rewards. Each gets many calls at once."""
import queue
from dataclasses import dataclass
from typing import Annotated, ClassVar

from errors import Range
from parts.judges.waiting import PAUSE
from rewards import Answer, Pool, RewardArgs, Score, Worker
from worker import Part

TOGETHER = 64  # calls that a worker gets at once


@dataclass
class JudgeArgs:
    """`async def` rewards"""
    reward_retries: Annotated[int, Range(0, 10)] = 2
    """An `async def` reward that raises or is late is tried again so often."""


@dataclass
class TriedScore(Score):
    """With how often rewards were tried again."""
    retries: int = 0


@dataclass
class TriedAnswer(Answer):
    """With how often its call was tried again: with the first item."""
    retries: int = 0

    def score(self, parts: list[Part]) -> TriedScore:
        """See Answer."""
        return TriedScore(**vars(super().score(parts)), retries=self.retries)


class JudgePool(Pool):
    """Its calls are lists of slices of a batch."""
    module: ClassVar = "parts.judges.waiting"

    def __init__(self, specs: list[str], args: RewardArgs, retries: int):
        self.retries = retries
        super().__init__(specs, args)

    def what(self) -> tuple:
        """See Pool."""
        return self.parts, self.args.reward_timeout, self.retries

    def put(self, calls: list[slice]) -> None:
        """See Pool."""
        for i in range(0, len(calls), TOGETHER):
            self.inboxes[0].put(calls[i:i + TOGETHER])

    def call(self, worker: Worker, calls: list[slice]) -> None:
        """See Pool."""
        batch = [self.items[call] for call in calls]
        worker.send(batch)
        # All tries and pauses of the coroutines, after the other rewards.
        seconds = self.args.reward_timeout * len(batch[0]) * (self.retries + 2)
        found = worker.receive(seconds + PAUSE * (2**self.retries - 1) + 1)
        for call, answers in zip(calls, found, strict=True):
            self.answers[call] = [TriedAnswer(*of_item) for of_item in answers]

    def failed(self, inbox: queue.Queue, calls: list[slice], error: Exception) -> None:
        """A lone call has failed. Several are made again, each alone."""
        if len(calls) == 1:
            return super().failed(inbox, calls[0], error)
        for call in calls:
            inbox.put([call])


def retries_of(scores: list[Score]) -> int:
    """Of all."""
    return sum(getattr(score, "retries", 0) for score in scores)
