"""logprobs.py: hidden states → log-probs, entropies and divergences, without all logits at once."""
from functools import cache, partial
from typing import NamedTuple

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


# ---- a policy beside its teacher: distill.py ----

class Teacher(NamedTuple):
    """Another model, at the tokens of a micro-batch."""
    hidden: torch.Tensor  # (n, H) of its own
    head: object  # (n, H) → logits (n, V)
    temperature: float
    kind: str  # of `divergence`


def token_divergences(hidden, head, targets, temperature, chunk: int, entropy: str,
                      teacher: Teacher):
    """What token_logprobs gives, and the divergence from the teacher: (n,), (n,), (n,)."""
    if len(hidden) > chunk:
        part = token_divergences
        if torch.is_grad_enabled():
            part = partial(recomputed, token_divergences)
        parts = [part(h, head, t, temperature, chunk, entropy, teacher._replace(hidden=other))
                 for h, t, other in zip(hidden.split(chunk), targets.split(chunk),
                                        teacher.hidden.split(chunk), strict=True)]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))
    logits = head(hidden)
    with torch.no_grad():
        theirs = teacher.head(teacher.hidden) / teacher.temperature
    return (*of_logits(logits, targets, temperature, entropy),
            divergence(logits / temperature, theirs, teacher.kind))


def divergence(logits, teacher_logits, kind):
    """From the policy p to a teacher q, over the whole vocabulary: logits (n, V) each -> (n,).

        reverse_kl  KL(p || q) = sum_v p (log p - log q)      https://arxiv.org/abs/2306.08543
        forward_kl  KL(q || p) = sum_v q (log q - log p)      https://arxiv.org/abs/1503.02531
        jsd         KL(p || m)/2 + KL(q || m)/2, m = (p + q)/2    https://arxiv.org/abs/2306.13649

    Its gradient in the logits is written down, and not left to autograd: it keeps one matrix (n, V)
    and is exactly 0 where p = q.

        reverse_kl  p (log p - log q - KL(p || q))            forward_kl  p - q
        jsd         p (log p - log m - KL(p || m)) / 2
    """
    logp, logq = logits.detach().log_softmax(-1), teacher_logits.detach().log_softmax(-1)
    p, q = logp.exp(), logq.exp()
    # log m = log((p + q)/2), without a difference of large numbers.
    logm = torch.maximum(logp, logq) + torch.log1p(torch.expm1(-(logp - logq).abs()) / 2)
    other = {"reverse_kl": logq, "forward_kl": logp, "jsd": logm}[kind]
    found, of_p = (q * (logq - other)).sum(-1), (p * (logp - other)).sum(-1)  # (n,)
    if kind == "reverse_kl":
        found, gradient = of_p, p * (logp - logq - of_p.unsqueeze(-1))
    elif kind == "forward_kl":
        gradient = p - q
    else:
        found, gradient = (found + of_p) / 2, p * (logp - logm - of_p.unsqueeze(-1)) / 2
    return found + (gradient * (logits - logits.detach())).sum(-1)
