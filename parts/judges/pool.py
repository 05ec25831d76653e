"""pool.py: the workers of `async def` rewards. Each gets many calls at once."""
from dataclasses import dataclass
from typing import Annotated, ClassVar

from errors import Range
from parts.judges.waiting import PAUSE
from rewards import Answer, Pool, RewardArgs, Score
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
    """A worker gets many calls at once."""
    module: ClassVar = "parts.judges.waiting"
    answer: ClassVar = TriedAnswer

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

    def seconds(self, batch: list[list]) -> float:
        """All tries and pauses of the coroutines, after the other rewards."""
        tries = self.args.reward_timeout * len(batch[0]) * (self.retries + 2)
        return tries + PAUSE * (2**self.retries - 1) + 1


def retries_of(scores: list[Score]) -> int:
    """Of all."""
    return sum(getattr(score, "retries", 0) for score in scores)
