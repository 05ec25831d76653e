"""1. The mean of micro-batch means.

A minibatch does not fit into memory, so its loss is computed in micro-batches. The loss must not
depend on how it is cut. Repair `loss_in_parts`.
"""
import torch

import losses


# ---- your turn
def loss_in_parts(token_loss, mask, parts):
    """token_loss (N, T), mask (N, T) bool, parts: row numbers of each micro-batch → the loss."""
    loss = 0.0
    for rows in parts:
        loss = loss + token_loss[rows][mask[rows]].mean() / len(parts)
    return loss
# ---- the test


def test():
    mask = torch.arange(6) < torch.tensor([[2], [6], [1], [3]])
    token_loss = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    whole = (losses.token_weights(mask, "token", max_tokens=6) * token_loss).sum()
    for parts in ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[1], [0, 2, 3]], [[0], [1], [2], [3]]):
        found = loss_in_parts(token_loss, mask, parts)
        assert abs(found - whole) < 1e-6, f"{parts}: {found:.3f}, and not {whole:.3f}"


# In the project: `weights[rows] = losses.token_weights(` in grpo.py, before `batch.micros`.
