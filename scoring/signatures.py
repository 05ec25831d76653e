"""signatures.py: a function of ours, TRL, verl or EasyR1: found, called, its result checked.

The names of its parameters show whose it is. See docs/use/data_and_rewards.md.
"""
import contextlib
import functools
import importlib.util
import inspect
import math
import os
import pkgutil
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

from scoring.replies import Environments, Move, messages, number
from scoring.verifiers import GUARDS, REWARDS

# A parameter of a reward shows its kind. The first that fits counts.
KINDS = {"completions": "trl", "reward_inputs": "easyr1s", "reward_input": "easyr1",
         "solution_str": "verl", "completion": "ours", "turns": "ours"}
GROUPS = ("trl", "easyr1s")  # of a prompt's completions in one call
ROOT = Path(__file__).absolute().parent.parent
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
    kind: str
    function: Callable
    takes: list[str] | None  # its parameters; None: any
    needs: list[tuple[str, str]]  # (its name, column of the row)
    waits: bool  # `async def`: calls of it run together
    folder: str = str(ROOT)  # of its file

    def start(self, items: list[Item]):
        """What the function returns for one completion, or for all of TRL's group."""
        with at_home(self.folder):
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
        if self.kind not in GROUPS:
            return [number(result)]
        results = list(result)
        if len(results) != len(items):
            raise ValueError(f"{len(results)} values for {len(items)} completions")
        none = math.nan if self.kind == "trl" else None
        return [none if value is None else tried(value) for value in results]


HOMES: dict[str, dict[str, ModuleType]] = {}  # folder: what was imported from it


@contextlib.contextmanager
def at_home(folder: str):
    """In it, imports look into `folder` first, as in `python FILE`. Elsewhere what lies there hides
    nothing: it may have an examples/ or a data.py, and two folders the same names."""
    names, mine = beside(folder), HOMES.get(folder, {})
    others = taken(names)
    sys.modules |= mine
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        HOMES[folder] = taken(names)
        sys.modules |= others


@functools.cache
def beside(folder: str) -> set[str]:
    """The modules of a folder, unless it is the project's."""
    names = {name.partition(".")[0] for name in os.listdir(folder)} - sys.stdlib_module_names
    found = [PathFinder.find_spec(name, [folder]) for name in names]
    own = os.path.samefile(folder, ROOT)
    return {spec.name for spec in found if spec and spec.origin and not own}


def taken(names: set[str]) -> dict[str, ModuleType]:
    """These modules, out of sys.modules."""
    if names.isdisjoint(sys.modules):
        return {}
    return {known: sys.modules.pop(known) for known in [*sys.modules]
            if known.partition(".")[0] in names}


def load(path: Path) -> ModuleType:
    """A file of rewards, environments or losses."""
    spec = importlib.util.spec_from_file_location(f"own_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with at_home(str(path.parent)):
        spec.loader.exec_module(module)
    sys.path.append(str(path.parent))  # for what a coroutine imports
    return module


def find(part: Part):
    """The function of a --reward or --reply. None: the file has none of this name."""
    if part.path:
        return getattr(load(Path(part.path).absolute()), part.name, None)
    if part.name in GUARDS:
        pkgutil.resolve_name(GUARDS[part.name])()
    return pkgutil.resolve_name(REWARDS[part.name])


def read_signature(part: Part, function, wanted: str) -> Reward:
    """What `find` found, and how to call it. wanted: "reward" or "reply"."""
    if function is None:
        sys.exit(f"{part.path} has no {part.name}.")
    folder = str((ROOT / "x" if not part.path else Path(part.path)).absolute().parent)
    if wanted == "reply" and inspect.isclass(function):
        return Reward("environment", Environments(function), None, [], False, folder)
    parameters = inspect.signature(function).parameters if callable(function) else {}
    named = {name: p for name, p in parameters.items()
             if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    kinds = KINDS if wanted == "reward" else {"turns": "reply"}
    kind = next((kind for word, kind in kinds.items() if word in named), None)
    if not kind:
        sys.exit(f"{part.path} needs a function {part.name} with a parameter "
                 f"{' or '.join(kinds)} (it has {list(named)}).")
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
    return Reward(kind, function, None if any_name else list(named), needs, waits, folder)


def arguments(kind: str, items: list[Item | Move]) -> dict:
    """All that a reward of this kind may take. Only those of GROUPS have more than one item."""
    if kind == "reply":
        return items[0].row | {"row": items[0].row, "turns": items[0].turns}
    items = [item._replace(turns=item.turns or [{"role": "assistant", "content": item.completion}])
             for item in items]
    if kind == "trl":
        return as_lists(items)
    if kind in ("easyr1", "easyr1s"):
        inputs = [{"response": item.completion, "response_length": item.tokens,
                   "ground_truth": item.answer} for item in items]
        return {"reward_inputs": inputs, "reward_input": inputs[0]}
    fields = items[0]._asdict()
    row = fields.pop("row")
    if kind == "verl":
        return {"data_source": None, "extra_info": None, **row, "turns": fields["turns"],
                "solution_str": fields["completion"], "ground_truth": fields["answer"]}
    return row | fields


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
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
