"""Skips rows whose completions were all right: their group has no gradient.

A skipped row returns in every fourth epoch, because the policy may unlearn it. GRESO skips by a
probability that depends on the number of such draws: https://arxiv.org/abs/2506.02177, section 4.
"""
AGAIN = 4  # epochs


def unsolved(rows, known, *, epoch, **others):
    """Returns weights: 0 for a row that was always right when it was last drawn."""
    if epoch % AGAIN == 0 or all(row.last == 1 for row in known):
        return [1] * len(rows)
    return [int(row.last != 1) for row in known]
