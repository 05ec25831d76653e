"""paid.py: rewards of an environment: what reward() of a --reply FILE.py:CLASS returned at the end.
"""


def environment(turns):
    """The reward of the episode. None: it has none."""
    return turns[-1].get("reward")


def turns(turns):
    """The same. The advantage turn_credit.py pays each turn what the reward grew by."""
    return turns[-1].get("reward")
