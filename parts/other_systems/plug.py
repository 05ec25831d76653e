"""Says what a flag of another system is called here (README.md)."""
import sys
from pathlib import Path

from parts.other_systems.other_systems import theirs


def unknown(words):
    """(sentences, the other words) if some are flags of other systems."""
    found, rest = theirs(words, Path(sys.argv[0]).name)
    return (found, rest) if found else None
