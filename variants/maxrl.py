"""MaxRL's advantage: towards the likelihood of success.    https://arxiv.org/abs/2602.02710

    (R - mean of its group) / mean, for rewards of at least 0; 0 where all are equal

Its gradient is that of the first terms of log p. A negative mean would turn all signs: a negative
reward ends the run.
"""
import torch

import losses
from errors import SettingsError

LEAST = 2


def maxrl(rewards, group, *, scored, eps, **others):
    R = torch.where(scored, rewards, 0)
    if ((R < 0) & ~losses.equal(R, 0)).any():
        raise SettingsError(f"--advantage maxrl needs rewards of at least 0 (got {R.min():g}). "
                            f"Would work: --advantage dr_grpo.")
    centered = losses.group_advantages(R, group, kind="dr_grpo", eps=eps, scored=scored)
    n, total = (x.view(-1, group).sum(1, keepdim=True) for x in (scored, R))
    mean = (total / n.clamp(min=1)).expand(-1, group).flatten()
    return torch.where(mean > 0, centered / mean, 0)


def refuses(args) -> str | None:
    for flag in ("overlong_buffer", "kl_reward_coef"):
        if getattr(args, flag):
            return f"needs rewards of at least 0, and --{flag} subtracts from them."
