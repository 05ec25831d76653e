"""14. A bound on the wrong side.

PPO's loss takes the pessimistic one of two products, so that no token gains from a ratio beyond the
bounds. While every ratio is 1, as in the first update of a rollout, this one is right: in a loss of
your own `prove` does not see it. Repair `clipped_loss`.
"""
import torch


# ---- your turn
def clipped_loss(ratio, A, low, high):
    """Of tokens: ratios π/π_old (n,) with gradient, advantages (n,) → (n,)."""
    return -torch.maximum(ratio * A, ratio.clamp(1 - low, 1 + high) * A)
# ---- the test


TOKENS = {  # ratio, advantage: (has it a gradient?, what it is)
    (1.0, 1.0): (True, "a good token that has not moved"),
    (1.5, 1.0): (False, "a good token that is more likely already"),
    (0.5, 1.0): (True, "a good token that became less likely: it must come back"),
    (1.0, -1.0): (True, "a bad token that has not moved"),
    (0.5, -1.0): (False, "a bad token that is less likely already"),
    (1.5, -1.0): (True, "a bad token that became more likely: it must come back")}


def test():
    for (value, A), (moves, what) in TOKENS.items():
        ratio = torch.tensor([value], dtype=torch.float64, requires_grad=True)
        loss = clipped_loss(ratio, torch.tensor([A]).double(), 0.2, 0.3)
        gradient, = torch.autograd.grad(loss.sum(), ratio)
        wanted = -A if moves else 0.0
        assert abs(float(gradient) - wanted) < 1e-12, (
            f"{what} (ratio {value}, advantage {A:+g}): the gradient of its loss is "
            f"{float(gradient):+g}, and not {wanted:+g}")
    edge = clipped_loss(torch.tensor([1.5, 0.5]).double(), torch.tensor([1.0, -1.0]).double(),
                        0.2, 0.3)
    assert torch.allclose(edge, torch.tensor([-1.3, 0.8]).double()), (
        f"beyond a bound the loss is the one at the bound, -1.3 and 0.8, and not {edge.tolist()}")


# In the project: `bounded = torch.where(A < 0, r.clamp(1 - clip_low, dual_clip)` in losses.py.
