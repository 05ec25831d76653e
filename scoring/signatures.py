"""signatures.py: a function of ours, TRL, verl or EasyR1: found, called, its result checked.

The names of its parameters show whose it is. See docs/use/data_and_rewards.md.
"""
import contextlib
import functools
import importlib.machinery
import importlib.util
import inspect
import math
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable
from numbers import Number
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

from scoring.replies import Environments, Move, messages
from scoring.verifiers import GUARDS, REWARDS

# A parameter of a reward shows its kind. The first that fits counts.
KINDS = {"completions": "trl", "reward_inputs": "easyr1s", "solution_strs": "verls",
         "reward_input": "easyr1", "solution_str": "verl", "completion": "ours", "turns": "ours"}
GROUPS = ("trl", "easyr1s", "verls")  # of a prompt's completions in one call
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
    folder: str | None = None  # of its file

    def start(self, items: list[Item]):
        """What the function returns for one completion, or for all of TRL's group."""
        if self.kind == "environment":
            with at_home(self.folder):
                return self.function.play(*items)
        given = arguments(self.kind, items)
        if self.takes is not None:
            given = {name: value for name, value in given.items() if name in self.takes}
        with at_home(self.folder):
            return self.function(**given)

    def values(self, result, items: list[Item | Move]) -> list:
        """A number for each item, or the messages of a reply. None: it has none. NaN: TRL's None,
        "not applicable". TypeError, ValueError: a mistake; of one in a group, it is the value."""
        if self.kind == "environment":
            return [number(result) if items[0].over else result]
        if self.kind == "reply":
            return [messages(result)]
        if self.kind not in GROUPS:
            return [number(self.score_of(result))]
        if isinstance(result, str | dict) or not isinstance(result, Iterable):
            raise TypeError(f"a reward of {len(items)} completions must return a list of as many "
                            f"values (got {str(result)[:100]!r}, a {type(result).__name__})")
        results = list(result)
        if len(results) != len(items):
            raise ValueError(f"{len(results)} values for {len(items)} completions")
        return [self.one_of_many(value) for value in results]

    def score_of(self, result):
        """verl's {"score": 1, …}, EasyR1's {"overall": 1, …}, or itself."""
        if not isinstance(result, dict):
            return result
        names = ("score", "overall")[::-1 if self.kind.startswith("easyr1") else 1]
        name = next((name for name in names if name in result), None)
        if not name:
            raise TypeError(f"a dict needs {' or '.join(names)} (got {list(result)})")
        return result[name]

    def one_of_many(self, result) -> float | None | TypeError:
        if result is None and self.kind == "trl":
            return math.nan
        try:
            return number(self.score_of(result))
        except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
            return TypeError(f"{type(error).__name__}: {error}")


HOMES: dict[str, dict[str, ModuleType]] = {}  # folder: what was imported from it


@contextlib.contextmanager
def at_home(folder: str | None):
    """In it, imports look into `folder` first, as in `python FILE`. What they find there hides
    nothing elsewhere: folders may have an examples/, a data.py, or the same names."""
    if not folder:
        yield
        return
    names, others = beside(folder), taken(beside(folder))
    sys.modules |= HOMES.get(folder, {})
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        HOMES[folder] = taken(names)
        sys.modules |= others


@functools.cache
def beside(folder: str) -> set[str]:
    """The modules of a folder, unless it is the project's own."""
    if os.path.samefile(folder, ROOT):
        return set()
    names = {name.partition(".")[0] for name in os.listdir(folder)} - sys.stdlib_module_names
    specs = {name: importlib.machinery.PathFinder.find_spec(name, [folder]) for name in names}
    return {name for name, spec in specs.items() if spec and spec.origin}


def taken(names: set[str]) -> dict[str, ModuleType]:
    """These modules, out of sys.modules."""
    there = {name for name in names if name in sys.modules}
    found = [name for name in sys.modules if there and name.partition(".")[0] in there]
    return {name: sys.modules.pop(name) for name in found}


def load(path: Path) -> ModuleType:
    """A file of rewards, environments, tools or losses."""
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
    folder = part.path and str(Path(part.path).absolute().parent)
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
    if kind in ("verl", "verls"):
        truth = (row.get("reward_model") or {}).get("ground_truth", fields["answer"])
        source, extra = row.get("data_source"), row.get("extra_info")
        given = {"data_source": source, "extra_info": extra, "ground_truth": truth}
        return {**row, **given, "turns": fields["turns"], "solution_str": fields["completion"],
                "solution_strs": [item.completion for item in items]} | {
                    f"{name}s": [value] * len(items) for name, value in given.items()}
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
                    "log_extra": nothing, "log_metric": nothing}


def nothing(*_):
    """For TRL's log_extra and log_metric: they are not logged here."""


def number(value) -> float | None:
    """A finite number (also of numpy, torch, decimal or fractions) as a float, or None. Else a
    TypeError."""
    value = value.item() if hasattr(value, "item") else value
    if value is None:
        return None
    if not isinstance(value, Number) or isinstance(value, complex) or not math.isfinite(value):
        raise TypeError(f"a reward must return a finite number or None (got {str(value)[:100]!r}, "
                        f"a {type(value).__name__})")
    return float(value)
