"""TensorBoard, trackio, Weights & Biases, or a logger of your own (README.md)."""
from parts.loggers.loggers import LogArgs as Flags  # noqa: F401
from parts.loggers.loggers import begin  # noqa: F401
