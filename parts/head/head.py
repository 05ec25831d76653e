"""head.py: the head's product in float32, in the trainer and in the engine.

With --dtype bfloat16 the logits are a sum of H products, rounded to 8 bits: the last and largest
rounding between a hidden state and a log-prob. Here the sum is in float32; the weights keep the
values of --dtype. https://arxiv.org/abs/2506.13585, section 3.2
"""
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn
from torch.nn.functional import linear

from memory import Memory
from model import Model
from rollout import Engine
from settings import Flags


@dataclass
class HeadArgs(Flags):
    """The head"""
    head_dtype: Literal["model", "float32"] = "model"
    """Compute the logits in --dtype, or in float32 in both trainer and engine: a smaller gap with
    bfloat16, for more memory."""
    fixed: ClassVar[tuple[str, ...]] = ("head_dtype",)


class Float32Linear(nn.Linear):
    """A linear layer that computes in at least float32, whatever the dtype of its weights."""

    def forward(self, x):
        """x (n, in_features) → (n, out_features)."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        return linear(x.to(dtype), self.weight.to(dtype), bias)


class Float32Head(Model):
    """A model of log-probs with such a head, in transformers' own forward too."""

    def __init__(self, lm, args):
        super().__init__(lm, args)
        lm.lm_head.__class__ = Float32Linear


class Float32HeadEngine(Engine):
    """An engine with such a head."""

    def options(self, max_len):
        """See Engine."""
        return super().options(max_len) | {"hf_overrides": {"head_dtype": "float32"}}


class Float32HeadMemory(Memory):
    """The float32 copy of the head's weights, and in an update that of their gradient."""

    def micro_batch(self, phase):
        """See Memory."""
        layers, logits = super().micro_batch(phase)
        if not logits or self.c > 2:  # a critic, or a head that is in float32 already
            return layers, logits
        copies = 2 if phase.name.endswith("update") else 1
        return layers, logits + copies * 4 * self.shape.vocab * self.shape.hidden
