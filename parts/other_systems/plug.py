"""Says what a flag of another system is called here, and which words of config.json have no effect
(README.md)."""
from parts.other_systems.in_training import sentence
from parts.other_systems.other_systems import theirs


def unknown(words):
    """(sentences, the other words) if some are flags of other systems."""
    found, rest = theirs(words)
    return (found, rest) if found else None


def begin(run):
    """Says what config.json asks for in training."""
    if said := sentence(run.inputs.source):
        run.log.say(said)
