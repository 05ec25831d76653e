"""divergence.py: how far the policy is from a teacher, over the whole vocabulary."""
from functools import partial
from typing import NamedTuple

import torch

from model import in_chunks, of_logits


class Teacher(NamedTuple):
    """Another model, at the tokens of a micro-batch."""
    hidden: torch.Tensor  # (n, H) of its own
    head: object  # (n, H) → logits (n, V)
    temperature: float
    kind: str  # of `divergence`


def beside(teacher, micro, temperature: float, kind: str):
    """What Policy.logprobs computes beside this teacher, a model.Policy or lora.Base. kind "none":
    None. Its head is whole from now on, until teacher.module.reshard(): the policy's
    backward calls it too."""
    if kind == "none":
        return None
    model = teacher.module
    with torch.no_grad():
        hidden = teacher.logprobs(micro, 1.0, formula=hidden_alone)  # (n, H)
    model.unshard()
    return partial(token_divergences, teacher=Teacher(
        hidden, model.head, temperature / model.scale, kind))


def hidden_alone(hidden, *options):
    """What the head gets for each predicted token: (n, H)."""
    return hidden


def token_divergences(hidden, head, targets, temperature, chunk: int, entropy: bool,
                      teacher: Teacher):
    """What token_logprobs gives, and the divergence from the teacher: (n,), (n,), (n,)."""
    def part(hidden, targets, other):
        logits = head(hidden)
        with torch.no_grad():
            theirs = teacher.head(other) / teacher.temperature
        return (*of_logits(logits, targets, temperature, entropy),
                divergence(logits / temperature, theirs, teacher.kind))

    return in_chunks(part, chunk, hidden, targets, teacher.hidden)


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
    of_q, of_p = (q * (logq - other)).sum(-1), (p * (logp - other)).sum(-1)  # (n,): KL(· || other)
    if kind == "reverse_kl":
        found, gradient = of_p, p * (logp - logq - of_p.unsqueeze(-1))
    elif kind == "forward_kl":
        found, gradient = of_q, p - q
    else:
        found, gradient = (of_q + of_p) / 2, p * (logp - logm - of_p.unsqueeze(-1)) / 2
    # The second term is 0: it changes no value, and its gradient in the logits is `gradient`.
    return found + (gradient * (logits - logits.detach())).sum(-1)
