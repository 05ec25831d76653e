"""part.py: how parts plug in: what a folder in parts/ may change, and the only code that asks it.

A part is a folder of parts/ with its code, its tests and its page. `rm -r parts/NAME` removes it
completely, because no other file names it. The file plug.py of a part defines some of the names in
PLACES, and the core asks all parts, in the alphabetical order of their names, by the function of
that name here: its docstring says what a part may define. Four names have no function here: what
parts define there is collected by `asked` or `merged`:

    Flags           a dataclass of flags (settings.Flags), which every Args inherits: a heading of
                    --help
    METRICS         {name of a metric that the part adds: its definition}
    REWARDS         {name of --reward: FILE.py}: the file has a function of that name
    ARCHITECTURES   {model_type: a subclass of architecture.Architecture that computes it}

A part imports the core and no other part. Where two parts cannot be used together, the rules of one
of them refuse it. If a run does not use a part, nothing of the part is executed but what its
plug.py defines under these names.
"""
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent
PLACES = {"Flags", "METRICS", "REWARDS", "ARCHITECTURES", "make_row", "model", "policy", "engine",
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


def merged(place: str) -> dict:
    """Returns the dictionaries that parts define at this place as one."""
    return {name: value for one in asked(place).values() for name, value in one.items()}


def ask(place: str, *given) -> list:
    """Calls the function that each part defines at this place with the arguments `given`, and
    returns a list of the results that are not None. place: a name of PLACES.
    """
    found = [function(*given) for function in asked(place).values()]
    return [one for one in found if one is not None]


# ---- the command line, before a run ----

def words(given: list[str]) -> list[str]:
    """words(words) of a part returns the words of the command line, as the part reads them."""
    for read in asked("words").values():
        given = read(given)
    return given


def unknown(given: list[str]) -> list[tuple[list[str], list[str]]]:
    """unknown(words) of a part returns (sentences about wrong words of the command line, the other
    words), or None.
    """
    return ask("unknown", given)


def sizes(plan) -> None:
    """sizes(plan) of a part changes the sizes of a step in a plan.Plan."""
    ask("sizes", plan)


def make_row(make, args, inputs, spec: str):
    """make_row(make, args, inputs, spec) of a part returns the function that makes a data.Row of a
    stored row: `make`, or a function that calls it. spec: --data or --eval_data. Each part wraps
    the function of the one before it.
    """
    for wrap in asked("make_row").values():
        make = wrap(make, args, inputs, spec)
    return make


def check_chat(messages: list, options: dict, tokenizer) -> None:
    """check_chat(messages, options, tokenizer) of a part raises a SettingsError if the chat
    template has no place for a part of a chat.
    """
    ask("check_chat", messages, options, tokenizer)


def check(args, inputs) -> list[str]:
    """check(args, inputs) of a part raises a SettingsError if model or rows do not fit, or returns
    a list of sentences about mistakes. It may set flags, and add to the notes and warnings of the
    preflight.Inputs. Returns the sentences of all parts.
    """
    return sum(ask("check", args, inputs), [])


# ---- classes ----

def extended(place: str, kind: type, *given) -> type:
    """Returns `kind`, or a subclass of it. At this place each part may return a class, which
    extends `kind` or a base class of `kind` and calls its methods by super(), so several parts may
    extend one class. The result inherits from these classes, in the order of the parts, and then
    from `kind`. None: the part has none for this run.
    """
    found = ask(place, kind, *given)
    return type(kind.__name__, (*found, kind), {}) if found else kind


def model(kind: type, args, config, trained: bool) -> type:
    """model(kind, args, config, trained) of a part returns the class of a model of log-probs or of
    values (model.py). trained: it is no reference model.
    """
    return extended("model", kind, args, config, trained)


def policy(kind: type, args, config, trained: bool) -> type:
    """policy(kind, args, config, trained) of a part returns the class of the policy or the critic,
    which holds a model.
    """
    return extended("policy", kind, args, config, trained)


def engine(kind: type, args, config, dtype) -> type:
    """engine(kind, args, config, dtype) of a part returns the class of the engine (rollout.py).
    dtype: of the computation.
    """
    return extended("engine", kind, args, config, dtype)


def pool(kind: type, args, waits: list[str]) -> type:
    """pool(kind, args, waits) of a part returns the class of the reward workers (rewards.py).
    waits: the names of rewards that are `async def`.
    """
    return extended("pool", kind, args, waits)


def memory(kind: type, args, shape) -> type:
    """memory(kind, args, shape) of a part returns the class that plans the memory (memory.py) of a
    model of this shape.
    """
    return extended("memory", kind, args, shape)


# ---- a run ----

def begin(run) -> None:
    """begin(run) of a part is called when models and engine are built."""
    ask("begin", run)


def ready(run) -> None:
    """ready(run) of a part is called when the models have the weights of the first step. The engine
    gets them in `generating`.
    """
    ask("ready", run)


def end(run) -> None:
    """end(run) of a part is called after the export."""
    ask("end", run)
