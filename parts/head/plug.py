"""The head's product in float32 (README.md)."""
from model import LogprobModel
from parts.head import head
from parts.head.head import HeadArgs as Flags  # noqa: F401


def is_on(args) -> bool:
    """Whether the head computes in float32."""
    return args.head_dtype == "float32"


def model(kind, args, config, trained):
    return head.Float32Head if is_on(args) and issubclass(kind, LogprobModel) else None


def engine(kind, args, config, dtype):
    return head.Float32HeadEngine if is_on(args) else None


def memory(kind, args, shape):
    return head.Float32HeadMemory if is_on(args) else None
