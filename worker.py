"""worker.py: the process that calls reward functions. rewards.py may kill it.

It imports no torch. The parameter names of a reward's function show whether the function takes one
completion (our form) or lists of them (TRL's form): docs/use/data_and_rewards.md.
examples/adapters.py is for functions of verl and EasyR1.

Top to bottom: `work` is the process: it has `load` load the rewards, then receives completions, has
`score` call the rewards, and sends back the results. `Reward` is a loaded function, `find` and the
functions below it import its file, and `read_signature` reads its parameters.
"""
import contextlib
import ctypes
import dis
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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from numbers import Number
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar, NamedTuple

from answers import GUARDS, REWARDS

ROOT = Path(__file__).absolute().parent
TRAINER = SimpleNamespace(global_step=0, max_steps=0)  # the part of TRL's trainer_state we have
# Extra time for this message, if it is the first. Only parts read it, which time single calls.
LOADING = SimpleNamespace(seconds=0.0)

# The item, which a worker gets for each completion (rewards.item_of): one entry per argument name,
# and `columns`, a dict of the row's columns, each of which is an argument of its own name. With
# these empty values `read_signature` finds out which names there are.
ITEM = {"prompt": "", "completion": "", "answer": None, "tokens": 0, "truncated": False,
        "completion_ids": [], "turns": [], "columns": {}}


class RewardSpec(NamedTuple):
    """One of the rewards that --reward adds up."""
    name: str
    weight: float
    path: str | None  # the file of a function of the user; None: a built-in reward


# ---- the process ----
#
# A worker and the trainer (rewards.Worker) talk over a socket. The worker receives pickles: first
# what to load, then messages (progress of the run, extra seconds for loading, list of jobs). A job
# is a list of items that succeeds or fails as a whole: one item, or all items of a prompt if a
# reward takes groups. The worker sends lines of JSON, because a pickle that a reward wrote could
# run code in the trainer: first what the pool needs to know of the functions (or a text that
# explains why they cannot be loaded), then one line of results for each message. What a reward
# prints goes to the trainer's output.

def load(specs: list[RewardSpec]) -> tuple[list["Reward"], dict]:
    """Loads the functions of --reward. Returns them, and what the pool needs to know of them, by
    the names of its attributes (rewards.Pool).
    """
    # Built-in rewards first: a file of the user may hide their modules.
    built_in_first = sorted(specs, key=lambda spec: spec.path is not None)
    found = {spec: find(spec) for spec in built_in_first}
    rewards, needs = zip(*(read_signature(spec, found[spec]) for spec in specs), strict=True)
    named = [*zip(specs, rewards, strict=True)]
    return [*rewards], {
        "groups": any(it.groups for it in rewards), "needs": sum(needs, []),
        "waits": [spec.name for spec, it in named if it.waits],
        "silent": [spec.name for spec, it in named if it.silent],
        "reads": sum((it.names for it in rewards), [])}


def score(rewards: list["Reward"], jobs: list[list]) -> list[list]:
    """Does a list of jobs, each a list of items. Returns for each job and each of its items {name
    of a reward: what it gave} (found_by).
    """
    return [by_item({reward.name: found_by(reward, items) for reward in rewards})
            for items in jobs]


def work(fd: int, load=load, score=score) -> None:
    """Runs a worker process: loads the rewards, then does lists of jobs until the trainer ends.
    fd: the file descriptor of its socket. load, score: the functions that do this; another module
    may pass its own.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PDEATHSIG: it ends with the trainer
    # A scheduler such as Slurm ends a run by SIGTERM to all of its processes. The trainer finishes
    # its step, so a worker continues. What a reward forked may have ended: the answer is discarded.
    disturbed = []
    signal.signal(signal.SIGTERM, lambda *_: disturbed.append(True))
    os.register_at_fork(after_in_child=functools.partial(
        signal.signal, signal.SIGTERM, signal.SIG_DFL))
    # A process that a reward forks cannot write to the socket, and does not keep it open.
    os.register_at_fork(after_in_child=functools.partial(os.closerange, fd, fd + 1))
    pipe = socket.socket(fileno=fd)
    inbox = received(pipe)

    def send(message):
        # A lone surrogate cannot be encoded, so it is replaced.
        line = (json.dumps(message, ensure_ascii=False) + "\n").encode(errors="replace")
        try:
            pipe.sendall(line)
        except OSError:  # this process is a fork, or the trainer has ended
            os._exit(1)

    to_load = next(inbox, None)
    if not to_load:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        rewards, told = load(*to_load)
    except SystemExit as error:  # its text says why a file cannot be used
        return send(error.code if isinstance(error.code, str) else failure(error))
    except Exception as error:
        return send(failure(error))
    send(told)
    for progress, LOADING.seconds, jobs in inbox:  # sets LOADING.seconds for each message
        vars(TRAINER).update(progress)
        results = score(rewards, jobs)
        send(None if disturbed else results)


def received(pipe: socket.socket):
    """Yields the messages of the trainer until it closes the socket."""
    inbox = pipe.makefile("rb")
    with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
        while True:
            yield pickle.load(inbox)


def found_by(reward: "Reward", items: list) -> list:
    """Returns for each item what a reward gave: a number, None, or a text that describes an error.
    A function that takes groups is called once for all items. Any other is called once for each,
    also if `items` is a group because another reward takes groups. A MemoryError is raised again.
    """
    found, size = [], len(items) if reward.groups else 1
    for start in range(0, len(items), size):
        some = items[start:start + size]
        try:
            found += reward.values(reward.start(some), some)
        except MemoryError:  # it must end this process: what holds the memory may stay
            raise
        except Exception as error:
            found += [failure(error)] * len(some)
    return found


def failure(error: BaseException) -> str:
    """Returns the last 2,000 characters of the traceback of an error. Frames of this file and its
    callers are left out, so it begins in the reward's own files.
    """
    trace, callers = error.__traceback__, ("worker", "parts", "asyncio", "importlib")
    while trace and trace.tb_frame.f_globals["__name__"].partition(".")[0] in callers:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))[-2000:]


def by_item(found: dict[str, list]) -> list[dict]:
    """Returns {name: value} for each item. found: {name of a reward: a value for each item}."""
    return [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]


# ---- functions ----

@dataclass
class Reward:
    """The loaded function of a reward, and how it is called."""
    name: str  # of the reward
    function: Callable
    names: list[str]  # its parameters
    open: bool  # it takes any other argument too: it has **kwargs
    groups: bool = False  # True: one call takes all completions of a prompt, as in TRL
    words: ClassVar = ("completions", "completion", "turns")  # it needs one of these parameters
    nothing: ClassVar = ITEM  # an item with empty values: `given` of it has every name

    def given(self, items: list) -> dict:
        """Returns {name: argument} of all arguments that the function may declare. items: one
        completion, or, if the function takes groups, all completions of a prompt. For one
        completion, an argument of ITEM replaces a column of its name; for a group, see `as_lists`.
        """
        if self.groups:
            return as_lists(items)
        return items[0].pop("columns") | items[0]

    def start(self, items: list):
        """Calls the function for one item, or for all items of a group, with those arguments that
        it declares. Returns its result, which is a coroutine if the function is `async def`.
        """
        given = self.given([*map(fresh, items)])
        if not self.open:
            given = {name: value for name, value in given.items() if name in self.names}
        return self.function(**given)

    def values(self, result, items: list) -> list:
        """Returns a value for each item from the function's result: a number, the reward; None, if
        the function returned None for an item of a group (TRL's form), so the reward does not apply
        to its row; or a text that says why the item has no reward. Raises a TypeError or a
        ValueError if the result as a whole cannot be used.
        """
        if not self.groups:
            value = number(result)
            return [f"{self.name} returned None" if value is None else value]
        results = list(result) if isinstance(result, Iterable) else [result]
        if len(results) != len(items):
            raise TypeError(f"a reward must be a list of numbers: {len(results)} values for "
                            f"{len(items)} completions")
        return [*map(tried, results)]

    @property
    def waits(self) -> bool:
        """Whether the function is `async def`."""
        return any(map(inspect.iscoroutinefunction, (self.function, type(self.function).__call__)))

    @property
    def silent(self) -> bool:
        """Whether the function is written in Python and has no `return` with a value."""
        code = getattr(self.function, "__code__", None)
        steps = [(it.opname, it.argval) for it in dis.get_instructions(code)] if code else []
        return bool(steps) and all(
            before == ("LOAD_CONST", None) if name == "RETURN_VALUE" else value is None
            for before, (name, value) in pairwise(steps) if name.startswith("RETURN_"))


def fresh(value):
    """Returns a copy of what a function is handed: it may write into it, and keep it."""
    return pickle.loads(pickle.dumps(value))


# ---- the file ----

def find(spec: RewardSpec):
    """Returns the function of a reward, or None if its file has no function of this name. Before a
    built-in reward is looked up, its guard (answers.GUARDS) is called.
    """
    if spec.path:
        return getattr(import_file(Path(os.path.abspath(spec.path))), spec.name, None)
    if spec.name in GUARDS:
        pkgutil.resolve_name(GUARDS[spec.name])()
    return pkgutil.resolve_name(REWARDS[spec.name])


def import_file(path: Path) -> ModuleType:
    """Imports a file of rewards under its own name and returns the module. Its folder is put first
    on sys.path, as in `python FILE`, so the processes that the reward starts can import the file
    too. The user's PYTHONPATH follows, and the project is last. Ends the worker (SystemExit) if the
    name finds another module.
    """
    folder, name, last = str(path.parent), path.stem, str(ROOT)
    sys.path[:] = dict.fromkeys([folder, *(it for it in sys.path if it != last), last])
    spec = None if "." in name else importlib.util.find_spec(name)
    if not spec or spec.origin != str(path):
        sys.exit(f"{path} cannot be imported by its name: `import {name}` finds "
                 f"{spec.origin if spec else 'nothing'}. Would work: another name for the file.")
    return importlib.import_module(name)


def find_file(name: str) -> Path | None:
    """Returns the path of a file of the user: in the current folder, or else in that of the
    project. None: it is in neither."""
    return next((path for path in (Path(name), ROOT / name) if path.is_file()), None)


def load_file(path: Path) -> ModuleType:
    """Loads a file of losses, advantages or rows in the trainer's process and returns the module.
    Its folder is put last on sys.path, so files beside it cannot hide a module of this project.
    """
    spec = importlib.util.spec_from_file_location(f"own_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


# ---- the parameters ----

def read_signature(spec: RewardSpec, function, kind: type[Reward] = Reward) -> tuple[Reward, list]:
    """Reads the parameters of a reward's function. Returns a `kind`, which holds the function, and
    a list of (name of the reward, column of the row that it needs, whether each row must have it).
    Ends the worker (SystemExit) with a sentence if the file has no such function, or if its
    parameters are not those of a reward.
    """
    if function is None:
        sys.exit(f"{spec.path} has no {spec.name}.")
    parameters = inspect.signature(function).parameters if callable(function) else {}
    named = {name: p for name, p in parameters.items()
             if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    word = next((word for word in kind.words if word in named), None)
    if not word:
        sys.exit(f"{spec.path} needs a function {spec.name} with a parameter "
                 f"{' or '.join(kind.words)} (it has {list(named)}). For a function of verl or "
                 "EasyR1 see examples/adapters.py.")
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    reward = kind(spec.name, function, list(named), any_name, word == "completions")
    given = reward.given([fresh(kind.nothing)]).keys() - {"answer"}
    # A function of the user may have a use for rows without an answer.
    return reward, [(spec.name, name, name != "answer" or not spec.path)
                    for name, p in named.items() if p.default is p.empty and name not in given]


def as_lists(items: list[dict]) -> dict:
    """Returns {name: argument} for a function of TRL's form: a list over the items for each
    argument of ITEM and for each column of the first row (None where another row lacks it), and
    what TRL's trainer passes beside them. A column replaces an argument of its name.
    """
    rows = [item.pop("columns") for item in items]
    given = {name: [item[name] for item in items] for name in items[0]}
    prompts, completions = given["prompt"], given["completion"]
    given |= {name: [row.get(name) for row in rows] for name in rows[0]}
    if isinstance(rows[0].get("prompt"), list):  # TRL's conversational form
        prompts, completions = given["prompt"], given["turns"]
    return given | {"prompts": prompts, "completions": completions,
                    "trainer_state": SimpleNamespace(**vars(TRAINER)),
                    "log_extra": lambda *_: None, "log_metric": lambda *_: None}


def tried(value) -> float | None | str:
    """Returns `number` of a value, or a text that says what is wrong with it."""
    try:
        return number(value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def number(value) -> float | None:
    """Returns a finite number (also of numpy, torch, decimal or fractions) as a float, and None as
    None. Raises a TypeError or a ValueError for any other value.
    """
    value = value.item() if hasattr(value, "item") else value
    if value is None:
        return None
    if not isinstance(value, Number) or isinstance(value, complex) or not math.isfinite(value):
        kind = ValueError if isinstance(value, float) else TypeError
        raise kind(f"a reward must be a finite number or None (got {str(value)[:100]!r}, "
                   f"a {type(value).__name__})")
    return float(value)
