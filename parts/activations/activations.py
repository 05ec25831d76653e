"""activations.py: what --checkpointing keeps for the backward pass waits on the host.

With --checkpointing the input of each layer is kept from the forward pass until the layer is
computed again: S x H numbers for each of L layers. Here they are copied to the host and come back
one by one, with torch's `save_on_cpu`.
"""
from dataclasses import dataclass

import torch
from torch.autograd.graph import save_on_cpu

from memory import Memory
from model import Model
from settings import Flags


@dataclass
class ActivationArgs(Flags):
    """Activations on the host"""
    activation_offload: bool = False
    """Keep the inputs of the layers on the host until the backward pass. Needs --checkpointing."""

    def rules(self, plan):
        """Yields a sentence for each broken rule (settings.Flags)."""
        if self.activation_offload and not plan.args.checkpointing:
            yield "--activation_offload needs --checkpointing: without it every tensor is kept."


class HostModel(Model):
    """A model whose layers' inputs are kept on the host."""

    def states(self, inputs):
        """See Model."""
        if not torch.is_grad_enabled():
            return super().states(inputs)
        with save_on_cpu(pin_memory=inputs["input_ids"].is_cuda):
            return super().states(inputs)


class HostMemory(Memory):
    """Without the inputs of all layers but one."""

    def of_token(self, shape, phase, update):
        """See Memory."""
        kept, work = super().of_token(shape, phase, update)
        return kept - update * (shape.layers - 1) * self.c * shape.hidden, work
