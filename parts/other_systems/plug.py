"""Says what a flag of another system is called here."""
from parts.other_systems.other_systems import theirs as unknown  # noqa: F401
