"""Turn credit: a token gets what is still to come.    parts/turns/RESULTS.md: the proof

    A_it = G_ik - mean of G_jk over the other episodes j of the group, where token t is of turn k
    G_ik = R_i - what was paid before turn k; 0 if the episode had no turn k

The policy decides how many turns there are. The mean is over *all* others, so it depends on nothing
that i did. MT-GRPO (https://arxiv.org/abs/2505.11821) has a mean of each turn's reward, and sums:
that is biased, https://github.com/verl-project/verl/issues/7244.
"""
import numpy as np
import torch

import losses

PER, LEAST = "token", 2


def turn_credit(rewards, group, *, scored, eps, row, batch, parts, **others):
    weight, _ = parts["turns"]
    turn, turn_rewards = turns_of(batch)
    turn_rewards = weight * turn_rewards
    paid = rewards.new_zeros(len(rewards), int(turn.max()) + 1)  # (N, K)
    had = paid.bool()
    had[row, turn] = True
    paid.index_put_((row, turn), turn_rewards, accumulate=True)
    G = torch.where(had, rewards[:, None] - paid.cumsum(1) + paid, 0)
    A = [losses.group_advantages(x, group, kind="rloo", eps=eps, scored=scored) for x in G.T]
    return torch.stack(A, 1)[row, turn]


def refuses(args) -> str | None:
    if "turns" not in [spec.partition(":")[0] for spec in args.reward]:
        return "credits what turns are paid, and no --reward counts it: give --reward turns."
    if args.dynamic_sampling:
        return "learns from groups of equal rewards too, and --dynamic_sampling drops them."


def turns_of(batch):
    """Of each sampled token, (M,): the number of its turn; and what the turn was paid, at its last
    token, else 0."""
    found = []
    for s in batch.samples:
        turn = (s.sampled > np.append(False, s.sampled[:-1])).cumsum()[s.sampled] - 1
        paid, pay = np.zeros(len(turn)), [one["paid"] for one in s.turns if "paid" in one]
        paid[np.flatnonzero(np.diff(turn, append=-1))] = pay or 0
        found.append((turn, paid))
    return [torch.from_numpy(np.concatenate(x)) for x in zip(*found, strict=True)]
