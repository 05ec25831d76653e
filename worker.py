"""worker.py: the process that calls rewards, and that rewards.py may kill. It imports no torch.

A function of a reward file is found, called, and its result checked. The names of its parameters
show whether it takes one completion (ours) or lists (TRL's): docs/use/data_and_rewards.md.
examples/adapters.py is for functions of verl and EasyR1.
"""
import contextlib
import ctypes
import functools
import importlib.util
import inspect
import json
import math
import os
import pickle
import pkgutil
import resource
import signal
import socket
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

from parts.judges import waiting
from parts.turns.replies import Environments, Move, messages, number
from verifiers import GUARDS, REWARDS

# ---- functions ----

# A parameter of a reward shows its kind. The first that fits counts.
KINDS = {"completions": "trl", "completion": "ours", "turns": "ours"}
ROOT = Path(__file__).absolute().parent
TRAINER = SimpleNamespace(global_step=0, max_steps=0)  # TRL's trainer_state, as far as it goes


class Item(NamedTuple):
    """A completion, as a worker gets it."""
    prompt: str
    completion: str
    answer: object
    row: dict
    tokens: int
    truncated: bool
    completion_ids: list[int] | None = None
    turns: list[dict] | None = None  # messages; None: one turn


class Part(NamedTuple):
    """One of the rewards that are added up."""
    name: str
    weight: float
    path: str | None  # of your own function


class Reward(NamedTuple):
    """A function that was loaded, and how it is called."""
    kind: str  # one of KINDS; of a --reply: reply, or environment
    function: Callable
    takes: list[str] | None  # its parameters; None: any
    needs: list[tuple[str, str]]  # (its name, column of the row)
    waits: bool  # `async def`: calls of it run together

    @property
    def groups(self) -> bool:
        """Does one call take all completions of a prompt?"""
        return self.kind == "trl"

    def start(self, items: list[Item | Move]):
        """What the function returns for one item, or for all of a group."""
        if self.kind == "environment":
            return self.function.play(*items)
        given = arguments(self.kind, items)
        if self.takes is not None:
            given = {name: value for name, value in given.items() if name in self.takes}
        return self.function(**given)

    def values(self, result, items: list[Item | Move]) -> list:
        """A number for each item, or the messages of a reply. None: it has none. NaN: TRL's None,
        "not applicable". TypeError, ValueError: a mistake; a str: that of one item of a group."""
        if self.kind == "environment":
            return [number(result) if items[0].over else result]
        if self.kind == "reply":
            return [messages(result)]
        if not self.groups:
            return [number(result)]
        results = list(result)
        if len(results) != len(items):
            raise ValueError(f"{len(results)} values for {len(items)} completions")
        return [math.nan if value is None else tried(value) for value in results]


# ---- the file ----

def find(part: Part):
    """The function of a --reward or --reply. None: the file has none of this name."""
    if part.path:
        return getattr(import_file(Path(os.path.abspath(part.path))), part.name, None)
    if part.name in GUARDS:
        pkgutil.resolve_name(GUARDS[part.name])()
    return pkgutil.resolve_name(REWARDS[part.name])


def import_file(path: Path) -> ModuleType:
    """A file of rewards, under its own name and with its folder first on sys.path, as `python FILE`
    has it: its processes can import it too. SystemExit: another module has the name."""
    folder, name = str(path.parent), path.stem
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = None if "." in name else importlib.util.find_spec(name)
    if not spec or spec.origin != str(path):
        sys.exit(f"{path} cannot be imported by its name: `import {name}` finds "
                 f"{spec.origin if spec else 'nothing'}. Would work: another name for the file.")
    return importlib.import_module(name)


def names_twice(parts: list[Part]) -> list[str]:
    """The names of modules that lie in two folders of reward files: `import` would take either."""
    folders, names = {Path(part.path).resolve().parent for part in parts if part.path}, Counter()
    for folder in folders:
        packages = () if folder == ROOT else folder.glob("*/__init__.py")
        names.update({path.stem for path in folder.glob("[!_]*.py")}
                     | {path.parent.name for path in packages})
    return sorted(name for name, count in names.items() if count > 1)


def load_file(path: Path) -> ModuleType:
    """A file of losses or advantages, in the trainer's process: what lies beside hides nothing."""
    spec = importlib.util.spec_from_file_location(f"own_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


# ---- the parameters ----

def read_signature(part: Part, function, wanted: str) -> Reward:
    """What `find` found, and how to call it. wanted: "reward" or "reply"."""
    if function is None:
        sys.exit(f"{part.path} has no {part.name}.")
    if wanted == "reply" and inspect.isclass(function):
        return Reward("environment", Environments(function), None, [], False)
    parameters = inspect.signature(function).parameters if callable(function) else {}
    named = {name: p for name, p in parameters.items()
             if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    kinds = KINDS if wanted == "reward" else {"turns": "reply"}
    kind = next((kind for word, kind in kinds.items() if word in named), None)
    if not kind:
        sys.exit(f"{part.path} needs a function {part.name} with a parameter "
                 f"{' or '.join(kinds)} (it has {list(named)}). For a function of verl or EasyR1 "
                 "see examples/adapters.py.")
    nothing = Item("", "", None, {}, 0, False)
    if kind == "reply":
        nothing = Move({"prompt": "", "answer": None}, 0, [], [])
    given = arguments(kind, [nothing]).keys()
    if not part.path:
        given -= {"answer"}  # it must not be None
    needs = [(part.name, word) for word, p in named.items()
             if p.default is p.empty and word not in given]
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    waits = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    return Reward(kind, function, None if any_name else list(named), needs, waits)


def arguments(kind: str, items: list[Item | Move]) -> dict:
    """All that a function of this kind may take. Only a group has more than one item."""
    if kind == "reply":
        return items[0].row | {"row": items[0].row, "turns": items[0].turns}
    items = [item._replace(turns=item.turns or [{"role": "assistant", "content": item.completion}])
             for item in items]
    if kind == "trl":
        return as_lists(items)
    fields = items[0]._asdict()
    return fields.pop("row") | fields


def as_lists(items: list[Item]) -> dict:
    """TRL's: a list for each field of the items and for each column of the rows."""
    row = items[0].row
    given = {name: [getattr(item, name) for item in items] for name in Item._fields}
    del given["row"]
    prompts, completions = given["prompt"], given["completion"]
    given |= {name: [item.row.get(name) for item in items] for name in row}
    if isinstance(row.get("prompt"), list):  # TRL's conversational form
        prompts, completions = given["prompt"], given["turns"]
    return given | {"prompts": prompts, "completions": completions, "trainer_state": TRAINER,
                    "log_extra": lambda *_: None, "log_metric": lambda *_: None}


def tried(value) -> float | None | str:
    """A number, or what is wrong with it."""
    try:
        return number(value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# ---- the process ----
#
# In: pickles: what to load, then lists of calls. Out: lines of JSON: what it loaded (or a text, why
# it cannot), then a line for each list. What a reward prints goes where the trainer's does.

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
