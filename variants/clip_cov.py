"""Clip-Cov: some tokens that lower the entropy have no gradient. https://arxiv.org/abs/2505.22617

    clip's loss, but 0 with probability RATE where LOW < (logp_t - mean of logp) * A_t < HIGH

In the paper the means of logp and A are over the batch, and 2e-4 of all its tokens are drawn: what
a token learns depends on other groups and on the order. Here the mean is over the completion, A has
its baseline, and each token has its own draw.
"""
import torch

import losses

LOW, HIGH, RATE = 1.0, 5.0, 0.01


def clip_cov(logp, old, A, row, *, n_rows, draws, **bounds):
    loss, metrics = losses.clip_loss(logp, old, A, row, **bounds)
    cov = ((logp - losses.row_mean(logp, row, n_rows)) * A).detach()
    cut = (cov > LOW) & (cov < HIGH) & (draws() < RATE)
    return torch.where(cut, 0, loss), metrics | {"cov_cut": cut}
