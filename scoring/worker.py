"""worker.py: calls rewards in a process that rewards.py may kill. It imports no torch.

In: pickles: what to load, then lists of calls. Out: lines of JSON: what it loaded (or a text, why
it cannot), then a line for each list. What a reward prints goes where the trainer's does.
"""
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

from scoring import waiting
from scoring.signatures import TRAINER, Item, Part, Reward, find, read_signature


def load(kind: str, parts: list[Part]) -> tuple[list[Reward], list[str]]:
    """The functions of a flag; the methods of a --reply CLASS."""
    built_in_first = sorted(parts, key=lambda part: part.path is not None)  # a file may hide them
    found = {part: find(part) for part in built_in_first}
    rewards = [read_signature(part, found[part], kind) for part in parts]
    if rewards[0].kind == "environment":
        return rewards, rewards[0].function.methods
    return rewards, []


class Call:
    """Completions that come together: one, or all of a prompt."""

    def __init__(self, items: list[Item], rewards: list[Reward]):
        self.items, self.retries = items, 0
        # [reward][item]: a number; None; or a text, which says what failed.
        self.found = [[None] * len(items) for _ in rewards]

    def tasks(self, rewards: list[Reward], waits: bool) -> list[tuple[Reward, list, slice]]:
        """(reward, its row of `found`, the items of one call of its function), …"""
        tasks = []
        for reward, found in zip(rewards, self.found, strict=True):
            size = len(self.items) if reward.groups else 1
            if reward.waits == waits:
                tasks += [(reward, found, slice(i, i + size))
                          for i in range(0, len(self.items), size)]
        return tasks

    def answers(self) -> list[list]:
        """Of each item: its values, an error, and with the first item the retries."""
        answers = []
        for found in zip(*self.found, strict=True):
            errors = [value for value in found if isinstance(value, str)]
            values = [None if isinstance(value, str) else value for value in found]
            answers.append([values, errors[-1] if errors else None, 0])
        answers[0][2] = self.retries
        return answers


def score(rewards: list[Reward], call: Call) -> None:
    """Calls the rewards that are no coroutines."""
    for reward, found, part in call.tasks(rewards, waits=False):
        items = call.items[part]
        try:
            found[part] = reward.values(reward.start(items), items)
        except MemoryError:  # it ends this process: what holds the memory may stay
            raise
        except Exception:
            found[part] = [traceback.format_exc()[-2000:]] * len(items)


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
    groups = any(reward.groups for reward in rewards)
    together = any(reward.waits for reward in rewards)
    send([groups, together, methods, [need for reward in rewards for need in reward.needs]])
    for progress, batch in inbox:
        vars(TRAINER).update(progress)
        calls = [Call(items, rewards) for items in batch]
        for call in calls:
            score(rewards, call)
        if together:
            waiting.score(rewards, calls, timeout, retries)
        send([call.answers() for call in calls])
