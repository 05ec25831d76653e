"""2. Padding masked by token id.

The model has no padding token, so its end token pads the rows. Which tokens bear loss? Repair
`tokens_with_loss`.
"""
import torch

END, VOCABULARY = 0, 8  # the ids are 0 to 7


# ---- your turn
def tokens_with_loss(rows):
    """rows: vectors of the sampled ids of each completion → ids (N, T), mask (N, T) bool."""
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=END)
    return ids, ids != END
# ---- the test


def test():
    rows = [[5, 7, END], [4, END], [6, 1, 2, 3],  # the third was cut before it ended
            [2, END, 1, END], [3]]  # two turns; one that was stopped
    ids, mask = tokens_with_loss([torch.tensor(row) for row in rows])
    outside = ids[(ids < 0) | (ids >= VOCABULARY)].tolist()
    assert not outside, f"the model reads padding too, and there is no token {outside[0]}"
    for row, its_ids, its_mask in zip(rows, ids, mask, strict=True):
        found = its_ids[its_mask].tolist()
        assert found == row, f"{row} was sampled, and {found} bears loss"


# In the project: `torch.from_numpy(s.sampled) for s in self.samples` in batch.py. Nothing is padded
# there.
