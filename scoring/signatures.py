"""signatures.py: a function of ours, TRL or verl: found, called, its result checked.

The names of its parameters show whose it is. See docs/use/data_and_rewards.md.
"""
import importlib.util
import inspect
import math
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from scoring.replies import Environments, Move, messages
from scoring.verifiers import GUARDS, REWARDS

# A parameter of a reward shows its kind. The first that fits counts.
KINDS = {"completions": "trl", "solution_str": "verl", "completion": "ours", "turns": "ours"}


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

    def start(self, items: list[Item]):
        """What the function returns for one completion, or for all of TRL's group."""
        if self.kind == "environment":
            return self.function.play(*items)
        given = arguments(self.kind, items)
        if self.takes is not None:
            given = {name: value for name, value in given.items() if name in self.takes}
        return self.function(**given)

    def values(self, result, items: list[Item]) -> list:
        """A number for each item, or the messages of a reply. TypeError, ValueError: neither."""
        if self.kind == "environment":
            return [number(result) if items[0].over else result]
        if self.kind == "reply":
            return [messages(result)]
        if isinstance(result, dict) and self.kind == "verl":
            result = result["score"]
        results = list(result) if self.kind == "trl" else [result]
        if len(results) != len(items):
            raise ValueError(f"{len(results)} values for {len(items)} completions")
        return [number(value) for value in results]


def find(part: Part):
    """The function of a --reward or --reply. None: the file has none of this name."""
    if part.path:
        path = Path(part.path).absolute()
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, part.name, None)
    if part.name in GUARDS:
        pkgutil.resolve_name(GUARDS[part.name])()
    return pkgutil.resolve_name(REWARDS[part.name])


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
    return Reward(kind, function, None if any_name else list(named), needs, waits)


def arguments(kind: str, items: list[Item | Move]) -> dict:
    """All that a reward of this kind may take. Only TRL's has more than one item."""
    if kind == "reply":
        return items[0].row | {"row": items[0].row, "turns": items[0].turns}
    items = [item._replace(turns=item.turns or [{"role": "assistant", "content": item.completion}])
             for item in items]
    if kind == "trl":
        return as_lists(items)
    fields = items[0]._asdict()
    row = fields.pop("row")
    if kind == "verl":
        truth = (row.get("reward_model") or {}).get("ground_truth", fields["answer"])
        return {"data_source": None, "extra_info": None, **row, "turns": fields["turns"],
                "solution_str": fields["completion"], "ground_truth": truth}
    return row | fields


def as_lists(items: list[Item]) -> dict:
    """A list for each column of the rows and for each field of the items."""
    row = items[0].row
    given = {name: [item.row.get(name) for item in items] for name in row}
    given |= {name: [getattr(item, name) for item in items] for name in Item._fields}
    del given["row"]
    prompts, completions = given["prompt"], given["completion"]
    if isinstance(row.get("prompt"), list):  # TRL's conversational form
        prompts, completions = [item.row["prompt"] for item in items], given["turns"]
    return given | {"prompts": prompts, "completions": completions}


def number(value) -> float | None:
    """A finite number (also of numpy or torch) as a float, or None. Else a TypeError."""
    value = value.item() if hasattr(value, "item") else value
    if value is None:
        return None
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError(f"a reward must return a finite number or None (got {str(value)[:100]!r}, "
                        f"a {type(value).__name__})")
    return float(value)
