"""Turn credit: what a turn is paid counts for it and for the turns before it.

    A_it = G_ik - mean of G_jk over the other episodes j of the group    token t is of turn k
    G_ik = R_i - what i was paid before turn k; 0 if i had ended before turn k

R is the whole reward, so G is what is still to come. The policy decides when an episode ends. So
the mean is over *all* others: it depends on nothing that i did, and the expected gradient is exact
(docs/learn/algorithms.md). A mean over those that had a turn j, summed over the turns that i had,
is not: https://github.com/verl-project/verl/issues/7244 about https://arxiv.org/abs/2505.11821.
Leave one out: https://arxiv.org/abs/2402.14740. G without a baseline: REINFORCE's reward to go.
"""
import torch

import losses

PER = "token"


def turn_credit(rewards, group, *, scored, eps, row, turn, turn_rewards, **others):
    paid = rewards.new_zeros(len(rewards), int(turn.max()) + 1)  # (N, K)
    had = paid.bool()
    paid.index_put_((row, turn), turn_rewards, accumulate=True)
    had[row, turn] = True
    to_go = torch.where(had, rewards[:, None] - paid.cumsum(1) + paid, 0)
    A = [losses.group_advantages(G, group, kind="rloo", eps=eps, scored=scored) for G in to_go.T]
    return torch.stack(A, 1)[row, turn]


def refuses(args) -> str | None:
    if "turns" not in [spec.partition(":")[0] for spec in args.reward]:
        return "credits what turns are paid, and no --reward counts it: give --reward turns."
