"""Qwen3.5: layers that keep a state (README.md)."""
import torch

from errors import SettingsError
from parts.states.states import Stateful, StateMemory, StateShape

ARCHITECTURES = {"qwen3_5_text": Stateful}


def check(args, inputs):
    """SettingsError: vLLM needs a GPU for this."""
    kind = inputs.lm.config.model_type
    if kind in ARCHITECTURES and args.needs_engine and not (
            torch.cuda.is_available() or args.plan):
        raise SettingsError(
            f"--model {args.model}: on a CPU vLLM computes a {kind} in bfloat16 alone, and not "
            "with its prefix cache. Would work: a GPU, or sft.py.")


def memory(kind, args, shape):
    return StateMemory if isinstance(shape, StateShape) else None
