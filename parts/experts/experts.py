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
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from batch import to_device
from errors import not_default

# What a checkpoint calls a layer's mixture, and the matrices G, U and D of an expert.
NAMES = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
         **dict.fromkeys(("mellum", "olmoe", "qwen3_moe"),
                         ("mlp", "gate_proj", "up_proj", "down_proj"))}


@dataclass
class ExpertArgs:
    """Mixtures of experts (docs/use/memory_and_machines.md)."""
    freeze_router: bool = False
    """The policy's routers stay as they are."""
    replay_routing: bool = False
    """R3: the trainer uses the experts that the engine used. On GPU."""

    def rules(self, plan):
        """See plan.problems."""
        args = plan.args
        if plan.shape and not plan.shape.mixture:
            yield from (f"--{name} needs a model with experts." for name in not_default(self))
        if self.freeze_router and args.lora_args.lora_rank:
            yield ("--freeze_router is for routers that are trained, and with --lora_rank they are "
                   "not: give one of them.")
        if not self.replay_routing:
            return
        if args.turn_args.reply:
            yield "--replay_routing is for one turn: of a reply's tokens no experts are known."
        if args.carry_args and args.carry_args.carry:
            yield ("--replay_routing is for completions of one round, and --carry goes on with "
                   "them: give one of them.")
        if getattr(args, "teacher_prompt", None):
            yield "--replay_routing has no experts for the prompts of --teacher_prompt."
        if not args.needs_engine:
            yield f"--replay_routing needs an engine, and {args.script} starts none."


# ---- in a model ----

def blocks(lm) -> list[nn.Module]:
    """The mixtures, by layer. []: a dense model."""
    if lm.config.model_type not in NAMES:
        return []
    return [module for module in lm.modules() if hasattr(module, "experts")]


class Sizes(NamedTuple):
    """Of the mixtures of a model, for the plan of its memory."""
    experts: int  # E of a layer
    used: int  # k of a token
    inner: int  # I of an expert
    idle: int  # parameters of a layer that a token does not use


def sizes(lm) -> Sizes | None:
    """None: a dense model."""
    for block in blocks(lm):
        experts, hidden, inner = block.experts.down_proj.shape
        used = block.gate.top_k
        return Sizes(experts, used, inner, (experts - used) * 3 * inner * hidden)
    return None


def saved(sizes: Sizes | None, hidden: int, c: int) -> int:
    """Bytes a token that a mixture keeps for backward, beside the 4 k I numbers of an MLP: x and y
    of each expert, p, and the places where rows go. c: bytes of a number. None: a dense model."""
    return 2 * c * sizes.used * hidden + 4 * sizes.experts + 24 * sizes.used if sizes else 0


# ---- in a checkpoint ----

def pieces(lm, name: str, tensor, first: int = 0):
    """Yields (name, tensor) of a parameter as a checkpoint has it: each expert alone.

    tensor: the parameter, or of fused experts some, of which this is the `first`.
    """
    layer, mlp, own = name.partition(".mlp.")
    if not mlp or lm.config.model_type not in NAMES:
        yield name, tensor
        return
    block, gate, up, down = NAMES[lm.config.model_type]
    if not own.startswith("experts."):
        yield f"{layer}.{block}.{own}", tensor
        return
    for number, matrix in enumerate(tensor, first):
        parts = {down: matrix}
        if own == "experts.gate_up_proj":
            parts = dict(zip((gate, up), matrix.chunk(2), strict=True))
        for part, value in parts.items():
            yield f"{layer}.{block}.experts.{number}.{part}.weight", value


def shapes(lm, parameters) -> dict[str, list[int]]:
    """{name in a checkpoint: shape} of (name, parameter) pairs."""
    return {there: list(piece.shape) for name, p in parameters
            for there, piece in pieces(lm, name, torch.empty(p.shape, device="meta"))}


def on_this_rank(lm, tensors) -> dict[str, tuple[int, torch.Tensor]]:
    """{name in a checkpoint: (first row, the rows of this rank)} of (name, tensor) pairs of a
    sharded model. Experts are whole: a rank has some."""
    found = {}
    for name, p in tensors:
        first, rows = 0, p.detach()
        if isinstance(rows, DTensor):
            first, rows = rows.__create_chunk_list__()[0].offsets[0], rows.to_local()
        for there, piece in pieces(lm, name, rows, first):
            found[there] = 0 if ".experts." in name else first, piece
    return found


# ---- in a policy ----

class Routing:
    """The routers of a LogprobModel. A hook behind each of them counts the experts that it chose,
    or puts those of the engine in their place.

    The load of a layer is measured at the n places of a batch so far, on all ranks, at which a
    sampled token is predicted, k experts at each:

        f_e = how often e was chosen / (n k)
    """

    def __init__(self, lm):
        self.routers = [block.gate for block in blocks(lm)]
        self.batch = self.counts = None  # counts (layers, E): of the batch that is learned from
        self.source = None  # (n,): the places of this forward that count. None: it does not count
        self.routes = None  # (S, layers, k). None: the routers choose
        for layer, router in enumerate(self.routers):
            router.register_forward_hook(partial(self.behind, layer))

    @contextmanager
    def of(self, micro, replay: bool):
        """Around a forward of a micro-batch. replay: R3. A rounding in the engine may choose
        another expert than the same rounding here, and the ratio of such a token is far from 1.
        https://arxiv.org/abs/2510.11370"""
        self.routes = routes_of(micro) if replay else None
        if torch.is_grad_enabled():  # an update
            if micro.batch is not self.batch:
                sizes = len(self.routers), self.routers[0].num_experts
                self.counts = torch.zeros(sizes, dtype=torch.int64, device=micro.device)
            self.batch, self.source = micro.batch, micro.source
        yield
        self.source = None  # a backward may compute a layer again

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

    def load(self, world, replay: bool) -> dict[str, float]:
        """The metrics of the load. A collective."""
        if replay and any(sample.completion.routes is None for sample in self.batch.samples):
            raise RuntimeError("the engine did not tell its experts, which --replay_routing needs")
        return load_metrics(world.sum(self.counts.cpu().double()))


def routes_of(micro):
    """(S, layers, k) of the tokens of a packed input, in the order of batch.pack. A prompt has
    those of the first completion of its group. None: there are no rows, or it is a trial."""
    samples, parts, owners = micro.batch.samples, [], []
    if any(samples[row].completion.routes is None for row in micro.rows) or not micro.rows:
        return None
    for row in micro.rows:
        owner, prompt, _ = micro.batch.sizes[row]
        if owner not in owners:
            owners.append(owner)
            parts.append(samples[owner].completion.routes[:prompt])
    for row in micro.rows:
        _, prompt, completion = micro.batch.sizes[row]
        parts.append(samples[row].completion.routes[prompt:prompt + completion - 1])
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
