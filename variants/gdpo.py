"""GDPO: each reward of --reward is normalized alone.    https://arxiv.org/abs/2601.05242

    A_k = (R_k - mean) / (std + eps) in its group, for each reward k
    A = sum_k weight_k * A_k, whitened over the completions in the loss    TRL; verl: over tokens

With one reward this is --advantage grpo, whitened.
"""
import torch

import losses

LEAST = 2


def gdpo(rewards, group, *, scored, eps, parts, trained, **others):
    total = torch.zeros_like(rewards)
    for weight, values in parts.values():
        applies = scored & ~values.isnan()
        total += weight * losses.group_advantages(
            values.nan_to_num(), group, kind="grpo", eps=eps, scored=applies)
    return losses.whiten(total, trained)


def refuses(args) -> str | None:
    for flag in ("overlong_buffer", "kl_reward_coef"):
        if getattr(args, flag):
            return f"normalizes each reward of --reward, and --{flag} is none of them."
