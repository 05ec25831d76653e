"""replies.py: what answers the model in a worker: a --reply FILE.py:CLASS, or the --tools.

turns.py asks: a Move goes to the environment of its episode, a call to the function that it names.
"""
import inspect
import json
import sys
from collections.abc import Callable
from typing import NamedTuple

LONGEST_REPLY = 1_000_000  # characters
LONGEST_ERROR = 500  # characters


class Move(NamedTuple):
    """What a --reply (or a tool) is asked: its answer to the last turn."""
    row: dict  # the columns, the prompt, the answer
    seed: int  # of the episode, which it also names
    turns: list[dict]
    seen: list[int]  # how many turns there were at each of its replies so far
    over: bool = False  # not a reply, but its reward: the episode is over
    completion: str = ""  # as of an Item, for errors


def messages(value) -> list[dict] | None:
    """What a --reply returned, as messages. None: the episode is over. Else a TypeError."""
    if value is None:
        return None
    found = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if (not isinstance(found, list) or not found or not all(map(is_message, found))
            or sum(len(m["content"]) for m in found) > LONGEST_REPLY):
        raise TypeError('a reply must be None, text, or a list of {"role": text, "content": text}, '
                        f"with {LONGEST_REPLY:,} characters at most (got {str(value)[:100]!r})")
    return [{"role": m["role"], "content": m["content"]} for m in found]


def is_message(value) -> bool:
    return (isinstance(value, dict) and isinstance(value.get("role"), str)
            and isinstance(value.get("content"), str))


class Environments:
    """Those of a --reply CLASS that live in this worker, by the seeds of their episodes."""

    def __init__(self, kind: type):
        self.kind, self.live = kind, {}
        self.methods = [name for name in ("reply", "reward", "close")
                        if inspect.isfunction(getattr(kind, name, None))]
        if "reply" not in self.methods:
            sys.exit(f"the class {kind.__name__} needs a method reply(turns).")
        if any(inspect.iscoroutinefunction(getattr(kind, name)) for name in self.methods):
            sys.exit(f"the methods of the class {kind.__name__} must be def, not async def.")

    def play(self, move: Move):
        """Its reply, as messages. None: the episode is over. Of a move that is over: the reward."""
        it = self.live.pop(move.seed, None)
        if it is None or not move.seen:  # an evaluation has the same episodes each time
            it = self.played_again(move)
        if move.over:
            reward = it.reward() if "reward" in self.methods else None
            self.close(it)
            return reward
        said = messages(it.reply([dict(turn) for turn in move.turns]))
        self.live[move.seed] = it
        return said

    def played_again(self, move: Move):
        """A new environment that has seen the turns so far: its worker was killed."""
        it = self.kind(dict(move.row), move.seed)
        for end in move.seen:
            it.reply([dict(turn) for turn in move.turns[:end]])
        return it

    def close(self, it) -> None:
        if "close" in self.methods:
            it.close()


class Tools:
    """The functions of --tools, and their schemas."""

    def __init__(self, functions: dict[str, Callable]):
        from transformers.utils import chat_template_utils as made  # without torch
        self.schemas, self.functions = [], {}
        for name, function in functions.items():
            if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
                sys.exit(f"--tools needs a function {name} (def, not async def).")
            try:
                schema = made.get_json_schema(function)
            except (made.DocstringParsingException, made.TypeHintParsingException) as error:
                sys.exit(f"{error} A tool needs a docstring with a line `NAME: what it is` below "
                         f"`Args:`, and a type hint, for each argument.")
            self.schemas.append(schema)
            self.functions[schema["function"]["name"]] = function

    def answer(self, turns: list[dict]) -> list[dict]:
        """The message that answers the one call of the last turn."""
        call = turns[-1]["tool_calls"][0]["function"]
        result = self.result(call["name"], call["arguments"])
        return [{"role": "tool", "content": result}]

    def result(self, name: str, arguments: dict | str) -> str:
        """As text. What goes wrong is a sentence for the model."""
        if name not in self.functions:
            return f"error: there is no tool {name[:50]!r}, only {', '.join(self.functions)}"
        try:
            text = self.functions[name](**arguments)
            if not isinstance(text, str):
                text = json.dumps(text, ensure_ascii=False)
        except MemoryError:  # it ends this process: what holds the memory may stay
            raise
        except Exception as error:
            return f"error: {type(error).__name__}: {error}"[:LONGEST_ERROR]
        if len(text) > LONGEST_REPLY:
            return f"error: the result has {len(text):,} characters, more than {LONGEST_REPLY:,}"
        return text
