"""Says what a flag of another system is called here (README.md)."""
from parts.other_systems.other_systems import theirs


def unknown(words):
    """(sentences, the other words) if some are flags of other systems."""
    found, rest = theirs(words)
    return (found, rest) if found else None
