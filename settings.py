"""settings.py: what a flag is: its range, rules over several flags, and all flags by name.

Each component has its flags in a dataclass of its own, a subclass of `Flags`, in the file that
reads them. The Args of a script inherits from all of these dataclasses, so `args.tp` is the value
of --tp.

The file has three sections: the range of a number, in the type of its field; functions of one
dataclass of flags; and functions of all flags of a script.
"""
from dataclasses import dataclass, fields, replace
from typing import Annotated, ClassVar, get_args, get_type_hints

INF = float("inf")

# Flags that earlier releases called otherwise: args.json and state.json of their runs are read.
RENAMED = {"score_tokens": "logprob_tokens", "critic_score_tokens": "critic_value_tokens"}


@dataclass(frozen=True)
class Range:
    """The range of a flag, written in the flag's type: the finite numbers from `least` to `most`.
    """
    least: float = 0
    most: float = INF
    above: bool = False  # True: `least` itself is not allowed

    def has(self, x: float) -> bool:
        """Returns whether x is in the range. nan and infinity are in no range."""
        enough = x > self.least if self.above else x >= self.least
        return enough and x <= self.most and abs(x) < INF

    def __str__(self) -> str:
        """Returns the range in words, for a message: "at least 1 and at most 8"."""
        if self.least == -INF:
            return "a number"
        words = f"more than {self.least:,}" if self.above else f"at least {self.least:,}"
        return words if self.most == INF else f"{words} and at most {self.most:,}"


Count = Annotated[int, Range(1)]
Positive = Annotated[float, Range(0, above=True)]
Number = Annotated[float, Range(-INF)]


@dataclass
class Flags:
    """The base class of the dataclasses of flags. Each component defines one, in the file that
    reads these flags.
    """
    # The name of the flag of this class without which its other flags have no effect.
    switch: ClassVar[str | None] = None
    # The names of the flags that a resumed run must not change: it would be another run.
    fixed: ClassVar[tuple[str, ...]] = ()

    def rules(self, plan):
        """Yields a sentence for each rule about several flags that these settings break. plan: the
        plan.Plan of the run, whose `args` has the flags of all components.
        """
        yield from ()


# ---- the flags of one dataclass

def ranges(group) -> dict[str, Range]:
    """Returns {flag: Range} for the fields of a dataclass of flags. A number whose type has no
    Range must be at least 0. A subclass that gives a flag another default keeps the range of its
    base class.
    """
    found = {field.name: Range() for field in fields(group)}
    for kind in reversed(type(group).__mro__):
        hints = get_type_hints(kind, include_extras=True)
        for name in found.keys() & hints.keys():
            for part in (hints[name], *get_args(hints[name])):
                ours = [x for x in getattr(part, "__metadata__", ()) if isinstance(x, Range)]
                found[name] = ours[0] if ours else found[name]
    return found


def outside(group) -> dict[str, str]:
    """Returns {flag: sentence} for the flags of a dataclass whose value is not in its range, or is
    "" (only --system may be ""). Of a tuple each element is checked, and an empty tuple is allowed.
    None is allowed for every flag.
    """
    found = {}
    for name, allowed in ranges(group).items():
        value = getattr(group, name)
        parts = value if isinstance(value, tuple) else (value,)
        if not all(allowed.has(x) for x in parts if isinstance(x, int | float)):
            found[name] = f"--{name} must be {allowed} (got {value})."
        if "" in parts and name != "system":  # "" replaces a template's own
            found[name] = f"--{name} must not be empty (got {value!r})."
    return found


def needed(group: Flags, args) -> list[str]:
    """Returns a sentence for each flag of `group` that was given but has no effect, because the
    flag named by `switch` is not set. The list is empty if there is no `switch` or it is set.
    args: all flags of the script.
    """
    if group.switch is None or getattr(args, group.switch):
        return []
    return [f"--{name} needs --{group.switch}." for name in not_default(group)
            if name != group.switch]


def not_default(group) -> list[str]:
    """Returns the names of the flags of a dataclass whose values differ from their defaults."""
    default = type(group)()
    return [field.name for field in fields(group)
            if getattr(group, field.name) != getattr(default, field.name)]


# ---- the flags of a script

def sections(args) -> list[Flags]:
    """Returns the flags of each component that args inherits, as an instance of its dataclass, in
    the order of --help. The flags of the script itself are in none of them.
    """
    kinds = [kind for kind in type(args).__mro__ if Flags in kind.__bases__]
    return [kind(**{field.name: getattr(args, field.name) for field in fields(kind)})
            for kind in kinds]


def lists_of(args) -> list[str]:
    """Returns the names of the flags of args that take any number of values."""
    return [field.name for field in fields(args) if "..." in str(field.type)]


def restored(args, kept: dict):
    """Returns a copy of args with the values of `kept`, which was read from args.json or state.json
    of an earlier run. Keys of `kept` that are not flags are ignored. JSON has no tuples, so its
    lists become tuples.
    """
    return replace(args, **{name: tuple(kept[name]) if isinstance(kept[name], list) else kept[name]
                            for name in vars(args).keys() & kept.keys()})


def renamed(kept: dict) -> dict:
    """Returns args.json or state.json of an earlier run with today's names of flags."""
    return {RENAMED.get(name, name): value for name, value in kept.items()}


def save_every(args) -> int:
    """Returns the number of steps between two checkpoints: the value of --save_every, or by default
    a tenth of --steps, rounded up. 0 means that no checkpoint is written, as with --eval_only.
    """
    given = args.save_every
    if args.eval_only:
        return 0
    return -(-args.steps // 10) if given is None else given
