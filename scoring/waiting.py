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
    """The values of these worker.Calls by the coroutines, which run together. timeout: seconds for
    an item, in each try."""
    async def everything():
        await asyncio.gather(*(score_one(call, *task, timeout, retries) for call in calls
                               for task in call.tasks(rewards, waits=True)))
    LOOP.run(everything())


async def score_one(call, reward, values: list, part: slice, timeout: float, retries: int) -> None:
    """One call of a coroutine, and retries where it raises or is late."""
    items = call.items[part]
    for retry in range(retries + 1):
        if retry:
            call.retries += 1
            await asyncio.sleep(PAUSE * 2 ** (retry - 1))
        found, error = await one_try(reward, items, timeout * len(items))
        if not error:
            break
    call.note(values, part, found or [error] * len(items))


async def one_try(reward, items: list, seconds: float) -> tuple[list | None, str | None]:
    """What the reward returned for these items, or why it did not."""
    async def answer():
        return reward.values(await reward.start(items), items)

    task = asyncio.create_task(answer())
    # Not asyncio.timeout: it waits for a coroutine that does not let itself be cancelled.
    await asyncio.wait([task], timeout=seconds)
    if not task.done():
        task.cancel()
        return None, f"no answer within {seconds:g} seconds"
    if isinstance(task.exception(), MemoryError):  # as in worker.score
        raise task.exception()
    if task.exception():
        return None, "".join(traceback.format_exception(task.exception()))[-2000:]
    return task.result(), None
