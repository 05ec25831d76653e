"""logprobs.py: hidden states → log-probs and entropies, without all logits at once."""
from functools import cache, partial

import torch
from torch.utils.checkpoint import checkpoint

recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def token_logprobs(hidden, head, targets, temperature, chunk: int, entropy: str):
    """log π(target) and the entropy of π = softmax(head(hidden) / temperature).

    hidden (n, H), head(hidden) (n, V), targets (n,) → (n,), (n,).
    entropy: "none" (zeros), "value" (no gradient) or "grad".
    """
    if len(hidden) > chunk:  # backward computes the logits again: a few times chunk × V of memory
        part = partial(recomputed, token_logprobs) if torch.is_grad_enabled() else token_logprobs
        parts = [part(h, head, t, temperature, chunk, entropy)
                 for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))
    logits = head(hidden)
    formula = compiled() if logits.is_cuda else of_logits
    return formula(logits, targets, temperature, entropy)


def of_logits(logits, targets, temperature: float, entropy: str):
    """The same from logits (n, V)."""
    if temperature != 1:  # a pass over all logits
        logits = logits / temperature
    logz = logits.logsumexp(-1, keepdim=True)  # (n, 1)
    logp = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logz.squeeze(-1)  # (n,) no view
    if entropy == "none":
        return logp, torch.zeros_like(logp)
    logps = logits - logz if entropy == "grad" else logits.detach() - logz.detach()  # (n, V)
    p = logps.exp()
    return logp, -(p * logps if entropy == "grad" else p.mul_(logps)).sum(-1)


@cache
def compiled():
    """`of_logits` in few passes over the logits. One graph serves every n > 1: a chunk that is
    computed again in the backward must meet the graph of its forward."""
    return torch.compile(of_logits, dynamic=True)


def hidden_alone(hidden, *options):
    """In the place of token_logprobs."""
    return hidden
