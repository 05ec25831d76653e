"""13. A run that ends early.

After a few steps nothing happens any more. Set `cause`, one of those that `python
exercises/diagnose.py 13` prints below the curves, and `metric`, the one that tells this cause from
the others.
"""
from diagnose import what_is_wrong

# ---- your turn
cause = "nothing is wrong"
metric = "reward/mean"
# ---- the test


def test():
    why = what_is_wrong(13, cause, metric)
    assert why is None, why


# In the project: `self.optimizer.param_groups[0]["lr"] = lr` in model.py.
