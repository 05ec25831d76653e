"""Tries one worst micro-batch of each phase before the first step."""
from parts.trial.trial import TrialArgs as Flags  # noqa: F401
from parts.trial.trial import try_worst_case as begin  # noqa: F401
