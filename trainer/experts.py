"""experts.py: mixtures of experts: the layer, its weights' names, what is trained of its router.

    p = softmax(R x)      (E,): how much the router R wants each of the E experts for a token x
    y = Σ_e w_e · D_e (silu(G_e x) * U_e x)      over the k experts with the largest p

w_e is p_e (OLMoE), or p_e / the sum of the k chosen ones (Mixtral, Qwen3).

Mixtral https://arxiv.org/abs/2401.04088   OLMoE https://arxiv.org/abs/2409.02060
Qwen3   https://arxiv.org/abs/2505.09388

transformers fuses the experts of a layer, G and U as gate_up_proj (E, 2I, H), D as down_proj
(E, H, I). FSDP shards them by expert, with their layer. A checkpoint and vLLM have single matrices.
"""
import math
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from errors import not_default
from trainer.logprobs import hidden_alone
from trainer.packing import to_device

# What a checkpoint calls a layer's mixture, and the matrices G, U and D of an expert.
NAMES = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
         **dict.fromkeys(("olmoe", "qwen3_moe"), ("mlp", "gate_proj", "up_proj", "down_proj"))}


@dataclass
class ExpertArgs:
    """Mixtures of experts (docs/use/memory_and_machines.md)."""
    router_aux_coef: float = 0.0
    """c of a loss that makes the use of experts even. 0: none. It costs a second pass."""
    freeze_router: bool = False
    """The policy's routers stay as they are."""
    replay_routing: bool = False
    """R3: the trainer uses the experts that the engine used. On GPU."""

    def rules(self, plan):
        """Yields a sentence for each broken rule (plan.problems)."""
        args = plan.args
        if plan.shape and not plan.shape.mixture:
            yield from (f"--{name} needs a model with experts." for name in not_default(self))
        for name in ("router_aux_coef", "freeze_router"):
            if getattr(self, name) and args.lora_args.lora_rank:
                yield (f"--{name} is for routers that are trained, and with --lora_rank they are "
                       "not: give one of them.")
        if self.router_aux_coef and self.freeze_router:
            yield ("--router_aux_coef trains routers, and --freeze_router keeps them: give one of "
                   "them.")
        if not self.replay_routing:
            return
        if args.turn_args.reply or args.turn_args.tools:
            yield "--replay_routing is for one turn: of a reply's tokens no experts are known."
        if args.carry_args and args.carry_args.carry:
            yield ("--replay_routing is for completions of one round, and --carry goes on with "
                   "them: give one of them.")
        if args.teacher_prompt:
            yield "--replay_routing has no experts for the prompts of --teacher_prompt."
        if not args.needs_engine:
            yield f"--replay_routing needs an engine, and {args.script} starts none."


class Routing:
    """What all mixtures of a model share. `Routed` sets it around a forward."""
    routes = None  # (S, layers, k): the experts of each token. None: those with the largest p
    watch = None  # called with the number of a layer, p (S, E) and the chosen experts (S, k)


class Mixture(nn.Module):
    """In the place of a family's own class: `put_in`."""

    def forward(self, hidden):
        """(1, S, H) → the same. Each token is computed alone."""
        x = hidden.flatten(0, 1)  # (S, H)
        wide = torch.promote_types(x.dtype, torch.float32)
        p = F.linear(x, self.gate.weight).softmax(-1, dtype=wide)  # (S, E)
        if self.routing.routes is None:
            chosen = p.topk(self.gate.top_k).indices  # (S, k)
        else:
            chosen = self.routing.routes[:, self.number]
        if self.routing.watch:
            self.routing.watch(self.number, p, chosen)
        weights = p.gather(1, chosen)  # (S, k)
        if getattr(self.gate, "norm_topk_prob", True):  # Mixtral always does
            weights = weights / weights.sum(-1, keepdim=True)
        y = each_expert(x, chosen, self.experts.gate_up_proj, self.experts.down_proj)  # (S, k, H)
        return (weights.to(x.dtype).unsqueeze(1) @ y).view_as(hidden)  # (S, 1, k) @ (S, k, H)


def each_expert(x, chosen, gate_up, down):
    """D_e (silu(G_e x) * U_e x) of each token's experts: x (S, H), chosen (S, k) → (S, k, H)."""
    experts, order = chosen.flatten().sort(stable=True)  # (S·k,): all rows of expert 0 come first
    ends = torch.searchsorted(experts, torch.arange(len(down), device=x.device), right=True)
    # The gradient of F.embedding does not depend on threads, as that of x[order] does.
    rows = F.embedding(order // chosen.shape[1], x)  # (S·k, H)
    gate, up = grouped(rows, gate_up, ends).chunk(2, -1)  # (S·k, I) each
    rows = grouped(F.silu(gate) * up, down, ends)  # (S·k, H)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return rows.index_select(0, place).view(*chosen.shape, -1)


def grouped(rows, weights, ends):
    """Each expert's rows times its matrix: rows (n, in), weights (E, out, in) → (n, out). The rows
    of expert e end at ends[e]."""
    if rows.dtype != torch.float64:
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends.int())
    parts = rows.tensor_split(ends[:-1].tolist())  # torch's kernel has no float64
    return torch.cat([part @ w.T for part, w in zip(parts, weights, strict=True)])


# ---- in a model ----

def unserved(config):
    """Yields (what, whether this model has it): what neither this file nor vLLM computes."""
    if config.model_type in NAMES:
        yield "another activation than silu", config.hidden_act != "silu"
        yield "dense layers among its mixtures", getattr(config, "decoder_sparse_step", 1) > 1


def blocks(lm) -> list[nn.Module]:
    """The mixtures, by layer. []: a dense model."""
    if lm.config.model_type not in NAMES:
        return []
    return [module for module in lm.modules() if hasattr(module, "experts")]


def put_in(lm):
    """The mixtures compute as here, in place: parameters and names stay."""
    routing = Routing()
    for number, block in enumerate(blocks(lm)):
        block.own_class, block.__class__ = type(block), Mixture
        block.number, block.routing = number, routing


@contextmanager
def as_in_transformers(lm):
    """Inside, the mixtures compute as transformers wrote them."""
    for block in blocks(lm):
        block.__class__ = block.own_class
    yield
    for block in blocks(lm):
        block.__class__ = Mixture


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


def on_this_rank(lm) -> dict[str, tuple[int, torch.Tensor]]:
    """{name in a checkpoint: (first row, the rows of this rank)} of a sharded model. Experts are
    whole: a rank has some."""
    found = {}
    for name, p in lm.named_parameters():
        first, rows = p.__create_chunk_list__()[0].offsets[0], p.detach().to_local()
        for there, piece in pieces(lm, name, rows, first):
            found[there] = 0 if ".experts." in name else first, piece
    return found


def one_by_one(lm, weights, *args, **options):
    """In the place of Policy.weights: the experts of a layer are gathered, then named alone."""
    for name, value in weights(*args, **options):
        yield from pieces(lm, name, value)


# ---- in a policy ----

class Routed:
    """What a Policy does beside, if its model has experts: model.RoutedPolicy.

    The load of a layer is measured at the n places of a minibatch, on all ranks, at which a sampled
    token is predicted, k experts at each:

        f_e = how often e was chosen / (n k)      P_e = the mean of p_e
    """

    def __init__(self, args: ExpertArgs, module, *others):
        self.expert_args, self.blocks = args, blocks(module.lm)
        self.routing = self.blocks[0].routing
        if args.freeze_router:
            for block in self.blocks:
                block.gate.weight.requires_grad_(False)
        super().__init__(module, *others)
        self.batch, self.micros = None, []  # those since the last optimizer step
        self.k = self.blocks[0].gate.top_k
        sizes = len(self.blocks), len(self.blocks[0].gate.weight)
        self.counts = torch.zeros(sizes, dtype=torch.int64, device=self.world.device)
        self.total = torch.zeros(sizes, dtype=torch.float64)  # of the optimizer steps of a batch

    def run(self, micro, *inputs):
        self.replay(micro)
        if torch.is_grad_enabled():  # an update
            if micro.batch is not self.batch:  # a new one, or after a trial without a step
                self.batch, self.micros = micro.batch, []
                self.counts.zero_()
                self.total.zero_()
            self.micros.append(micro)
            self.routing.watch = partial(self.count, micro.source)
        out = super().run(micro, *inputs)
        self.routing.watch = None  # a backward may compute a layer again
        return out

    def count(self, source, layer: int, p, chosen):
        chosen = chosen.index_select(0, source).flatten()  # (n·k,)
        self.counts[layer].scatter_add_(0, chosen, torch.ones_like(chosen))

    def step(self, lr: float) -> float:
        given = [sample.completion.routes is not None for sample in self.batch.samples]
        if self.expert_args.replay_routing and not all(given):
            raise RuntimeError("the engine did not tell its experts, which --replay_routing needs")
        counts = self.world.sum(self.counts.cpu().double())  # (layers, E)
        if self.expert_args.router_aux_coef:
            self.balance(counts)
        self.total += counts
        self.metrics = load_metrics(self.total)
        self.counts.zero_()
        self.micros = []
        return super().step(lr)

    def balance(self, counts):
        """Adds the gradient of c Σ_layers E Σ_e f_e P_e: https://arxiv.org/abs/2101.03961, 2.2

        f_e has no gradient, and P_e is a mean of tokens: with the f_e of the whole minibatch each
        token's part stands alone, so ranks and budgets change nothing. They are known only now, so
        the micro-batches are computed once more.
        """
        n = counts[0].sum() / self.k
        scale = self.expert_args.router_aux_coef * counts.shape[1] / float(n)
        shares = (counts / counts.sum(1, keepdim=True)).to(self.world.device)  # (layers, E)
        for micro in self.micros:
            found = []
            self.replay(micro)
            self.routing.watch = partial(self.add, micro.source, shares, found)
            hidden = self.module(micro.inputs, micro.source, micro.targets, 1.0, "none",
                                 hidden_alone)
            # FSDP gathers a layer for its backward when its output has a gradient, be it 0.
            (scale * sum(found) + 0 * hidden.sum()).backward()
            self.routing.watch = None  # only now: with --checkpointing a layer is computed again

    def add(self, source, shares, found: list, layer: int, p, chosen):
        found.append((p.index_select(0, source) @ shares[layer].to(p.dtype)).sum())

    def replay(self, micro):
        """R3: a rounding in the engine may choose another expert than the same rounding here, and
        the ratio of such a token is far from 1.      https://arxiv.org/abs/2510.11370"""
        if self.expert_args.replay_routing:
            self.routing.routes = routes_of(micro)


def routes_of(micro):
    """(S, layers, k) of the tokens of a packed input, in the order of packing.pack. A prompt has
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
