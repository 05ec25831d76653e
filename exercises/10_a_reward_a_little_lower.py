"""10. A reward that is a little lower.

This run learns nearly as well as the healthy one. Nobody would know it from the reward. Set
`cause`, one of those that `python exercises/diagnose.py 10` prints below the curves, and `metric`,
the one that tells this cause from the others.
"""
from diagnose import what_is_wrong

# ---- your turn
cause = "nothing is wrong"
metric = "reward/mean"
# ---- the test


def test():
    why = what_is_wrong(10, cause, metric)
    assert why is None, why


# In the project: `if not self.llm.reset_prefix_cache():` in rollout.py.
