"""teacher.py: for distill.py: the whole distributions of a policy and its teacher, side by side,
and the prompts of --teacher_prompt."""
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from data import DataArgs, Row, make_row
from dist import SettingsError
from trainer.batch import Batch
from trainer.logprobs import of_logits, recomputed


class Teacher(NamedTuple):
    """Another model, at the tokens of a micro-batch."""
    hidden: torch.Tensor  # (n, H) of its own
    head: object  # (n, H) → logits (n, V)
    temperature: float
    kind: str  # of `divergence`


def beside(teacher, micro, temperature: float, kind: str):
    """token_divergences from a teacher, a model.Policy or lora.Base, on this micro-batch. kind
    "none": None. Its head is whole from now on, until teacher.module.reshard(): the policy's
    backward calls it too."""
    if kind == "none":
        return None
    hidden, model = teacher.hidden(micro), teacher.module  # (n, H)
    model.unshard()
    return partial(token_divergences, teacher=Teacher(
        hidden, model.head, temperature / model.scale, kind))


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


def add_teacher_prompts(rows: list[Row], tokenizer, args: DataArgs, template: str) -> None:
    """The prompt of each row for the teacher. It must not be shorter than the row's own:
    micro-batches are cut by it."""
    args = replace(args, prompt_template=template)
    for row in rows:
        try:
            made = make_row(row.index, row.columns, row.source, tokenizer, [], args,
                            flag="--teacher_prompt")
        except ValueError as error:  # half a surrogate pair
            raise SettingsError(f"--teacher_prompt, row {row.index}: {error}") from None
        if made is None:
            raise SettingsError(f"--teacher_prompt gives row {row.index} no text.")
        row.teacher_ids = made.prompt_ids
        if not len(row.prompt_ids) <= len(row.teacher_ids) <= args.max_prompt_tokens:
            raise SettingsError(
                f"--teacher_prompt gives row {row.index} {len(row.teacher_ids)} tokens; it must "
                f"give from the prompt's own {len(row.prompt_ids)} up to --max_prompt_tokens "
                f"{args.max_prompt_tokens}.")


def behind_teacher_prompts(batch: Batch) -> Batch:
    """The same completions behind the prompts that add_teacher_prompts made, if it did."""
    if batch.samples[0].prompt.row.teacher_ids is None:
        return batch
    moved = []
    for sample in batch.samples:
        row = sample.prompt.row
        prompt = sample.prompt._replace(row=replace(row, prompt_ids=row.teacher_ids))
        moved.append(replace(sample, prompt=prompt))
    return Batch(moved)
