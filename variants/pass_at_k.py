"""Pass@k training: the reward of k completions is that of the best one, 0 or 1.

    P = 1 - C(wrong, k) / C(G, k)    pass@k of the group's G completions
    A = (1 - P) / s if right, (1 - P - C(wrong - 1, k - 1) / C(G - 1, k - 1)) / s if wrong
    s = sqrt(P (1 - P))    https://arxiv.org/abs/2508.10751, its analytical form

0 where P is 0 or 1. Where fewer than k completions are scored, k is their number.
"""
import torch

from errors import SettingsError

K = 4


def pass_at_k(rewards, group, *, scored, **others):
    right, wrong = scored & (rewards == 1), scored & (rewards == 0)
    if (scored & ~right & ~wrong).any():
        raise SettingsError("--advantage pass_at_k needs rewards of 0 or 1. Would work: "
                            "--advantage dr_grpo.")
    n, failed = (x.view(-1, group).sum(1).repeat_interleave(group) for x in (scored, wrong))
    rest = torch.ones_like(rewards)  # C(failed - 1, k - 1) / C(n - 1, k - 1)
    for j in range(1, K):
        rest = torch.where(n > j, rest * (failed - j).clamp(min=0) / (n - j).clamp(min=1), rest)
    none = rest * failed / n.clamp(min=1)  # 1 - P
    s = (none * (1 - none)).sqrt()
    return torch.where(scored & (s > 0), (none - rest * wrong) / s, 0)


def refuses(args) -> str | None:
    if args.group < K:
        return f"draws {K} completions of a group (K in the file), and --group is {args.group}."
    for flag in ("overlong_buffer", "kl_reward_coef"):
        if getattr(args, flag):
            return f"needs rewards of 0 or 1, and --{flag} subtracts from them."
