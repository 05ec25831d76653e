"""experts.py: mixtures of experts: their weights' names, and what their routers choose.

    p = softmax(R x)      (E,): how much the router R wants each of the E experts for a token x
    y = Σ_e w_e · D_e (silu(G_e x) * U_e x)      over the k experts with the largest p

w_e is p_e (OLMoE), or p_e / the sum of the k chosen ones (Mixtral, Qwen3).

Mixtral https://arxiv.org/abs/2401.04088   OLMoE https://arxiv.org/abs/2409.02060
Qwen3   https://arxiv.org/abs/2505.09388

transformers computes the layer. It fuses its experts, G and U as gate_up_proj (E, 2I, H), D as
down_proj (E, H, I). FSDP shards them by expert, with their layer. A checkpoint and vLLM have
single matrices.
"""
import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from architecture import Architecture, Shape
from batch import to_device
from memory import Memory
from model import Policy
from rollout import Engine
from settings import Flags, not_default

# What a checkpoint calls a layer's mixture, and the matrices G, U and D of an expert.
NAMES = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
         **dict.fromkeys(("mellum", "olmoe", "qwen3_moe"),
                         ("mlp", "gate_proj", "up_proj", "down_proj"))}


@dataclass
class ExpertArgs(Flags):
    """Mixtures of experts (docs/use/memory_and_machines.md)."""
    freeze_router: bool = False
    """Freeze the policy's routers."""
    replay_routing: bool = False
    """R3: the trainer uses the experts that the engine used. Only on GPU."""
    fixed: ClassVar[tuple[str, ...]] = ("freeze_router",)

    def rules(self, plan):
        """Yields a sentence for each broken rule (settings.Flags)."""
        if plan.shape and plan.shape.kind != "experts":
            yield from (f"--{name} needs a model with experts." for name in not_default(self))
        if self.replay_routing and not plan.args.needs_engine:
            yield f"--replay_routing needs an engine, and {plan.args.script} starts none."
        flags = vars(plan.args)
        if self.replay_routing and flags.get("teacher_prompt"):
            yield "--replay_routing has no experts for the prompts of --teacher_prompt."
        if self.freeze_router and flags.get("lora_rank"):
            yield ("--freeze_router is for routers that are trained, and with --lora_rank they are "
                   "not: give one of them.")


# ---- its sizes ----

@dataclass(kw_only=True)
class MixtureShape(Shape):
    experts: int  # E of a layer
    used: int  # k of a token
    idle: int  # parameters of a layer that a token does not use
    kind: ClassVar[str] = "experts"


class MixtureMemory(Memory):
    """Memory of a mixture of experts."""

    def layer(self, shape: MixtureShape, keys: int) -> float:
        """See Memory. And x and y of each expert, p, and the places where rows go."""
        return (super().layer(shape, keys) + 2 * self.c * shape.used * shape.hidden
                + 4 * shape.experts + 24 * shape.used)

    def shards(self) -> float:
        """See Memory. A rank has whole experts."""
        shards, experts = super().shards(), self.shape.experts
        return shards if math.isinf(shards) else experts / -(-experts // shards)


# ---- a model ----

class Mixture(Architecture):
    """A mixture of experts."""

    def skeleton(self, dtype, **options):
        """See Architecture. The best kernel has no float64."""
        return super().skeleton(dtype, experts_implementation=(
            "eager" if dtype == torch.float64 else None), **options)

    def shape(self, lm) -> Shape:
        """See Architecture."""
        block = blocks(lm)[0]
        experts, hidden, inner = block.experts.down_proj.shape
        used = block.gate.top_k
        return MixtureShape(**vars(super().shape(lm)) | {"wide": inner * used}, experts=experts,
                            used=used, idle=(experts - used) * 3 * inner * hidden)

    def pieces(self, name: str, tensor, first: int = 0):
        """See Architecture. Each expert alone, and whole: a rank has some of them."""
        layer, mlp, own = name.partition(".mlp.")
        block, gate, up, down = NAMES[self.config.model_type]
        if not mlp:
            yield name, tensor, first
        elif not own.startswith("experts."):
            yield f"{layer}.{block}.{own}", tensor, first
        else:
            for number, matrix in enumerate(tensor, first):
                parts = {down: matrix}
                if own == "experts.gate_up_proj":
                    parts = dict(zip((gate, up), matrix.chunk(2), strict=True))
                for part, value in parts.items():
                    yield f"{layer}.{block}.experts.{number}.{part}.weight", value, 0


class RoutedPolicy(Policy):
    """A policy that is a mixture of experts. A hook behind each router counts the experts that it
    chose, or puts those of the engine in their place.

    The load of a layer is measured at the n places of a batch so far, on all ranks, at which a
    sampled token is predicted, k experts at each:

        f_e = how often e was chosen / (n k)

    --replay_routing is R3: a rounding in the engine may choose another expert than the same
    rounding here, and the ratio of such a token is far from 1. https://arxiv.org/abs/2510.11370
    """

    def __init__(self, module, world, args):
        self.replays, self.batch, self.counts = args.replay_routing, None, None
        self.source = None  # (n,): the places of this forward that count. None: it does not count
        self.routes = None  # (S, layers, k). None: the routers choose
        self.routers = [block.gate for block in blocks(module.lm)]
        for layer, router in enumerate(self.routers):
            router.register_forward_hook(partial(self.behind, layer))
            if args.freeze_router:
                router.requires_grad_(False)
        super().__init__(module, world, args)

    def run(self, micro, *inputs):
        """See Trained. It counts, in an update."""
        self.routes = routes_of(micro) if self.replays else None
        if torch.is_grad_enabled():  # an update
            if micro.batch is not self.batch:  # counts (layers, E): of the batch learned from
                sizes = len(self.routers), self.routers[0].num_experts
                self.counts = torch.zeros(sizes, dtype=torch.int64, device=micro.device)
            self.batch, self.source = micro.batch, micro.source
        found = super().run(micro, *inputs)
        self.source = None  # a backward may compute a layer again
        return found

    def behind(self, layer: int, router, inputs, output):
        """The forward hook of a router: logits (S, E), weights and numbers of its experts (S, k)
        → the same."""
        logits, weights, chosen = output
        if self.routes is not None:
            chosen, wide = self.routes[:, layer], torch.promote_types(logits.dtype, torch.float32)
            p = logits.softmax(-1, dtype=wide).gather(1, chosen)  # (S, k)
            if getattr(router, "norm_topk_prob", True):  # Mixtral always does
                p = p / p.sum(-1, keepdim=True)
            weights = p.to(weights.dtype)
        if self.source is not None:
            used = chosen.index_select(0, self.source).flatten()  # (n·k,)
            self.counts[layer].scatter_add_(0, used, torch.ones_like(used))
        return logits, weights, chosen

    def step(self, lr: float) -> float:
        """See Trained. It measures the load."""
        if self.replays and not all(map(has_routes, self.batch.samples)):
            raise RuntimeError("the engine did not tell its experts, which --replay_routing needs")
        self.metrics = load_metrics(self.world.sum(self.counts.cpu().double()))
        return super().step(lr)


# ---- in the engine ----

class MixtureEngine(Engine):
    """The engine of a mixture of experts. With --replay_routing it says which ones it used."""

    def __init__(self, args, *given):
        self.replays = args.replay_routing
        super().__init__(args, *given)

    def options(self, max_len):
        """See Engine."""
        return super().options(max_len) | {"enable_return_routed_experts": self.replays}

    def reload(self, weights):
        """See Engine."""
        if not self.on_gpu:
            self.llm.apply_model(forget_packed_experts)
        super().reload(weights)

    def new_tokens(self, output):
        """See Engine. extras["routes"] (prompt + T - 1, layers, k): of each token that is an input.
        """
        routes = getattr(output, "routed_experts", None)
        return super().new_tokens(output) | ({} if routes is None else {"routes": routes})


def forget_packed_experts(model) -> None:
    """Before new weights, on a CPU: vLLM packs those of experts only where it has no kernel for
    them yet. The log-probs of others were wrong by 10 nats."""
    for layer in model.modules():
        if hasattr(getattr(layer, "quant_method", None), "moe_kernel"):
            layer.quant_method.moe_kernel = None


def has_routes(sample) -> bool:
    """Whether the engine told its experts."""
    return "routes" in sample.extras


# ---- in a forward ----

def blocks(lm) -> list[nn.Module]:
    """The mixtures, by layer."""
    return [module for module in lm.modules() if hasattr(module, "experts")]


def routes_of(micro):
    """(S, layers, k) of the tokens of a packed input, in the order of batch.pack. A prompt has
    those of the first completion of its group. None: there are no rows, or it is a trial."""
    samples, parts, owners = micro.batch.samples, [], []
    if not micro.rows or not all(map(has_routes, (samples[row] for row in micro.rows))):
        return None
    for row in micro.rows:
        owner, prompt, _ = micro.batch.sizes[row]
        if owner not in owners:
            owners.append(owner)
            parts.append(samples[owner].extras["routes"][:prompt])
    for row in micro.rows:
        _, prompt, completion = micro.batch.sizes[row]
        parts.append(samples[row].extras["routes"][prompt:prompt + completion - 1])
    return to_device(torch.from_numpy(np.concatenate(parts)).long(), micro.device)


def load_metrics(counts) -> dict[str, float]:
    """counts (layers, E) → of f in each layer its largest part, and its entropy / log E: 1 is even.
    Their means over layers, and the worst layer's."""
    f = counts / counts.sum(1, keepdim=True)
    largest, entropy = f.amax(1), -torch.xlogy(f, f).sum(1) / math.log(f.shape[1])
    return {"router/largest_mean": float(largest.mean()),
            "router/largest_worst": float(largest.max()),
            "router/entropy_mean": float(entropy.mean()),
            "router/entropy_worst": float(entropy.min())}
