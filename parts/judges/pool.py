"""pool.py: the workers of `async def` rewards. Each gets many jobs at once."""
from dataclasses import dataclass
from typing import Annotated, ClassVar

from parts.judges.waiting import PAUSE
from rewards import Pool
from settings import Flags, Range

TOGETHER = 64  # jobs that a worker gets at once


@dataclass
class JudgeArgs(Flags):
    """`async def` rewards"""
    reward_retries: Annotated[int, Range(0, 10)] = 2
    """Retries of an `async def` reward that raises or is late, unless its server's status says that
    this cannot help (400, 401, 404)."""


class JudgePool(Pool):
    module: ClassVar = "parts.judges.waiting"

    def __init__(self, words: list[str], args, decode=None):
        self.retries = args.reward_retries
        super().__init__(words, args, decode)

    def to_load(self) -> tuple:
        """See Pool."""
        return self.specs, self.args.reward_timeout, self.retries

    def ask(self, items: list[dict], size: int = 1) -> list[dict]:
        """See Pool. The metric reward/retries is the mean over completions; the first one of a job
        has those of the job, and the others 0."""
        return [found | {"retries": found.get("retries", 0)} for found in super().ask(items, size)]

    def put(self, jobs: list[slice]) -> None:
        """See Pool."""
        for i in range(0, len(jobs), TOGETHER):
            self.inboxes[0].put(jobs[i:i + TOGETHER])

    def seconds(self, sent: list[list]) -> float:
        """All tries and pauses of the coroutines, after the other rewards. A server may ask for a
        pause as long as a try."""
        tries = self.args.reward_timeout * len(sent[0]) * (2 * self.retries + 2)
        return tries + PAUSE * (2**self.retries - 1) + 1
