"""states.py: Qwen3.5: most of its layers have a state, which goes on from token to token."""
from dataclasses import dataclass

import torch

from architecture import Architecture, Shape
from memory import Memory


@dataclass(kw_only=True)
class StateShape(Shape):
    state: int  # columns of the values of a layer with a state


class StateMemory(Memory):
    """Memory of a model whose layers have a state."""

    def layer(self, shape: StateShape, keys: int) -> float:
        """See Memory. And a state of each copy of a prompt."""
        c = self.c
        return super().layer(shape, keys) + keys * (
            (70 + 20 * c) * shape.state + c * shape.hidden)


class Stateful(Architecture):
    def skeleton(self, dtype, **options):
        """Its layers with a state compute a packed input row by row."""
        lm = super().skeleton(dtype, **options)
        put_in_rows(lm)
        return lm

    def shape(self, lm) -> Shape:
        """See Architecture."""
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
