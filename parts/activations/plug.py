"""What --checkpointing keeps, on the host (README.md)."""
import torch

from parts.activations import activations
from parts.activations.activations import ActivationArgs as Flags  # noqa: F401


def model(kind, args, config, trained):
    return activations.HostModel if args.activation_offload and trained else None


def memory(kind, args, shape):
    on_gpu = torch.cuda.is_available() or args.plan  # without a GPU there is one memory
    return activations.HostMemory if args.activation_offload and on_gpu else None
