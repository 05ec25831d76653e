"""errors.py: settings errors, as sentences for the user.

The first half has the exception for a mistake of the user and two ways to raise it: `as_sentence`
for an exception of a library, and `Mistakes` for several mistakes at once. The second half is the
output of the programs: `tell` prints a line, and `command` runs a tool.
"""
import os
import sys
from contextlib import contextmanager


class SettingsError(Exception):
    """A mistake in the settings, or in a file that the settings name. The text of the exception is
    printed for the user as it is, without a traceback.
    """
    status = 2  # the exit status of the run


@contextmanager
def as_sentence(start: str):
    """Turns an exception that a library raises inside this context into a SettingsError. Its text
    is `start`, followed in brackets by the first 300 characters of the library's message. A
    SettingsError passes through unchanged.
    """
    try:
        yield
    except SettingsError:
        raise
    except Exception as error:  # libraries raise exceptions of many classes
        why = " ".join(str(error).split())[:300]
        raise SettingsError(f"{start} ({why}).") from None


class Mistakes(list):
    """A list of the texts of several SettingsErrors, which are raised together as one."""

    def attempt(self, function, *args, **options):
        """Calls function(*args, **options) and returns its result. If the function raises a
        SettingsError, its text is added to this list and None is returned.
        """
        try:
            return function(*args, **options)
        except SettingsError as error:
            self.append(str(error))

    def stop(self) -> None:
        """Raises one SettingsError with all texts of this list, numbered if there are several. It
        does nothing if the list is empty.
        """
        if len(self) == 1:
            raise SettingsError(self[0])
        if self:
            raise SettingsError(numbered(f"{len(self)} problems:", self))


def numbered(title: str, texts) -> str:
    """Returns the texts as a numbered list below a title."""
    return "\n  ".join([title, *(f"{number}. {text}" for number, text in enumerate(texts, 1))])


# ---- the output ----

def open_streams() -> None:
    """Opens standard input, output and errors as /dev/null where they are closed (`>&-`). Else the
    next file would get the number of one, and what is printed."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout, sys.stderr = (found or open(number, "w", closefd=False)
                              for number, found in ((1, sys.stdout), (2, sys.stderr)))


def tell(text: str, stream=None) -> None:
    """Prints a line to `stream`, by default to the standard output. If the line cannot be written,
    because a pipe was closed (as by `| head`), a terminal is gone or a disk is full, then this line
    and all later output of the stream is dropped. Output never ends a run.
    """
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def command(main, *args) -> None:
    """Runs main(*args) of a tool and exits the process with the status that it returns. A
    SettingsError is printed as only its text, and the status is 1. If the reader of the output has
    closed the pipe (`| head`), the exit status is 141, that of a process ended by SIGPIPE.
    """
    open_streams()
    try:
        status = main(*args)
        sys.stdout.flush()
    except SettingsError as error:
        status = f"error: {error}"
    except BrokenPipeError:
        os._exit(141)
    sys.exit(status)
