"""errors.py: mistakes in the settings, as sentences for the user."""
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
