"""Experts as the papers write them, for tests/reference.py."""
from functools import partial

import torch

import reference
from settings import values_of


def mixture(block, hidden, normed: bool = True, chosen=None):
    """y = Σ_e p_e / (Σ_j p_j) · D_e (silu(G_e x) * U_e x) over the k largest p_e: (1, L, H) → same.

    Without the division where not normed (OLMoE). Over the experts `chosen` (L, k), if given.
    """
    out = []
    for t, x in enumerate(hidden[0]):
        p = (block.gate.weight @ x).softmax(-1)
        used = sorted(range(len(p)), key=lambda e: -p[e].item())[:block.gate.top_k]
        if chosen is not None:
            used = chosen[t].tolist()
        y = 0.0
        for e in used:
            gate, up = block.experts.gate_up_proj[e].chunk(2)
            inner = torch.nn.functional.silu(gate @ x) * (up @ x)
            weight = p[e] / sum(p[j] for j in used) if normed else p[e]
            y = y + weight * (block.experts.down_proj[e] @ inner)
        out.append(y)
    return torch.stack(out).unsqueeze(0)


class Mixed(reference.Model):
    """A model with experts."""

    def parameters(self, lm) -> dict:
        for block in lm.modules():
            if hasattr(block, "experts"):
                block.forward = partial(mixture, block)
        found = super().parameters(lm)
        if values_of(self.args).get("freeze_router") and self.head is None:
            found = {n: p for n, p in found.items() if ".gate." not in n}
        return found
