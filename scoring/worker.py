"""worker.py: calls rewards in a process that rewards.py may kill. It imports no torch.

In: pickles: what to load, then lists of calls. Out: lines of JSON: what it loaded (or a text, why
it cannot), then a line for each list. What a reward prints goes where the trainer's does.
"""
import asyncio
import contextlib
import ctypes
import functools
import json
import os
import pickle
import resource
import signal
import socket
import traceback

from scoring.signatures import GROUPS, TRAINER, Item, Part, Reward, find, read_signature

TOGETHER = 64  # calls of `async def` rewards that a worker gets at once
PAUSE = 1.0  # seconds before the first retry; each further pause is twice as long
LOOP = asyncio.Runner()  # one loop for all calls: a client may outlive its call


def load(kind: str, parts: list[Part]) -> tuple[list[Reward], list[str]]:
    """The functions of a flag; the methods of a --reply CLASS."""
    rewards = [read_signature(part, find(part), kind) for part in parts]
    if rewards[0].kind == "environment":
        return rewards, rewards[0].function.methods
    return rewards, []


class Call:
    """Completions that are scored together: one, or all of a prompt."""

    def __init__(self, items: list[Item], rewards: list[Reward]):
        self.items, self.retries = items, 0
        self.errors = [None] * len(items)  # the last one of each
        self.values = [[None] * len(items) for _ in rewards]  # [reward][item]

    def answers(self) -> list[list]:
        """Of each item: its values, its error, and with the first item the retries."""
        of_items = zip(zip(*self.values, strict=True), self.errors, strict=True)
        return [[*item, 0 if i else self.retries] for i, item in enumerate(of_items)]

    def fill(self, values: list, part: slice, found: list) -> None:
        """Notes what a reward returned: numbers; a str is an error."""
        values[part] = [None if isinstance(value, str) else value for value in found]
        self.errors[part] = [value if isinstance(value, str) else error
                             for value, error in zip(found, self.errors[part], strict=True)]

    def tasks(self, rewards: list[Reward], waits: bool) -> list[tuple[Reward, list, slice]]:
        """(reward, its values, the items of one call of its function), …"""
        found = []
        for reward, values in zip(rewards, self.values, strict=True):
            size = len(self.items) if reward.kind in GROUPS else 1
            if reward.waits == waits:
                found += [(reward, values, slice(i, i + size))
                          for i in range(0, len(self.items), size)]
        return found


def score_plain(rewards: list[Reward], call: Call) -> None:
    """The values of a call by the rewards that are no coroutines."""
    for reward, values, part in call.tasks(rewards, waits=False):
        items = call.items[part]
        try:
            call.fill(values, part, reward.values(reward.start(items), items))
        except MemoryError:  # it ends this process: what holds the memory may stay
            raise
        except Exception:
            call.errors[part] = [traceback.format_exc()[-2000:]] * len(items)


async def score_waiting(rewards: list[Reward], calls: list[Call], timeout: float,
                        retries: int) -> None:
    """The values of the calls by the coroutines, which run together."""
    await asyncio.gather(*(score_one(call, *task, timeout, retries) for call in calls
                           for task in call.tasks(rewards, waits=True)))


async def score_one(call: Call, reward: Reward, values: list, part: slice, timeout: float,
                    retries: int) -> None:
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
            return call.fill(values, part, task.result())
        elif isinstance(task.exception(), MemoryError):  # as in score_plain
            raise task.exception()
        else:
            error = "".join(traceback.format_exception(task.exception()))[-2000:]
    call.errors[part] = [error] * len(items)


def received(pipe: socket.socket):
    """The trainer's messages, until it ends."""
    inbox = pipe.makefile("rb")
    with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
        while True:
            yield pickle.load(inbox)


def work(fd: int) -> None:
    """The life of a worker. fd: of its socket."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PDEATHSIG: it ends with the trainer
    # What a reward forks cannot answer, and does not keep the socket open.
    os.register_at_fork(after_in_child=functools.partial(os.closerange, fd, fd + 1))
    pipe = socket.socket(fileno=fd)
    inbox = received(pipe)

    def send(message):
        # A surrogate alone has no bytes.
        line = (json.dumps(message, ensure_ascii=False) + "\n").encode(errors="replace")
        try:
            pipe.sendall(line)
        except OSError:  # this is a fork, or the trainer ended
            os._exit(1)

    started = next(inbox, None)
    if not started:
        return
    kind, parts, memory, timeout, retries = started
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        rewards, methods = load(kind, parts)
    except SystemExit as error:  # a sentence that says why
        return send(str(error))
    except Exception:
        return send(traceback.format_exc()[-2000:])
    groups = any(reward.kind in GROUPS for reward in rewards)
    together = any(reward.waits for reward in rewards)
    send([groups, together, methods, [need for reward in rewards for need in reward.needs]])
    for progress, batch in inbox:
        vars(TRAINER).update(progress)
        calls = [Call(items, rewards) for items in batch]
        for call in calls:
            score_plain(rewards, call)
        if together:
            LOOP.run(score_waiting(rewards, calls, timeout, retries))
        send([call.answers() for call in calls])
