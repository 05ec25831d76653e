"""lora.py: a layer's weights W stay, and a small product beside them is trained.

    y = W x + alpha / rank · B (A x)    A (rank, in), B (out, rank)    arxiv.org/abs/2106.09685
"""
import random
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.nn import functional as F

from errors import Positive
from parts.pictures.seeing import text_of

LORA_RANKS = 0, 1, 8, 16, 32, 64, 128, 256, 320, 512  # of the adapters that vLLM has room for


@dataclass
class LoraArgs:
    """LoRA (docs/use/memory_and_machines.md)."""
    lora_rank: int = 0
    """Train adapters of this rank and nothing else (and the critic's head). 0: all weights."""
    lora_alpha: Positive | None = None
    """What it adds is scaled by alpha / rank. Not given: 2 x rank."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Layers with an adapter, by their last names: q_proj v_proj. all-linear: all but the head."""
    lora_sync: Literal["auto", "adapter", "merged"] = "auto"
    """What the engine gets: adapter, or merged weights, which bfloat16 rounds. auto: adapter in
    bfloat16, else merged."""
    switch: ClassVar[str] = "lora_rank"

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return 2.0 if self.lora_alpha is None else self.lora_alpha / self.lora_rank

    def rules(self, plan):
        """See plan.problems."""
        shape, most = plan.shape, LORA_RANKS[-1]
        if not self.lora_rank:
            return
        if self.lora_rank > most and self.lora_sync != "merged":
            yield (f"--lora_rank must be at most {most} (got {self.lora_rank}): vLLM takes no "
                   "larger adapter. Would work: --lora_sync merged, which needs none.")
        if shape and {*self.lora_targets} - {"all-linear", *shape.linears}:
            experts = "; experts take no adapters" if shape.mixture else ""
            yield (f"--lora_targets must be all-linear or some of {' '.join(shape.linears)} (got "
                   f"{' '.join(self.lora_targets)}{experts}).")
        elif shape and not shape.adapter(self):
            yield ("--lora_rank finds no torch.nn.Linear to adapt: --lora_targets names none, or "
                   "the model has none. Would work: --lora_targets all-linear, or --lora_rank 0.")

    def in_engine(self, bfloat16: bool) -> bool:
        """Whether the engine gets the adapter itself."""
        sync = "adapter" if self.lora_sync == "auto" and bfloat16 else self.lora_sync
        return self.lora_rank > 0 and sync == "adapter"

    def chosen(self, name: str) -> bool:
        """Whether the linear layer with this last name has an adapter."""
        return name != "lm_head" and bool({name, "all-linear"} & {*self.lora_targets})


class Lora(nn.Linear):
    """A linear layer with an empty adapter beside its weights."""

    def __init__(self, layer: nn.Linear, args: LoraArgs, dtype):
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight, self.bias, self.scale = layer.weight, layer.bias, args.scale
        empty = partial(torch.empty, device=layer.weight.device, dtype=dtype)
        self.lora_A = nn.Parameter(empty(args.lora_rank, layer.in_features))
        self.lora_B = nn.Parameter(empty(layer.out_features, args.lora_rank))

    def forward(self, x):
        """(…, in) → (…, out)."""
        y = super().forward(x)
        if not self.scale:
            return y
        return y + F.linear(F.linear(x, self.lora_A) * self.scale, self.lora_B)

    def merged(self, device):
        """W + scale · B A, added in at least float32: a new tensor. A collective."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        w, a, b = (p.detach().to(device).full_tensor().to(wide)
                   for p in (self.weight, self.lora_A, self.lora_B))
        return w + self.scale * (b @ a)


class Base:
    """The policy without its adapters: the model that training started from."""

    def __init__(self, policy):
        self.policy, self.module = policy, policy.module
        self.layers = [m for m in policy.module.modules() if isinstance(m, Lora)]

    def logprobs(self, *args):
        """As Policy.logprobs."""
        with self.without():
            return self.policy.logprobs(*args)

    @contextmanager
    def without(self):
        """In it, the layers compute without their adapters."""
        scale = self.layers[0].scale
        for layer in self.layers:
            layer.scale = 0
        yield
        for layer in self.layers:
            layer.scale = scale


def put_in(lm, args: LoraArgs, dtype):
    """Freeze a model and give its targets empty adapters, in place: all other names stay."""
    lm.requires_grad_(False)
    text = text_of(lm)
    for name, layer in [*text.named_modules()]:
        if isinstance(layer, nn.Linear) and args.chosen(name.rpartition(".")[2]):
            text.set_submodule(name, Lora(layer, args, dtype))


def start(lm, seed: int):
    """A: uniform in ± 1/sqrt(in), from the seed and its name, so the same on any layout. B: 0."""
    for name, p in lm.named_parameters():
        if is_adapter(name):
            full = torch.zeros(p.shape)
            if name.endswith("A"):
                own = torch.Generator().manual_seed(random.Random(f"{seed} {name}").getrandbits(63))
                full.uniform_(-1, 1, generator=own).div_(full.shape[1] ** 0.5)
            full = distribute_tensor(
                full.to(p.dtype), p.device_mesh, p.placements, src_data_rank=None)
            p.detach().to_local().copy_(full.to_local())


def is_adapter(name: str) -> bool:
    """Whether a parameter is an A or a B."""
    return name.endswith((".lora_A", ".lora_B"))


def peft_config(lm, args: LoraArgs, model: str) -> dict:
    """adapter_config.json, as peft and vLLM read it."""
    targets = {name.rpartition(".")[2] for name, m in lm.named_modules() if isinstance(m, Lora)}
    return {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": model,
            "r": args.lora_rank, "lora_alpha": args.scale * args.lora_rank, "bias": "none",
            "target_modules": sorted(targets), "inference_mode": True}


def tensors(lm, device):
    """Yields (peft's name, full tensor) of each A and B. A collective: use it up."""
    for name, p in lm.named_parameters():
        if is_adapter(name):
            yield f"base_model.model.{name}.weight", p.detach().to(device).full_tensor()
