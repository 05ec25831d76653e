"""2. Padding masked by token id.

The model has no padding token, so its end token pads the rows. Which tokens bear loss? Repair
`tokens_with_loss`.
"""
import torch

END = 0


# ---- your turn
def tokens_with_loss(rows):
    """rows: vectors of the sampled ids of each completion → ids (N, T), mask (N, T) bool."""
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=END)
    return ids, ids != END
# ---- the test


def test():
    rows = [torch.tensor([5, 7, END]), torch.tensor([4, END]), torch.tensor([6, 6, 6])]
    ids, mask = tokens_with_loss(rows)
    for row, its_ids, its_mask in zip(rows, ids, mask, strict=True):
        found = its_ids[its_mask].tolist()
        assert found == row.tolist(), f"of {row.tolist()} only {found} bear loss"


# In the project: `self.sampled = pad([torch.from_numpy(c.sampled)` in batch.py.
