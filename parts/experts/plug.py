"""Mixtures of experts (README.md)."""
import torch

from errors import SettingsError
from model import Policy
from parts.experts import experts
from parts.experts.experts import ExpertArgs as Flags  # noqa: F401

METRICS = {
    "router/largest_mean": "the largest share of an expert in a layer, mean over the layers",
    "router/largest_worst": "the largest share of an expert in any layer",
    "router/entropy_mean": "entropy of the shares / log E, mean over the layers; 1 is even",
    "router/entropy_worst": "the smallest such entropy of a layer"}

ARCHITECTURES = dict.fromkeys(experts.NAMES, experts.Mixture)


def policy(kind, args, config, trained):
    return experts.RoutedPolicy if kind is Policy and config.model_type in ARCHITECTURES else None


def engine(kind, args, config, dtype):
    return experts.MixtureEngine if config.model_type in ARCHITECTURES else None


def check(args, inputs):
    """SettingsError: vLLM needs a GPU for this."""
    if torch.cuda.is_available() or args.plan or (
            inputs.lm.config.model_type not in ARCHITECTURES):
        return
    flags = vars(args)
    if flags["replay_routing"]:
        raise SettingsError(
            "--replay_routing needs a GPU: elsewhere vLLM does not tell its experts.")
    adapter = flags.get("lora_sync") == "adapter" or (
        flags.get("lora_sync") == "auto" and flags["dtype"] == "bfloat16")
    if args.needs_engine and flags.get("lora_rank") and adapter:
        raise SettingsError("--lora_sync adapter needs a GPU for a model with experts. Would work: "
                            "--lora_sync merged.")


def memory(kind, args, shape):
    return experts.MixtureMemory if isinstance(shape, experts.MixtureShape) else None
