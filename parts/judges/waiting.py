"""waiting.py: `async def` rewards in a worker: many jobs at once, each tried again where it fails
and another try can help (servers.py).

A judge behind a server answers slowly, and can answer many at a time (examples/judge.py).
"""
import asyncio
from typing import NamedTuple

import worker
from parts.judges import servers
from worker import Reward, RewardSpec

PAUSE = 1.0  # seconds before the first retry; each further pause is twice as long
LOOP = asyncio.Runner()  # one loop for all calls: a client may outlive its call


class Loaded(NamedTuple):
    """What a worker calls."""
    rewards: list[Reward]
    timeout: float  # seconds for an item in a try
    retries: int  # of a coroutine, at most


class Job:
    """Completions that come together: one, or all of a prompt."""

    def __init__(self, rewards: list[Reward], items: list):
        self.items, self.retries = items, 0
        self.found = {it.name: [None] * len(items) if it.waits else worker.found_by(it, items)
                      for it in rewards}

    def answers(self) -> list[dict]:
        """As of worker.by_item, and with the first item the retries of the job."""
        made = worker.by_item(self.found)
        made[0]["retries"] = self.retries
        return made


def load(specs: list[RewardSpec], timeout: float, retries: int) -> tuple[Loaded, list]:
    """As worker.load."""
    rewards, told = worker.load(specs)
    return Loaded(rewards, timeout, retries), told


def score(loaded: Loaded, jobs: list[list]) -> list[list]:
    """The answers of each job: the coroutines run together, after the other rewards."""
    made = [Job(loaded.rewards, items) for items in jobs]
    LOOP.run(score_all(loaded, made))
    return [job.answers() for job in made]


async def score_all(loaded: Loaded, jobs: list[Job]) -> None:
    """Calls the coroutines."""
    tasks = []
    for job in jobs:
        for reward in loaded.rewards:
            found = job.found[reward.name]
            size = len(job.items) if reward.groups else 1
            tasks += [score_one(loaded, job, reward, found, slice(i, i + size))
                      for i in range(0, len(job.items), size) if reward.waits]
    await asyncio.gather(*tasks)


async def score_one(loaded: Loaded, job: Job, reward: Reward, found: list, part: slice) -> None:
    """One call of a coroutine, and retries where it raises or is late. A server may say how long to
    wait before the next one, and that none can help. found: its numbers."""
    items, pause = job.items[part], 0.0
    loading, seconds = worker.LOADING.seconds, loaded.timeout * len(items)

    async def once():
        return reward.values(await reward.start(items), items)

    for retry in range(loaded.retries + 1):
        if retry:
            job.retries += 1
            await asyncio.sleep(pause)
        pause = PAUSE * 2**retry
        task = asyncio.create_task(once())
        # Not asyncio.timeout: it waits for a coroutine that does not let itself be cancelled.
        await asyncio.wait([task], timeout=seconds + loading * (retry == 0))
        if not task.done():
            task.cancel()
            error = f"no answer within {seconds:g} seconds"
        elif task.exception() is None:
            found[part] = task.result()
            return
        elif isinstance(task.exception(), MemoryError):  # as in worker.found_by
            raise task.exception()
        else:
            said = servers.said_in(task.exception())
            error = f"{worker.failure(task.exception())}{said.words}"
            if not said.again:
                break
            pause = pause if said.wait is None else min(said.wait, seconds)
    found[part] = [error] * len(items)


def work(fd: int) -> None:
    """See worker.py."""
    worker.work(fd, load, score)
