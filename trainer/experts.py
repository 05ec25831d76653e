"""experts.py: mixtures of experts: the layer, the names of its weights, and its sizes.

    p = softmax(R x)      (E,): how much the router R wants each of the E experts for a token x
    y = Σ_e w_e · D_e (silu(G_e x) * U_e x)      over the k experts with the largest p

w_e is p_e (OLMoE), or p_e / the sum of the k chosen ones (Mixtral, Qwen3).

Mixtral https://arxiv.org/abs/2401.04088   OLMoE https://arxiv.org/abs/2409.02060
Qwen3   https://arxiv.org/abs/2505.09388

transformers fuses the experts of a layer, G and U as gate_up_proj (E, 2I, H), D as down_proj
(E, H, I). FSDP shards them by expert, with their layer. A checkpoint and vLLM have single matrices.
"""
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


class Names(NamedTuple):
    """What a checkpoint calls a layer's mixture, and an expert's matrices."""
    block: str
    gate: str
    up: str
    down: str


NAMES = {"mixtral": Names("block_sparse_moe", "w1", "w3", "w2"),
         **dict.fromkeys(("olmoe", "qwen3_moe"),
                         Names("mlp", "gate_proj", "up_proj", "down_proj"))}


class Routing:
    """What all mixtures of a model share. routing.py sets it around a forward."""
    routes = None  # (S, layers, k): the experts of each token. None: those with the largest p
    watch = None  # called with the number of a layer, p (S, E) and the chosen experts (S, k)


class Mixture(nn.Module):
    """In the place of a family's own class: `put_in`."""

    def forward(self, hidden):
        """(1, S, H) → the same. Where experts or tokens are counted, nothing depends on S."""
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


# ---- in a checkpoint ----

def pieces(lm, name: str, tensor, first: int = 0):
    """Yields (name, tensor) of a parameter as a checkpoint has it: each expert alone.

    tensor: the parameter, or of fused experts some, of which this is the `first`.
    """
    names = NAMES.get(lm.config.model_type)
    if names is None or ".mlp." not in name:
        yield name, tensor
        return
    layer, _, own = name.partition(".mlp.")
    if not own.startswith("experts."):
        yield f"{layer}.{names.block}.{own}", tensor
        return
    for number, matrix in enumerate(tensor, first):
        if own == "experts.gate_up_proj":
            parts = zip((names.gate, names.up), matrix.chunk(2), strict=True)
        else:
            parts = [(names.down, matrix)]
        for part, value in parts:
            yield f"{layer}.{names.block}.experts.{number}.{part}.weight", value


def shapes(lm, parameters) -> dict[str, list[int]]:
    """{name in a checkpoint: shape} of (name, parameter) pairs."""
    return {there: list(piece.shape) for name, p in parameters
            for there, piece in pieces(lm, name, torch.empty(p.shape, device="meta"))}


def on_this_rank(lm) -> dict[str, torch.Tensor]:
    """{name in a checkpoint: parameter} of a sharded model. Of experts: those of this rank."""
    found = {}
    for name, p in lm.named_parameters():
        first = 0
        if ".experts." in name:
            first, p = p.__create_chunk_list__()[0].offsets[0], p.detach().to_local()
        found |= pieces(lm, name, p, first)
    return found


def one_by_one(lm, weights, *options):
    """In the place of Policy.weights: the experts of a layer are gathered, then named alone."""
    for name, value in weights(*options):
        yield from pieces(lm, name, value)
