"""errors.py: mistakes in the settings, collected so that one message can name all of them."""


class SettingsError(Exception):
    """A mistake in the settings or in a file that they name. The text is what the user reads.

    alone: only this rank found it, so this rank prints it. Otherwise rank 0 prints it.
    """
    alone = False


class Mistakes(list):
    """The texts of several SettingsErrors, to raise as one."""

    def attempt(self, function, *args, **options):
        """function(*args, **options) → its result. None, and one more text, if it has a mistake."""
        try:
            return function(*args, **options)
        except SettingsError as error:
            self.append(str(error))
            return None

    def stop(self) -> None:
        """SettingsError with all texts, numbered. Nothing if there is none."""
        if len(self) == 1:
            raise SettingsError(self[0])
        if self:
            lines = [f"{number}. {text}" for number, text in enumerate(self, 1)]
            raise SettingsError("\n  ".join([f"{len(self)} problems:", *lines]))
