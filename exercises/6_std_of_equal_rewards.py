"""6. The std of equal rewards.

If all completions of a prompt have the same reward, none is better: the advantage is 0. Repair
`advantages`.
"""
import torch


# ---- your turn
def advantages(rewards, eps=1e-9):
    """Rewards of a prompt's completions, (G,) float32 → (G,)."""
    return (rewards - rewards.mean()) / (rewards.std() + eps)
# ---- the test


def test():
    for reward in (0.0, 0.1, 0.3, 1.0, 1.1):
        for group in (3, 7, 8):
            found = advantages(torch.full((group,), reward))
            assert not found.any(), f"{group} rewards of {reward}: {found.tolist()}"
    found = advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]))
    assert torch.allclose(found, torch.tensor([1, -1, -1, 1]) * 0.8660, atol=1e-4), found.tolist()
    for apart in (0.1, 0.001):
        found = advantages(0.5 + apart * torch.tensor([0.0, 0.0, 0.0, 1.0]))
        assert torch.allclose(found, torch.tensor([-0.5, -0.5, -0.5, 1.5]), atol=0.01), (
            f"the last of 4 rewards is better by {apart}: it is still the best, and not equal "
            f"({found.tolist()})")


# In the project: `equal(highest, lowest)` in losses.py.
