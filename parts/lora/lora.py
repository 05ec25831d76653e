"""lora.py: a layer's weights W stay, and a small product beside them is trained.

    y = W x + alpha / rank · B (A x)    A (rank, in), B (out, rank)    arxiv.org/abs/2106.09685
"""
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.nn import functional as F

from files import whole_folder
from memory import Memory
from model import Model, Policy, whole
from preflight import is_tiny
from rollout import Engine
from settings import Flags, Positive

LORA_RANKS = 0, 1, 8, 16, 32, 64, 128, 256, 320, 512  # of the adapters that vLLM has room for


@dataclass
class LoraArgs(Flags):
    """LoRA (docs/use/memory_and_machines.md)."""
    lora_rank: int = 0
    """Train only adapters of this rank (and the critic's head). 0: all weights. The default --lr is
    ten times as large."""
    lora_alpha: Positive | None = None
    """The adapter's output is scaled by alpha / rank. None: 2 x rank."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Layers with an adapter, by their last names: q_proj v_proj. all-linear: all but the head."""
    lora_sync: Literal["auto", "adapter", "merged"] = "auto"
    """What the engine gets: adapter, or merged weights, which bfloat16 rounds. auto: adapter in
    bfloat16, else merged."""
    switch: ClassVar[str] = "lora_rank"
    fixed: ClassVar[tuple[str, ...]] = "lora_alpha", "lora_rank", "lora_targets"

    def rules(self, plan):
        """Yields a sentence for each broken rule (settings.Flags)."""
        shape, most = plan.shape, LORA_RANKS[-1]
        if not self.lora_rank:
            return
        if self.lora_rank > most and self.lora_sync != "merged":
            yield (f"--lora_rank must be at most {most} (got {self.lora_rank}): vLLM takes no "
                   "larger adapter. Would work: --lora_sync merged, which needs none.")
        if shape and {*self.lora_targets} - {"all-linear", *shape.linears}:
            yield (f"--lora_targets must be all-linear or some of {' '.join(shape.linears)} (got "
                   f"{' '.join(self.lora_targets)}).")
        elif shape and not added(self, shape):
            yield ("--lora_rank finds no torch.nn.Linear to adapt: --lora_targets names none, or "
                   "the model has none. Would work: --lora_targets all-linear, or --lora_rank 0.")


def scale_of(args) -> float:
    """alpha / rank."""
    return 2.0 if args.lora_alpha is None else args.lora_alpha / args.lora_rank


def added(args, shape) -> int:
    """Parameters of the adapters of a model with this Shape. 0: all weights are trained."""
    layer = sum(n for name, n in shape.linears.items() if has_adapter(args, name))
    return args.lora_rank * shape.layers * layer


def in_engine(args, bfloat16: bool) -> bool:
    """Whether the engine gets the adapter itself."""
    sync = "adapter" if args.lora_sync == "auto" and bfloat16 else args.lora_sync
    return args.lora_rank > 0 and sync == "adapter"


def has_adapter(args, name: str) -> bool:
    """Whether the linear layer with this last name has an adapter."""
    return name != "lm_head" and bool({name, "all-linear"} & {*args.lora_targets})


class Lora(nn.Linear):
    """A linear layer with an empty adapter beside its weights."""

    def __init__(self, layer: nn.Linear, args, dtype):
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight, self.bias, self.scale = layer.weight, layer.bias, scale_of(args)
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
        """W + scale · B A, added in at least float32: a new tensor. A collective. Without the
        adapter: W, as it is."""
        if not self.scale:
            return self.weight.detach()
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        w, a, b = (p.detach().to(device).full_tensor().to(wide)
                   for p in (self.weight, self.lora_A, self.lora_B))
        return w + self.scale * (b @ a)


# ---- a model, a policy ----

class AdaptedModel(Model):
    """A model with frozen weights, and adapters beside them."""
    frozen = True

    def __init__(self, lm, args):
        put_in(lm, args, torch.promote_types(lm.dtype, torch.float32))
        super().__init__(lm, args)

    def start(self, seed: int):
        """A: uniform in ± 1/sqrt(in), from the seed and its name, so the same on any layout. What
        else is in no file is 0, as in Model."""
        super().start(seed)
        for name, p in self.lm.named_parameters():
            if is_adapter(name):
                full = torch.zeros(p.shape)
                if name.endswith("A"):
                    own = random.Random(f"{seed} {name}").getrandbits(63)
                    own = torch.Generator().manual_seed(own)
                    full.uniform_(-1, 1, generator=own).div_(full.shape[1] ** 0.5)
                full = distribute_tensor(
                    full.to(p.dtype), p.device_mesh, p.placements, src_data_rank=None)
                p.detach().to_local().copy_(full.to_local())


class AdaptedPolicy(Policy):
    """A policy whose adapters are trained."""

    def __init__(self, module, world, args):
        super().__init__(module, world, args)
        layers = {name: m for name, m in module.lm.named_modules() if isinstance(m, Lora)}
        self.layers = {f"{name}.weight": layer for name, layer in layers.items()}
        self.left_out |= {name for name in module.lm.state_dict() if is_adapter(name)}

    def stored(self, dtype=None):
        """As of Policy, with the adapters added to the weights."""
        for name, value in self.module.lm.state_dict().items():
            if name in self.left_out:
                continue
            if name in self.layers:
                value = self.layers[name].merged(self.world.device)
            yield name, whole(value.to(self.world.device, dtype or value.dtype))

    def reference(self, load) -> "Base":
        """The same weights without the adapters: they need no second copy."""
        return Base(self)


def adapter_config(args, base: str, layers) -> dict:
    """adapter_config.json, as peft and vLLM read it. base: the model that it is for. layers: the
    names of those with an adapter."""
    return {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
            "r": args.lora_rank, "lora_alpha": scale_of(args) * args.lora_rank, "bias": "none",
            "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
            "inference_mode": True}


def export(run) -> None:
    """Writes the adapters alone to runs/NAME/adapter: peft's two files, in float32, by rank 0. A
    collective."""
    policy, base = run.policy, base_of(run.args.model, run.inputs.source)
    layers = [name.removesuffix(".weight") for name in policy.layers]
    weights = {name: tensor.float().cpu().contiguous()
               for name, tensor in tensors(policy.module.lm, run.world.device)}
    if run.world.rank == 0:
        with whole_folder(run.log.folder / "adapter") as unfinished:
            config = adapter_config(run.args, base, layers)
            save_file(weights, unfinished / "adapter_model.safetensors", {"format": "pt"})
            (unfinished / "adapter_config.json").write_text(json.dumps(config, indent=1))


def base_of(name: str, source: str) -> str:
    """What an adapter calls its base. It outlives the run, and may be read in another folder: a
    name of the hub, or a whole path. name: --model. source: its folder."""
    return str(Path(source).absolute()) if source == name or is_tiny(name) else name


class Base:
    """The policy without its adapters: the model that training started from."""

    def __init__(self, policy):
        self.policy, self.module = policy, policy.module
        self.layers = [m for m in policy.module.modules() if isinstance(m, Lora)]

    def logprobs(self, *args):
        """See Policy."""
        with self.without():
            return self.policy.logprobs(*args)

    def weights(self, dtype):
        """See Policy."""
        with self.without():
            yield from self.policy.weights(dtype)

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
    text = lm.get_decoder()
    for name, layer in [*text.named_modules()]:
        if isinstance(layer, nn.Linear) and has_adapter(args, name.rpartition(".")[2]):
            text.set_submodule(name, Lora(layer, args, dtype))


def is_adapter(name: str) -> bool:
    """Whether a parameter is an A or a B."""
    return name.endswith((".lora_A", ".lora_B"))


def tensors(lm, device):
    """Yields (peft's name, full tensor) of each A and B. A collective: use it up."""
    for name, p in lm.named_parameters():
        if is_adapter(name):
            yield f"base_model.model.{name}.weight", p.detach().to(device).full_tensor()


# ---- its memory ----

class AdaptedMemory(Memory):
    """The model's weights are not trained; the adapters are, and the engine may get them too."""

    @property
    def trained(self) -> int:
        """See Memory."""
        return min(super().trained, added(self.args, self.shape))

    def weights(self) -> float:
        """See Memory."""
        return self.c * self.shape.params + self.m * added(self.args, self.shape)

    def reference(self) -> float:
        """See Memory. Without other files it is the policy without its adapters."""
        return super().reference() if self.shape.reference else 0.0

    def gradient_sum(self, root: int) -> float:
        """See Memory. Those of adapters are small."""
        return 0.0

    def engine_weights(self) -> float:
        """See Memory."""
        adapter = added(self.args, self.shape) if in_engine(self.args, self.c == 2) else 0
        return super().engine_weights() + self.c * adapter


# ---- in the engine ----

class TakingEngine(Engine):
    """An engine that gets the adapter itself."""

    def __init__(self, args, world, inputs, log, models):
        self.request, self.syncs = None, 0  # vLLM's name of the adapter; how often it came
        layers = [name.removesuffix(".weight") for name in models[0].layers]
        self.config = adapter_config(args, "", layers)
        super().__init__(args, world, inputs, log, models)
        # The base comes once, in the first sync: it must be kept.
        self.sleep_level = min(self.sleep_level, 1)

    def options(self, max_len):
        """See Engine."""
        return super().options(max_len) | {
            "enable_lora": True, "lora_target_modules": self.config["target_modules"],
            "max_lora_rank": next(r for r in LORA_RANKS if r >= self.config["r"])}

    def load(self, policy):
        """See Engine."""
        with self.changing():
            if self.request is None:
                self.reload(Base(policy).weights(self.dtype))
            self.syncs += 1
            adapter = tensors(policy.module.lm, self.world.device)
            self.request = put_adapter(self.llm, self.config, adapter, self.syncs)

    def outputs(self, samples, temperature, **options):
        """See Engine."""
        return super().outputs(samples, temperature, lora_request=self.request, **options)


def put_adapter(llm, config: dict, adapter: Iterator, sync: int):
    """Put an adapter (`tensors`) into the engine → the request for it. Its path exists nowhere, and
    is new in each sync: the prefix cache knows an adapter by it, and would serve an old one."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.request import LoRARequest
    copies = {name: t.to("cpu", copy=True) for name, t in adapter}  # vLLM scales B in place

    def put(model):
        manager, names = model.lora_manager, getattr(model, "hf_to_vllm_mapper", None)
        made = LoRAModel.from_lora_tensors(
            1, copies, PEFTHelper.from_dict(config), device="cpu",
            dtype=manager.lora_config.lora_dtype, model_vocab_size=manager.vocab_size,
            weights_mapper=names.get_rename_mapper() if names else None)
        manager.remove_adapter(1)
        manager.add_adapter(made)
        manager.activate_adapter(1)

    llm.apply_model(put)
    return LoRARequest("policy", 1, f"memory/sync_{sync}")
