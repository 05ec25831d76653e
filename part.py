"""part.py: parts plug in: what a folder of parts/ may change, and the one place that asks it.

A part is a folder of parts/ with its code, its tests and its page. `rm -r parts/NAME` removes it,
whole: nothing else names it. Its plug.py has some of the names in PLACES. The core asks for
each of them once, in set-up, and for all parts in the order of their names:

    Flags                       a dataclass (flags.Flags): a heading of --help. The values are
                                args.parts.NAME; its `rules` and `fixed` are those of any flags
    REWARDS                     {name of --reward: FILE.py}: the file has a function of that name
    FAMILIES                    {model_type: the class of what it brings} (family.Family)
    make_row(make, args, ...)   how a stored row becomes a data.Row: `make`, or what wraps it
    model(kind, args, config, trained)      the class of a model: of log-probs, of values (model.py)
    policy(kind, args, config, trained)     the class of what has the model: a policy, the critic.
                                            trained: it is no reference model
    engine(kind, run)           the class of the engine (rollout.py)
    pool(kind, args, waits)     the class of the reward workers (rewards.py)
    memory(kind, args, shape)   the class that plans the memory (plan.py) of a model of this shape
    sizes(plan)                 changes the sizes of a step
    check(args, files, rows)    SettingsError: files or rows do not fit its flags. It may set flags
    begin(run), end(run)        before the first step, and after the export
    unknown(words)              (sentences about wrong words of the command line, the others)

A class extends the core's class of that place and calls its methods by super(), so several parts
may extend one. A part imports the core, and no other part; the rules of one of them say which do
not go together. A run that uses no part enters no line of it but these names.
"""
from dataclasses import field, make_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from settings import Flags

ROOT = Path(__file__).parent
PLACES = {"Flags", "REWARDS", "FAMILIES", "make_row", "model", "policy", "engine", "pool",
          "memory", "sizes", "check", "begin", "end", "unknown"}


@cache
def parts() -> dict[str, ModuleType]:
    """{name: module} of the folders of parts/ that have a plug.py."""
    names = sorted(path.parent.name for path in ROOT.glob("parts/*/plug.py"))
    return {name: import_module(f"parts.{name}.plug") for name in names}


def asked(place: str) -> dict[str, object]:
    """{name of a part: what it has at this place}, of the parts that have it."""
    assert place in PLACES, place
    return {name: vars(module)[place] for name, module in parts().items() if place in vars(module)}


def flags() -> type:
    """A dataclass with a field for the Flags of each part that has some."""
    fields = [(name, kind, field(default_factory=kind)) for name, kind in asked("Flags").items()]
    return make_dataclass("PartArgs", fields, bases=(Flags,),
                          namespace={"__doc__": "What parts add."})


def ask(place: str, *given) -> list:
    """What the functions at this place return, without None."""
    found = [function(*given) for function in asked(place).values()]
    return [one for one in found if one is not None]


def extended(place: str, kind: type, *given) -> type:
    """`kind`, or a class of it and of the classes that parts have for it at this place. Each of
    these extends `kind`, or a class of which `kind` is one."""
    found = ask(place, kind, *given)
    return type(kind.__name__, (*found, kind), {}) if found else kind


def wrapped(place: str, function, *given):
    """`function`, or what the functions at this place make of it, one after another."""
    for wrap in asked(place).values():
        function = wrap(function, *given)
    return function
