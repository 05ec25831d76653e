"""5. GAE off by one.

values[t] is the value of the state in which token t was chosen. After the last token there is
nothing to come. Repair `gae`.
"""
import torch


# ---- your turn
def gae(rewards, values, gamma, lam):
    """(T,), (T,) → advantages (T,)."""
    advantages, following = torch.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        before = values[t - 1] if t else 0.0
        delta = rewards[t] + gamma * values[t] - before
        advantages[t] = following = delta + gamma * lam * following
    return advantages
# ---- the test


def test():
    rewards = torch.tensor([0.0, 0.0, 0.0, 1.0])
    found = gae(rewards, torch.full((4,), 0.25), 1.0, 1.0)
    assert torch.allclose(found, torch.full((4,), 0.75)), (
        f"with gamma = lambda = 1 it is return - value = 0.75 everywhere, and not {found.tolist()}")
    found = gae(rewards, torch.tensor([0.1, 0.2, 0.4, 0.7]), 0.9, 0.0)
    one_step = torch.tensor([0.08, 0.16, 0.23, 0.3])
    assert torch.allclose(found, one_step), f"{found.tolist()}, and not {one_step.tolist()}"
    found = gae(rewards, torch.tensor([0.1, 0.2, 0.4, 0.7]), 0.5, 0.8)
    several = torch.tensor([0.0112, 0.028, 0.07, 0.3])
    assert torch.allclose(found, several), (
        f"with gamma = 0.5 and lambda = 0.8 it is {several.tolist()}, and not {found.tolist()}. "
        f"How much does a token take over from the advantage of the next one?")


# In the project: `delta = rewards[t] + gamma * next_value[:left] - values[t]` in losses.py.
