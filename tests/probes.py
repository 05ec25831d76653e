"""A policy that keeps the gradient of each update."""
import torch

import grpo
import model
import test_packing
from fakes import World


class Spy(model.Policy):
    """A random Qwen2 of three layers or fewer in float64 that keeps its gradients."""

    def __init__(self, noise: float = 0.0, layers: int = 3):
        lm = test_packing.small()
        del lm.model.layers[layers:]
        with torch.no_grad():
            for p in lm.parameters():
                p *= 1 + noise * torch.randn_like(p)
        module, self.gradients = model.LogprobModel(lm, grpo.Args()), []
        lm.set_attn_implementation("packed")
        module.reshard = lambda: None  # it is not sharded
        super().__init__(module, World(), grpo.Args())

    def step(self, lr):
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.module.parameters()]))
        return super().step(lr)
