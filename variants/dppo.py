"""DPPO, binary total variation.    https://arxiv.org/abs/2602.04879, verl's dppo_tv

    -sg[min(r_t, 20)] * A_t * logp_t
    0 where A_t > 0 and pi - pi_old > high, or A_t < 0 and pi - pi_old < -low

pi and pi_old are the probabilities of the sampled token. low, high: --clip_low, --clip_high; 0.2
is verl's default. pi_old is the trainer's, in the paper the engine's.
"""
import torch

import losses

LARGEST_RATIO = 20.0


def dppo(logp, old, A, row, *, clip_low, clip_high, **others):
    moved, r = logp.exp() - old.exp(), losses.capped_ratio(logp, old).detach()
    drop = ((A > 0) & (moved > clip_high)) | ((A < 0) & (moved < -clip_low))
    loss = torch.where(drop, 0, -r.clamp(max=LARGEST_RATIO) * A * logp)
    return loss, losses.ratio_metrics(logp - old, r, drop)
