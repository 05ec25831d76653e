"""Pass@k training, for rewards of 0 and 1.    https://arxiv.org/abs/2508.10751, analytical form

    P = 1 - C(wrong, K) / C(n, K)    pass@K of the n scored completions of a group
    A = (1 - P) / s if right, (1 - P - C(wrong - 1, K - 1) / C(n - 1, K - 1)) / s if wrong
    s = sqrt(P (1 - P)); A is 0 where s is: always where n is not above K
"""
import torch

import losses
from errors import SettingsError

K, LEAST = 4, 2


def pass_at_k(rewards, group, *, scored, **others):
    wrong, right = (scored & losses.equal(rewards, value) for value in (0, 1))
    if (scored & ~wrong & ~right).any():
        raise SettingsError("--advantage pass_at_k: a reward is neither 0 nor 1. Would work: "
                            "--advantage dr_grpo.")
    n, failed = (x.view(-1, group).sum(1).repeat_interleave(group) for x in (scored, wrong))
    rest = 1.0
    for j in range(1, K):
        rest = rest * (failed - j).clamp(min=0).double() / (n - j).clamp(min=1)
    none = rest * failed / n.clamp(min=1)
    s = (none * (1 - none)).sqrt()
    return torch.where(scored & (s > 0), (none - rest * wrong) / s, 0)


def refuses(args) -> str | None:
    if args.group <= K:
        return f"draws {K} of a group: --group must be at least {K + 1} (got {args.group})."
    for flag in ("overlong_buffer", "kl_reward_coef"):
        if getattr(args, flag):
            return f"needs rewards of 0 and 1, and --{flag} subtracts from them."
