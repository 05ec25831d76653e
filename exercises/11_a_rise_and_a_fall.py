"""11. A rise and a fall.

The reward grows faster than in the healthy run, and then goes to 0. Set `cause`, one of those that
`python exercises/diagnose.py 11` prints below the curves, and `metric`, the one that tells this
cause from the others.
"""
from diagnose import what_is_wrong

# ---- your turn
cause = "nothing is wrong"
metric = "reward/mean"
# ---- the test


def test():
    why = what_is_wrong(11, cause, metric)
    assert why is None, why


# In the project: `loss = loss + args.kl_loss_coef * kl` in grpo.py.
