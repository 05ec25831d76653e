"""errors.py: mistakes in the settings, and the numbers that a flag may have (`batch: Count`)."""
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Annotated, get_args, get_type_hints

INF = float("inf")


class SettingsError(Exception):
    """A mistake in the settings or in a file that they name. The text is what the user reads."""
    status = 2  # the exit status of the run


@contextmanager
def as_sentence(start: str):
    """What a library raises inside becomes a SettingsError: `start`, and what it said."""
    try:
        yield
    except SettingsError:
        raise
    except Exception as error:  # a library has many kinds
        why = " ".join(str(error).split())[:300]
        raise SettingsError(f"{start} ({why}).") from None


class Mistakes(list):
    """The texts of several SettingsErrors, to raise as one."""

    def attempt(self, function, *args, **options):
        """function(*args, **options) → its result. None, and one more text, if it has a mistake."""
        try:
            return function(*args, **options)
        except SettingsError as error:
            self.append(str(error))

    def stop(self) -> None:
        """SettingsError with all texts, if there is one."""
        if len(self) == 1:
            raise SettingsError(self[0])
        if self:
            lines = [f"{number}. {text}" for number, text in enumerate(self, 1)]
            raise SettingsError("\n  ".join([f"{len(self)} problems:", *lines]))


# ---- the output ----

def tell(text: str, stream=None) -> None:
    """Prints a line. Where it cannot be written (`| head`, a terminal that closed, a full disk
    behind it), this and all later output of the stream is dropped: it ends no run."""
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def command(main, *args) -> None:
    """Runs main(*args) of a tool, then exits. A SettingsError is its text alone. If the reader of
    the output left (`| head`), the status is that of SIGPIPE, 141."""
    try:
        status = main(*args)
        sys.stdout.flush()
    except SettingsError as error:
        status = f"error: {error}"
    except BrokenPipeError:
        os._exit(141)
    sys.exit(status)


# ---- the range of a flag stands in its type ----

@dataclass(frozen=True)
class Range:
    """Finite numbers from `least` to `most`."""
    least: float = 0
    most: float = INF
    above: bool = False  # `least` itself is too small

    def has(self, x: float) -> bool:
        """nan and infinity are in no range."""
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


def ranges(flags) -> dict[str, Range]:
    """{flag: its range} of a dataclass of flags. A number without a range is at least 0. A class
    that gives another default keeps the range of the class above."""
    found = {field.name: Range() for field in fields(flags)}
    for kind in reversed(type(flags).__mro__):
        hints = get_type_hints(kind, include_extras=True)
        for name in found.keys() & hints.keys():
            for part in (hints[name], *get_args(hints[name])):
                ours = [x for x in getattr(part, "__metadata__", ()) if isinstance(x, Range)]
                found[name] = ours[0] if ours else found[name]
    return found


def outside(flags) -> dict[str, str]:
    """{flag: a sentence} of those whose value is empty or not in its range. None always is."""
    found = {}
    for name, allowed in ranges(flags).items():
        value = getattr(flags, name)
        parts = value if isinstance(value, tuple) else (value,)
        if not all(allowed.has(x) for x in parts if isinstance(x, int | float)):
            found[name] = f"--{name} must be {allowed} (got {value})."
        if "" in parts and name != "system":  # a template may have a system message of its own
            found[name] = f"--{name} must not be empty (got {value!r})."
    return found


def needed(flags, values: dict[str, object]) -> list[str]:
    """A sentence for each flag that does nothing, because the one that its dataclass names as
    `switch` is off. values: of all flags."""
    switch = getattr(flags, "switch", None)
    if switch is None or values[switch]:
        return []
    return [f"--{name} needs --{switch}." for name in not_default(flags) if name != switch]


def not_default(flags) -> list[str]:
    """The flags of a dataclass that do not have their default."""
    default = type(flags)()
    return [field.name for field in fields(flags)
            if getattr(flags, field.name) != getattr(default, field.name)]
