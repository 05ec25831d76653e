"""LoRA: adapters are trained beside frozen weights (README.md)."""
import torch

from model import Policy
from parts.lora import lora
from parts.lora.lora import LoraArgs as Flags  # noqa: F401


def is_on(args) -> bool:
    """Whether this run trains adapters."""
    return args.lora_rank > 0


def model(kind, args, config, trained):
    return lora.AdaptedModel if is_on(args) and trained else None


def policy(kind, args, config, trained):
    return lora.AdaptedPolicy if is_on(args) and trained and kind is Policy else None


def memory(kind, args, shape):
    return lora.AdaptedMemory if is_on(args) else None


def engine(kind, args, config, dtype):
    if is_on(args) and lora.in_engine(args, dtype == torch.bfloat16):
        return lora.TakingEngine


def check(args, inputs):
    """A rate that is not given: ten times full training's, https://thinkingmachines.ai/blog/lora.
    """
    if is_on(args):
        args.choose_rates(inputs.shape.params, factor=10)


def end(run):
    if is_on(run.args) and run.args.export:
        lora.export(run)
