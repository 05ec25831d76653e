"""12. A reward of 1.

The reward goes to 1 and stays there. Should this run be published? Set `cause`, one of those that
`python exercises/diagnose.py 12` prints below the curves, and `metric`, the one that tells this
cause from the others.
"""
from diagnose import what_is_wrong

# ---- your turn
cause = "nothing is wrong"
metric = "reward/mean"
# ---- the test


def test():
    why = what_is_wrong(12, cause, metric)
    assert why is None, why


# In the project: `if completion.strip() in (text,` in examples/exact.py.
