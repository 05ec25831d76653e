"""errors.py: mistakes in the settings, as sentences for the user."""
import os
import sys
from contextlib import contextmanager


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
