"""4. k1 as a loss.

log π − log π_ref of a sampled token is an unbiased estimate of KL(π || π_ref). So its mean is added
to the loss, to stay near the reference. What is its gradient? Repair `kl_loss`.
"""
import torch


# ---- your turn
def kl_loss(logprobs, ref_logprobs):
    """Of sampled tokens: (n,) with gradient, (n,) → (n,). Its expected gradient is that of KL."""
    return logprobs - ref_logprobs
# ---- the test


def test():
    theta = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.0, 0.4, 0.0], dtype=torch.float64).log_softmax(0)
    logp = theta.log_softmax(0)  # a vocabulary of three: all samples can be listed
    true, = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), theta, retain_graph=True)
    expected = (logp.detach().exp() * kl_loss(logp, ref)).sum()
    found, = torch.autograd.grad(expected, theta)
    assert torch.allclose(found, true), (
        f"its expected gradient is {found.tolist()}, that of KL(pi || ref) is {true.tolist()}")


# In the project: `kl_estimate` in losses.py. k1 is right in the reward: `token_rewards`.
