"""Turn credit is the gradient of the expected reward, by listing everything.

The vocabulary is 3 tokens, of which 2 ends a turn. A turn has at most two tokens, an episode at
most two turns. The environment answers by the first turn, may end the episode there, and pays for
both turns. So there are 37 episodes, and the expectation of an estimate over all groups of 2 or 3
of them is a sum.
"""
import itertools

import numpy as np
import pytest
import torch

import data
import fakes
import grpo
from batch import Batch, Sample

TURNS = [(2,), *itertools.product((0, 1), (0, 1, 2))]  # all that a turn may be
OVER = [(2,), (1, 1)]  # after these first turns the environment ends the episode
EPISODES = [(one, *more) for one in TURNS
            for more in ([()] if one in OVER else itertools.product(TURNS))]
STATES = [(*before, begun) for before in [(), *((one,) for one in TURNS if one not in OVER)]
          for begun in ((), (0,), (1,))]
WEIGHT = 0.5  # of --reward turns


def sample_of(episode, paid: list[float], end: float) -> Sample:
    """Two ids of a reply stand between two turns, and a message of its own. Beside what its turns
    were paid an episode has a reward at its end."""
    ids, sampled = [], []
    for turn in episode:
        ids, sampled = [*ids, *turn, 9, 9], [*sampled, *[True] * len(turn), False, False]
    turns = [{"role": "assistant", "paid": x} for x in paid]
    turns.insert(1, {"role": "assistant", "content": "put in"})
    return Sample(data.Prompt(0, data.Row(0, "", [5], None, {}, "")), np.array(ids[:-2], np.int32),
                  sampled=np.array(sampled[:-2]), turns=turns, reward=WEIGHT * sum(paid) + end,
                  rewards={"turns": sum(paid), "exact": end})


@pytest.mark.parametrize("seed, G", [(0, 2), (1, 2), (0, 3)])
def test_the_expected_estimate_is_the_gradient(seed, G):
    """By the shipped compute_advantages: E[1/G Σ_i Σ_t A_it ∇log π_it] = ∇E[R]."""
    rng = np.random.default_rng(seed)
    theta = torch.tensor(rng.normal(size=(len(STATES), 3)), requires_grad=True)  # logits
    first = {one: rng.normal(1, 1) for one in TURNS}  # what a first turn is paid is known then
    samples = [sample_of(one, [first[one[0]], *rng.normal(1, 1, len(one) - 1)], rng.normal())
               for one in EPISODES]
    logp = theta.log_softmax(-1)
    logps = torch.stack([logp[STATES.index((*episode[:k], turn[:t])), token]
                         for episode in EPISODES for k, turn in enumerate(episode)
                         for t, token in enumerate(turn)])  # of all tokens of the episodes
    batch = Batch(samples)
    chances = torch.stack([part.sum() for part in batch.split(logps)]).exp()
    assert len(EPISODES) == 37 and abs(float(chances.detach().sum()) - 1) < 1e-14
    true, = torch.autograd.grad(chances @ batch.rewards, theta, retain_graph=True)

    index = torch.tensor(list(itertools.product(range(37), repeat=G)))  # every group
    chance = chances.detach()[index].prod(1).repeat_interleave(G)
    index = index.flatten()
    groups = Batch([samples[i] for i in index.tolist()])
    args = fakes.args(advantage="parts/turns/turn_credit.py:turn_credit", group=G,
                      reward=(f"turns:{WEIGHT}", "exact"), reply="examples/doors.py:Doors")
    A = grpo.compute_advantages(args, groups, groups.tokens, None, None)
    place = torch.cat([batch.places[i] for i in index.tolist()])
    weight = torch.zeros(len(logps), dtype=torch.float64).index_add(
        0, place, A * groups.per_token(chance))
    found, = torch.autograd.grad(weight @ logps / G, theta)
    assert (found - true).norm() < 1e-12 * true.norm()
