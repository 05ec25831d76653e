"""settings.py: what a flag is: its range, the rules of several, and all flags by name.

Each component has its flags in a dataclass of its own, a `Flags`, beside the code that reads them.
A script's Args holds them in fields, so `args.engine_args.tp` is --tp.
"""
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated, ClassVar, get_args, get_type_hints

INF = float("inf")


@dataclass(frozen=True)
class Range:
    """The range of a flag, which stands in its type: finite numbers from `least` to `most`."""
    least: float = 0
    most: float = INF
    above: bool = False  # `least` itself is too small

    def has(self, x: float) -> bool:
        """Returns whether x is in the range. nan and infinity are in none."""
        enough = x > self.least if self.above else x >= self.least
        return enough and x <= self.most and abs(x) < INF

    def __str__(self) -> str:
        if self.least == -INF:
            return "a number"
        words = f"more than {self.least:,}" if self.above else f"at least {self.least:,}"
        return words if self.most == INF else f"{words} and at most {self.most:,}"


Count = Annotated[int, Range(1)]
Positive = Annotated[float, Range(0, above=True)]
Number = Annotated[float, Range(-INF)]


@dataclass
class Flags:
    """The flags of a component: a dataclass of this kind stands in the file that reads them."""
    switch: ClassVar[str | None] = None  # the flag of these without which the others do nothing
    fixed: ClassVar[tuple[str, ...]] = ()  # those with which a resumed run would be another run

    def rules(self, plan):
        """Yields a sentence for each rule of several flags that these settings break. plan:
        plan.Plan, whose `args` has the flags of all components.
        """
        yield from ()


# ---- the flags of one dataclass

def ranges(group) -> dict[str, Range]:
    """Returns {flag: Range} of a dataclass of flags. A number without a range in its type is at
    least 0. A subclass that gives a flag another default keeps the range of the class above.
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
    """Returns {flag: sentence} of the flags whose value is empty or not in its range. None is
    allowed for each.
    """
    found = {}
    for name, allowed in ranges(group).items():
        value = getattr(group, name)
        parts = value if isinstance(value, tuple) else (value,)
        if not all(allowed.has(x) for x in parts if isinstance(x, int | float)):
            found[name] = f"--{name} must be {allowed} (got {value})."
        if "" in parts and name != "system":  # a template may have a system message of its own
            found[name] = f"--{name} must not be empty (got {value!r})."
    return found


def needed(group: Flags, values: dict[str, object]) -> list[str]:
    """Returns a sentence for each flag that was given and does nothing, because the `switch` of its
    dataclass is off. values: of all flags, by name.
    """
    if group.switch is None or values[group.switch]:
        return []
    return [f"--{name} needs --{group.switch}." for name in not_default(group)
            if name != group.switch]


def not_default(group) -> list[str]:
    """Returns the names of the flags of a dataclass that do not have their default."""
    default = type(group)()
    return [field.name for field in fields(group)
            if getattr(group, field.name) != getattr(default, field.name)]


# ---- the flags of a script

def groups(args) -> list[Flags]:
    """Returns all dataclasses of flags of a script: args, and those in it, at any depth."""
    return [args, *(group for value in vars(args).values() if is_dataclass(value)
                    for group in groups(value))]


def values_of(args) -> dict[str, object]:
    """Returns {flag: value} of all dataclasses of flags in args."""
    return {name: value for group in groups(args) for name, value in vars(group).items()
            if not is_dataclass(value)}


def changed(args, **values):
    """Returns a copy of args in which these flags have other values, wherever they live. Raises a
    TypeError if one of them is no flag of args.
    """
    if unknown := values.keys() - values_of(args).keys():
        raise TypeError(f"there is no flag {', '.join(unknown)}")
    mine = {name: value for name, value in values.items() if name in vars(args)}
    for name, group in vars(args).items():
        inside = values.keys() & values_of(group).keys() if is_dataclass(group) else ()
        if inside:
            mine[name] = changed(group, **{flag: values[flag] for flag in inside})
    return replace(args, **mine)


def restored(args, kept: dict):
    """Returns a copy of args with the flags that `kept` has, as args.json and state.json keep them.
    What `kept` has beside flags is left out.
    """
    names = values_of(args).keys() & kept.keys()
    return changed(args, **{name: tuple(kept[name]) if isinstance(kept[name], list) else kept[name]
                            for name in names})


def save_every(args) -> int:
    """Returns the number of steps between two checkpoints: --save_every, or a tenth of --steps. 0:
    there are none.
    """
    given = args.run_args.save_every
    if args.eval_args.eval_only:
        return 0
    return -(-args.steps // 10) if given is None else given
