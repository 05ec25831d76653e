"""IPO: both bounds for any A.    https://github.com/PrimeIntellect-ai/prime-rl/pull/3418

    -r_t * A_t, 0 where pi - pi_old is outside [-low, high]; plus COEF * (log r_t)^2

pi and pi_old are the probabilities of the sampled token. low, high: --clip_low, --clip_high; theirs
are 0.1, later 0.3 and 0 (pull 3586), with the engine's pi_old. The last term stays where the bounds
drop the first one. --engine_correction weighs both: it corrects which tokens were sampled, and both
are means over sampled tokens.
"""
import torch

import losses

COEF = 0.001


def ipo(logp, old, A, row, *, clip_low, clip_high, **others):
    moved, r = logp.exp() - old.exp(), losses.capped_ratio(logp, old)
    drop = (moved > clip_high) | (moved < -clip_low)
    loss = torch.where(drop, 0, -r * A) + COEF * (logp - old).square()
    return loss, losses.ratio_metrics(logp - old, r, drop)
