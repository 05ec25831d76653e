"""rows.py: a layer of Qwen3.5 that has a state, for a packed input."""
import torch
import torch.nn.functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from batch import Packed


class RowsOfStates(Qwen3_5GatedDeltaNet):
    """The layer of transformers, which computes a packed input row by row."""

    def forward(self, hidden_states, packed: Packed | None = None, **inputs):
        """(1, S, H) → the same. Each completion goes through it behind a copy of its prompt, so
        nothing of a row reaches another."""
        if packed is None:  # transformers' own
            return super().forward(hidden_states, **inputs)
        parts, place = packed.blocks
        done = []
        for _, row, prefix in parts:
            out = super().forward(F.embedding(row, hidden_states[0]), **inputs)
            done.append(out[:, prefix:].flatten(0, 1))
        return torch.cat(done).index_select(0, place).unsqueeze(0)
