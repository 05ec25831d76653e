"""Says what is allowed, and is perhaps not meant (README.md)."""
from parts.hints import hints
from parts.hints.breaks import with_breaks as words  # noqa: F401


def warn(args, files, rows, scorer):
    """The sentences for a run."""
    return [*hints.of_run(args, files, rows, scorer)]
