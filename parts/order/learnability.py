"""Weights p(1 - p), the variance of the reward: rows that are sometimes right have most to teach.

Sampling for learnability: https://arxiv.org/abs/2502.12272. p is the pass rate of the last draw,
(correct + 1/2) / (completions + 1), so that a row that was never or always right keeps a small
weight and is drawn again. A row that was not drawn yet has p = 1/2.
"""


def learnability(rows, known, **others):
    """Returns the weights."""
    weights = []
    for row in known:
        n = row.scored / row.drawn if row.last is not None else 0  # completions of a draw
        p = ((row.last or 0) * n + 0.5) / (n + 1)
        weights.append(p * (1 - p))
    return weights
