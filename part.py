"""part.py: how parts plug in: what a folder in parts/ may change, and the only code that asks it.

A part is a folder of parts/ with its code, its tests and its page. `rm -r parts/NAME` removes it
completely, because no other file names it. The file plug.py of a part defines some of the names in
PLACES. The core looks up each of these names once, during set-up, for all parts in the alphabetical
order of their names:

    Flags                       a dataclass (flags.Flags): a heading of --help. The values are
                                args.parts.NAME; its `rules` and `fixed` work as in any Flags
    METRICS                     {name of a metric that the part adds: its definition}
    REWARDS                     {name of --reward: FILE.py}: the file has a function of that name
    FAMILIES                    {model_type: a subclass of family.Family that computes it}
    make_row(make, args, ...)   returns the function that makes a data.Row of a stored row: `make`,
                                or a function that calls it
    model(kind, args, config, trained)      returns the class of a model of log-probs or of values
                                            (model.py)
    policy(kind, args, config, trained)     returns the class of the policy or the critic, which
                                            holds a model. trained: it is no reference model
    engine(kind, args, config, dtype)       returns the class of the engine (rollout.py). dtype: of
                                the computation
    pool(kind, args, waits)     returns the class of the reward workers (rewards.py)
    memory(kind, args, shape)   returns the class that plans the memory (plan.py) of a model of
                                this shape
    sizes(plan)                 changes the sizes of a step
    check_chat(messages, options, tokenizer)    raises a SettingsError if the chat template has no
                                place for a part of a chat
    check(args, inputs)         raises a SettingsError if model or rows do not fit, or returns a
                                list of sentences about mistakes. It may set flags, and add to the
                                notes and warnings of the inputs.Inputs
    begin(run), ready(run), end(run)    are called when models and engine are built, when they have
                                the weights of the first step, and after the export
    words(words)                returns the words of the command line, as the part reads them
    unknown(words)              returns (sentences about wrong words of the command line, the
                                other words)

Where a function returns a class, None means the core's own. A class extends the core's class of
that place and calls its methods by super(), so several parts may extend one class. A part imports
the core and no other part. Where two parts cannot be used together, the rules of one of them refuse
it. If a run does not use a part, nothing of the part is executed but what its plug.py defines under
these names.
"""
from dataclasses import field, make_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from settings import Flags

ROOT = Path(__file__).parent
PLACES = {"Flags", "METRICS", "REWARDS", "FAMILIES", "make_row", "model", "policy", "engine",
          "pool", "memory", "sizes", "check_chat", "check", "begin", "ready", "end", "words",
          "unknown"}


@cache
def parts() -> dict[str, ModuleType]:
    """Imports the plug.py of each folder of parts/ that has one, and returns {name of the part:
    module}.
    """
    names = sorted(path.parent.name for path in ROOT.glob("parts/*/plug.py"))
    return {name: import_module(f"parts.{name}.plug") for name in names}


def asked(place: str) -> dict[str, object]:
    """Returns {name of a part: its definition of `place`}, for the parts that define it. place: a
    name of PLACES.
    """
    assert place in PLACES, place
    return {name: vars(module)[place] for name, module in parts().items() if place in vars(module)}


def flags() -> type:
    """Returns a dataclass with one field for each part that defines Flags. The field is named after
    the part.
    """
    fields = [(name, kind, field(default_factory=kind)) for name, kind in asked("Flags").items()]
    return make_dataclass("PartArgs", fields, bases=(Flags,),
                          namespace={"__doc__": "What parts add."})


def ask(place: str, *given) -> list:
    """Calls the function that each part defines at this place with the arguments `given`, and
    returns a list of the results that are not None. place: a name of PLACES.
    """
    found = [function(*given) for function in asked(place).values()]
    return [one for one in found if one is not None]


def extended(place: str, kind: type, *given) -> type:
    """Returns `kind`, or a subclass of it. At this place each part may return a class, which
    extends `kind` or a base class of `kind`. The result inherits from these classes, in the order
    of the parts, and then from `kind`.
    """
    found = ask(place, kind, *given)
    return type(kind.__name__, (*found, kind), {}) if found else kind


def wrapped(place: str, function, *given):
    """Returns `function` after each part has wrapped it: the function that a part defines at this
    place is called with the function so far and the arguments `given`, and its result goes to the
    next part.
    """
    for wrap in asked(place).values():
        function = wrap(function, *given)
    return function
