"""waiting.py: `async def` rewards in a worker: many calls at once, each tried again where it fails.

A judge behind a server answers slowly, and can answer many at a time (examples/judge.py).
"""
import asyncio
import traceback

TOGETHER = 64  # calls that a worker gets at once
PAUSE = 1.0  # seconds before the first retry; each further pause is twice as long
LOOP = asyncio.Runner()  # one loop for all calls: a client may outlive its call


def longest(timeout: float, retries: int) -> float:
    """Seconds: all tries and pauses of the coroutines, after the other rewards."""
    return timeout * (retries + 2) + PAUSE * (2**retries - 1) + 1


def score(rewards: list, calls: list, timeout: float, retries: int) -> None:
    """Calls the coroutines of these worker.Calls together. timeout: seconds for an item in a try.
    """
    LOOP.run(score_all(rewards, calls, timeout, retries))


async def score_all(rewards: list, calls: list, timeout: float, retries: int) -> None:
    """As `score`, in the loop."""
    await asyncio.gather(*(score_one(call, *task, timeout, retries) for call in calls
                           for task in call.tasks(rewards, waits=True)))


async def score_one(call, reward, found: list, part: slice, timeout: float, retries: int) -> None:
    """One call of a coroutine, and retries where it raises or is late."""
    items = call.items[part]
    seconds = timeout * len(items)

    async def once():
        return reward.values(await reward.start(items), items)

    for retry in range(retries + 1):
        if retry:
            call.retries += 1
            await asyncio.sleep(PAUSE * 2 ** (retry - 1))
        task = asyncio.create_task(once())
        # Not asyncio.timeout: it waits for a coroutine that does not let itself be cancelled.
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            task.cancel()
            error = f"no answer within {seconds:g} seconds"
        elif task.exception() is None:
            found[part] = task.result()
            return
        elif isinstance(task.exception(), MemoryError):  # as in worker.score
            raise task.exception()
        else:
            error = "".join(traceback.format_exception(task.exception()))[-2000:]
    found[part] = [error] * len(items)
