"""states.py: Qwen3.5: most of its layers have a state, which goes on from token to token."""
from dataclasses import dataclass

import torch

from family import Family, Shape


@dataclass(kw_only=True)
class StateShape(Shape):
    state: int  # columns of the values of a layer with a state

    def layer_bytes(self, c: int, keys: int) -> float:
        """As of Shape, and of a state of each copy of a prompt."""
        rows = keys * ((70 + 20 * c) * self.state + c * self.hidden)
        return super().layer_bytes(c, keys) + rows


class Stateful(Family):
    def skeleton(self, dtype, **options):
        """Its layers with a state compute a packed input row by row."""
        lm = super().skeleton(dtype, **options)
        put_in_rows(lm)
        return lm

    def shape(self, lm) -> Shape:
        """See Family."""
        state = max(m.value_dim for m in lm.modules() if hasattr(m, "value_dim"))
        return StateShape(**vars(super().shape(lm)), state=state)


def put_in_rows(lm):
    """In the place of the layers of a Qwen3.5 that have a state, layers that compute a packed input
    row by row. All names stay."""
    from parts.states.rows import Qwen3_5GatedDeltaNet, RowsOfStates  # slow to import
    for name, layer in [*lm.named_modules()]:
        if isinstance(layer, Qwen3_5GatedDeltaNet):
            with torch.device("meta"):
                lm.set_submodule(name, RowsOfStates(lm.config, layer.layer_idx).to(lm.dtype))
