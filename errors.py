"""errors.py: mistakes in the settings, as sentences for the user."""
import os
import sys
from contextlib import contextmanager


class SettingsError(Exception):
    """A mistake in the settings, or in a file that they name. Its text is what the user reads."""
    status = 2  # the exit status of the run


@contextmanager
def as_sentence(start: str):
    """Turns an exception of a library, raised inside this context, into a SettingsError: `start`,
    and in brackets what the library said.
    """
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
        """Calls function(*args, **options) and returns its result. If it raises a SettingsError,
        the text is kept and the result is None.
        """
        try:
            return function(*args, **options)
        except SettingsError as error:
            self.append(str(error))

    def stop(self) -> None:
        """Raises one SettingsError with all texts that were kept. Without a text it does nothing.
        """
        if len(self) == 1:
            raise SettingsError(self[0])
        if self:
            lines = [f"{number}. {text}" for number, text in enumerate(self, 1)]
            raise SettingsError("\n  ".join([f"{len(self)} problems:", *lines]))


# ---- the output ----

def tell(text: str, stream=None) -> None:
    """Prints a line. If it cannot be written (a pipe that closed, as behind `| head`, a terminal
    that is gone, a full disk), this and all later output of the stream is dropped: the output never
    ends a run.
    """
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def command(main, *args) -> None:
    """Runs main(*args) of a tool and exits. A SettingsError is printed as its text alone. If the
    reader of the output left (`| head`), the exit status is that of SIGPIPE, 141.
    """
    try:
        status = main(*args)
        sys.stdout.flush()
    except SettingsError as error:
        status = f"error: {error}"
    except BrokenPipeError:
        os._exit(141)
    sys.exit(status)
