"""1. The mean of micro-batch means.

The loss of a minibatch is the mean over its tokens. The minibatch does not fit into memory, so the
forward and backward are done for one micro-batch after another, and the gradients add up. The sum
must not depend on how the rows are cut. Repair `losses_of_parts`.
"""
import torch


# ---- your turn
def losses_of_parts(token_loss, mask, parts):
    """token_loss (N, T), mask (N, T) bool: which tokens count, parts: row numbers of each
    micro-batch → the loss of each micro-batch, a list."""
    losses = []
    for rows in parts:
        losses.append(token_loss[rows][mask[rows]].mean() / len(parts))
    return losses
# ---- the test


def test():
    generator = torch.Generator().manual_seed(0)
    for lengths in ([2, 6, 1, 3], [5, 1, 4, 1]):
        mask = torch.arange(6) < torch.tensor(lengths).view(-1, 1)
        token_loss = torch.rand(4, 6, generator=generator, requires_grad=True)
        whole = token_loss[mask].mean().item()  # if it did fit into memory
        for parts in ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[1], [3, 0, 2]], [[0], [1], [2], [3]]):
            check(losses_of_parts(token_loss, mask, parts), token_loss, parts, whole)


def check(found, token_loss, parts, whole):
    count = len(found) if isinstance(found, list) else 0
    assert count == len(parts), (
        f"rows {parts}: there are {len(parts)} micro-batches. Return a list with the loss of each")
    for rows, loss in zip(parts, found, strict=True):
        gradient, = torch.autograd.grad(loss, token_loss, retain_graph=True)
        others = [row for row in range(4) if gradient[row].any() and row not in rows]
        assert not others, (f"rows {parts}: the loss of the micro-batch {rows} was computed from "
                            f"rows {others} too, which are not in memory at the same time")
    total = sum(found).item()
    assert abs(total - whole) < 1e-6, (
        f"rows {parts}: the losses add up to {total:.3f}. The mean over all tokens is {whole:.3f}")


# In the project: `weights[rows] = losses.token_weights(` in grpo.py, before `batch.micro_batches`.
