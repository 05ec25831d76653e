"""states.py: Qwen3.5: most of its layers have a state, which goes on from token to token."""
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from batch import Packed
from family import Family, Shape


@dataclass(kw_only=True)
class StateShape(Shape):
    state: int  # columns of the values of a layer with a state

    def layer_bytes(self, c: int, keys: int) -> float:
        """As of Shape, and of a state of each copy of a prompt."""
        rows = keys * ((70 + 20 * c) * self.state + c * self.hidden)
        return super().layer_bytes(c, keys) + rows


class Stateful(Family):
    types = ("qwen3_5_text",)

    def skeleton(self, dtype, **options):
        """Its layers with a state compute a packed input row by row."""
        lm = super().skeleton(dtype, **options)
        put_in_rows(lm)
        return lm

    def cpu_limits(self, args):
        """vLLM's own."""
        if args.needs_engine:
            yield (f"--model {args.model}: on a CPU vLLM computes a {self.config.model_type} in "
                   "bfloat16 alone, and not with its prefix cache. Would work: a GPU, or sft.py.")

    def shape(self, lm) -> Shape:
        """See Family."""
        state = max(m.value_dim for m in lm.modules() if hasattr(m, "value_dim"))
        return StateShape(**vars(super().shape(lm)), state=state)


def put_in_rows(lm):
    """In the place of the layers of a Qwen3.5 that have a state, layers that compute a packed input
    row by row. All names stay."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    class Rows(Qwen3_5GatedDeltaNet):
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

    for name, layer in [*lm.named_modules()]:
        if isinstance(layer, Qwen3_5GatedDeltaNet):
            with torch.device("meta"):
                lm.set_submodule(name, Rows(lm.config, layer.layer_idx).to(lm.dtype))
