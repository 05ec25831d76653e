"""TensorBoard, trackio, Weights & Biases, or a logger of your own (README.md)."""
from itertools import pairwise

from parts.loggers.loggers import LogArgs as Flags  # noqa: F401
from parts.loggers.loggers import begin  # noqa: F401


def words(given):
    """--wandb without a project is --wandb samestep."""
    found = []
    for word, after in pairwise([*given, "--"]):
        found += [word, "samestep"] if word == "--wandb" and after.startswith("--") else [word]
    return found
