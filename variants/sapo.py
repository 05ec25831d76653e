"""SAPO: a smooth gate instead of bounds.    https://arxiv.org/abs/2511.20347, TRL, verl

    -A_t * 4 / tau * sigmoid(tau * (r_t - 1))    tau: one where A > 0, another elsewhere

At r = 1 its slope is that of -r A. A larger tau fades sooner on both sides. The paper takes the
mean of each completion's mean: --aggregation sequence.
"""
import torch

import losses

TAU_POSITIVE, TAU_OTHER = 1.0, 1.05


def sapo(logp, old, A, row, **others):
    r = losses.capped_ratio(logp, old)
    tau = torch.full_like(A, TAU_OTHER).masked_fill(A > 0, TAU_POSITIVE)
    gate = 4 / tau * torch.sigmoid(tau * (r - 1))
    return -A * gate, losses.ratio_metrics(logp - old, r, torch.zeros_like(r))
