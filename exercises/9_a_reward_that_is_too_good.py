"""9. A reward that is too good.

The reward of this run grows faster than in the healthy one. Something is wrong all the same. Set
`cause`, one of those that `python exercises/diagnose.py 9` prints below the curves, and `metric`,
the one that tells this cause from the others.
"""
from diagnose import what_is_wrong

# ---- your turn
cause = "nothing is wrong"
metric = "reward/mean"
# ---- the test


def test():
    why = what_is_wrong(9, cause, metric)
    assert why is None, why


# In the project: `temperature=temperature, top_p=1.0` in rollout.py.
