"""Says what is allowed, and is perhaps not meant (README.md)."""
from parts.hints import hints
from parts.hints.breaks import with_breaks as words  # noqa: F401


def check(args, inputs):
    """Adds the sentences for a run to its warnings."""
    inputs.warnings |= dict.fromkeys(hints.of_run(args, inputs), "")
