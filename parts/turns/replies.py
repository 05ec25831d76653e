"""replies.py: a --reply in a worker: its messages, and the environments of a FILE.py:CLASS."""
import asyncio
import inspect
import sys
import traceback
from typing import ClassVar, TypedDict

import worker
from worker import Reward, RewardSpec, number

LONGEST_REPLY = 1_000_000  # characters
LOOP = asyncio.Runner()  # one loop for all calls of an `async def`: a client may outlive its call
# Keys of a message that the chat template gets: the last two are of an answer to a call.
KEYS = "role", "content", "name", "tool_call_id"


class Move(TypedDict, total=False):
    """What a --reply is asked: its answer to the last turn."""
    row: dict  # the columns, the prompt, the answer
    seed: int  # of the episode, which it also names
    turns: list[dict]
    seen: list[int]  # how many turns there were at each of its replies so far
    over: bool  # not a reply, but its reward: the episode is over
    pays: bool  # with a reply comes the reward so far: a turn is paid what it grows by
    completion: str  # the last turn, for errors (as of worker.ITEM)


class Reply(Reward):
    """A function of --reply."""
    words: ClassVar = ("turns",)
    nothing: ClassVar = Move(row={"prompt": "", "answer": None}, turns=[])

    def given(self, items: list[Move]) -> dict:
        """See worker.Reward. A job is one Move."""
        return items[0]["row"] | {"row": items[0]["row"], "turns": items[0]["turns"]}

    def values(self, result, items: list[Move]) -> list:
        """Its messages. None: the episode is over."""
        return [messages(result)]


def messages(value) -> list[dict] | None:
    """What a --reply returned, as messages. None: the episode is over. Else a TypeError."""
    if value is None:
        return None
    found = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if (not isinstance(found, list) or not found or not all(map(is_message, found))
            or sum(len(m["content"]) for m in found) > LONGEST_REPLY):
        raise TypeError('a reply must be None, text, or a list of {"role": text, "content": text}, '
                        f"with {LONGEST_REPLY:,} characters at most (got {str(value)[:100]!r})")
    return [{key: m[key] for key in KEYS if isinstance(m.get(key), str)} for m in found]


def is_message(value) -> bool:
    """Has it a text as role, and one as content?"""
    return (isinstance(value, dict) and isinstance(value.get("role"), str)
            and isinstance(value.get("content"), str))


class Environments:
    """Those of a --reply CLASS that live in this worker, by the seeds of their episodes."""

    name, groups, waits = "reply", False, False  # as of a worker.Reward

    def __init__(self, kind: type):
        self.kind, self.live = kind, {}
        self.methods = [name for name in ("reply", "reward", "close") if hasattr(kind, name)]
        if not all(callable(getattr(kind, name)) for name in self.methods):
            sys.exit(f"reply, reward and close of the class {kind.__name__} must be methods.")
        if "reply" not in self.methods:
            sys.exit(f"the class {kind.__name__} needs a method reply(turns).")
        if any(inspect.iscoroutinefunction(getattr(kind, name)) for name in self.methods):
            sys.exit(f"the methods of the class {kind.__name__} must be def, not async def.")
        takes(kind, kind.__name__, ["row", "seed"])
        for name in self.methods:
            if inspect.isfunction(inspect.getattr_static(kind, name)):  # it gets the object first
                takes(getattr(kind, name), f"{kind.__name__}.{name}",
                      ["self", "turns"] if name == "reply" else ["self"])

    def start(self, moves: list[Move]):
        """Answers a Move: its reply, as messages. None: the episode is over. Of a move that is
        over: the reward."""
        move = worker.fresh(moves[0])
        it = self.live.pop(move["seed"], None)
        if it is None or not move["seen"]:  # an evaluation has the same episodes each time
            it = self.played_again(move)
        if move["over"]:
            reward = it.reward() if "reward" in self.methods else None
            if "close" in self.methods:
                it.close()
            return reward
        said = messages(it.reply(worker.fresh(move["turns"])))
        self.live[move["seed"]] = it
        if said and move["pays"]:
            said[0]["reward"] = number(it.reward())
        return said

    def values(self, result, moves: list[Move]) -> list:
        """See worker.Reward."""
        return [number(result) if moves[0]["over"] else result]

    def played_again(self, move: Move):
        """A new environment that has seen the turns so far: its worker was killed."""
        it = self.kind(move["row"], move["seed"])
        for end in move["seen"]:
            it.reply(worker.fresh(move["turns"][:end]))
        return it


def takes(called, name: str, given: list[str]) -> None:
    """Ends the worker if a class or one of its methods cannot be called with these arguments."""
    try:
        inspect.signature(called).bind(*given)
    except TypeError as error:
        sys.exit(f"{name} is called with ({', '.join(given)}), and does not take them: {error}.")
    except ValueError:  # one of a compiled library, which does not tell
        pass


# ---- the process ----

def load(spec: RewardSpec, timeout: float) -> tuple[tuple, list]:
    """(The function or class of --reply, seconds for an answer). Of it: its methods; is it `async
    def`; what it needs."""
    found = worker.find(spec)
    if inspect.isclass(found):
        it = Environments(found)
        return (it, timeout), [it.methods, False, []]
    reply, needs = worker.read_signature(spec, found, Reply)
    return (reply, timeout), [[], reply.waits, needs]


def score(loaded: tuple, jobs: list[list[Move]]) -> list[list[dict]]:
    """As worker.score. The calls of an `async def` run together."""
    reply, timeout = loaded
    if not reply.waits:
        return worker.score([reply], jobs)
    return LOOP.run(score_all(reply, timeout, jobs))


async def score_all(reply: Reply, timeout: float, jobs: list[list[Move]]) -> list[list[dict]]:
    """Calls the coroutine."""
    return await asyncio.gather(*(score_one(reply, timeout, moves) for moves in jobs))


async def score_one(reply: Reply, timeout: float, moves: list[Move]) -> list[dict]:
    """The answers of one job."""
    try:
        said = await asyncio.wait_for(reply.start(moves), timeout + worker.LOADING.seconds)
        found = reply.values(said, moves)
    except MemoryError:  # as in worker.found_by
        raise
    except Exception:
        found = [traceback.format_exc()[-2000:]]
    return worker.by_item({reply.name: found})


def work(fd: int) -> None:
    """See worker.py."""
    worker.work(fd, load, score)
