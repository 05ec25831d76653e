"""GMPO: one ratio for a completion, the geometric mean of its tokens' clipped ratios.

    -s * A    s = exp(1/|o| * sum_t clip(log r_t))    https://arxiv.org/abs/2507.20673, TRL, verl

log r_t is at most clip_high where A > 0, and at least -clip_low elsewhere. The paper takes 0.4 for
both, and --aggregation sequence. It has one advantage for a completion: where tokens have others,
the gradient would not be REINFORCE's even on-policy. So this is refused.
"""
import torch

import flags
import losses


def gmpo(logp, old, A, row, *, n_rows, clip_low, clip_high, **others):
    log_r = (logp - old).clamp(max=20)
    clipped = torch.where(A > 0, log_r.clamp(max=clip_high), log_r.clamp(min=-clip_low))
    s = losses.row_mean(clipped, row, n_rows).exp()
    return -s * A, losses.ratio_metrics(logp - old, s, (clipped != log_r) & (A != 0))


def refuses(args) -> str | None:
    if args.engine_correction in ("truncate", "mask"):
        return (f"has one ratio for a completion, and --engine_correction {args.engine_correction} "
                f"has one for each token; sequence_{args.engine_correction} fits.")
    if flags.chosen("advantage", args.advantage).per == "token" or (
            args.advantage == "reinforce++" and args.kl_reward_coef):
        return (f"has one ratio for a completion, and --advantage {args.advantage} has an "
                f"advantage for each token.")
