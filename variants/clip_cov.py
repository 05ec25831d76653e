"""Clip-Cov: some tokens that would lower the entropy most have no gradient.

    clip's loss, but 0 for a share RATE of the tokens with LOW < cov_t < HIGH
    cov_t = (logp_t - mean of logp) * A_t    https://arxiv.org/abs/2505.22617, verl

There the means of logp and A are over the batch, and the share is drawn from all of it: what a
token learns then depends on other groups and on the order of the rows. Here the mean is over the
completion, A has its group's baseline, and each token has a draw of its own. There 2e-4 of all
tokens are drawn, whatever share is between the bounds.
"""
import torch

import losses

LOW, HIGH, RATE = 1.0, 5.0, 0.01


def clip_cov(logp, old, A, row, *, rows, draws, **bounds):
    loss, metrics = losses.clip_loss(logp, old, A, row, **bounds)
    cov = ((logp - losses.row_mean(logp, row, rows)) * A).detach()
    cut = (cov > LOW) & (cov < HIGH) & (draws() < RATE)
    return torch.where(cut, 0, loss), metrics | {"cov_cut": cut}
