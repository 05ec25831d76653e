"""Lite PPO's advantage.    https://arxiv.org/abs/2508.08221; TRL: scale_rewards="batch"

    (R - mean of its group) / (std of the rewards of all groups + eps), ddof 1

0 where a completion is not scored, and in a group of equal rewards, as in losses.group_advantages.
"""
import torch

import losses

LEAST = 2


def lite_ppo(rewards, group, *, scored, eps, **others):
    centered = losses.group_advantages(rewards, group, kind="dr_grpo", eps=eps, scored=scored)
    std = losses.batch_std(rewards, scored)
    return torch.where(centered == 0, 0, centered / (std + eps))  # 0 / 0 where all are equal
