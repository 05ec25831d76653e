"""family.py: how a model_type is computed, and its sizes: here a dense text model.

model_files.family_of chooses. Where models need more, a part has a subclass of Family and of Shape.
"""
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import torch

from batch import EVEN

# ---- its sizes, for the plan ----
#
# c: bytes of a number in the computation (--dtype).


@dataclass
class Shape:
    """The sizes of a model. Its parameters are counted on the model itself."""
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layer: int  # parameters of a layer
    root: int  # of the rest: embedding, head, last norm
    params: int  # all
    fused: bool  # attention; else its memory grows with length²
    linears: dict  # {name: in + out} of the linear layers of a layer
    reference: "Shape | None" = None  # if it is another model
    kind: ClassVar[str] = "text"

    def layer_bytes(self, c: int, keys: int) -> float:
        """What a layer keeps for backward, per token. keys: see plan.Phase."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        norms = (8 + 4 * c) * self.hidden + (4 + c) * (q + kv)
        attention = c * (q + 2 * q / EVEN + 2 * kv * keys)  # EVEN: with padding
        return norms + attention + 4 * c * self.wide

    @property
    def wide(self) -> int:
        """Columns of the MLP that a token uses."""
        return self.intermediate

    def cuts(self, ranks: int) -> float:
        """A rank has at most 1 / cuts of the weights."""
        return ranks

    def frozen(self, args) -> int:
        """Parameters that training leaves as they are."""
        return 0

    def beside(self, c: int, args, update: bool) -> tuple[float, float]:
        """Of a micro-batch beside the layers: bytes that FSDP gathers, and bytes per token."""
        return 0.0, 0.0

    def in_engine(self, c: int, tokens: int) -> float:
        """Bytes of the engine's work beside a text model's."""
        return 0.0


# ---- what it computes, and what its files say ----

class Family:
    """How one model_type is computed: here a dense text model. config: transformers' own."""
    auto = "AutoModelForCausalLM"  # the class of transformers that makes it

    def __init__(self, config):
        self.config = config

    @property
    def architecture(self) -> str:
        """The name of transformers' class. "": it has no causal language model of this type."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ALL
        name = ALL.get(self.config.model_type, "")
        return name if name.endswith(("CausalLM", "HeadModel")) else ""

    def skeleton(self, dtype, **options):
        """The model without weights, on the device "meta"."""
        import transformers
        with torch.device("meta"):
            return getattr(transformers, self.auto).from_config(
                self.config, dtype=dtype, attn_implementation="sdpa", **options)

    def parts(self, lm) -> list:
        """The modules that have layers, which FSDP shards. The first one reads tokens."""
        return [lm]

    def pieces(self, name: str, tensor, first: int = 0):
        """Yields what the files have of a parameter: (name, tensor, its first row in the file).
        tensor: rows of the parameter, from its row `first` on."""
        yield name, tensor, first

    def shape(self, lm) -> Shape:
        """The sizes of lm, which needs no weights."""
        c, text = lm.config.get_text_config(), self.parts(lm)[0]
        layers, params = Counter(), sum(p.numel() for p in lm.parameters())
        for name, p in text.named_parameters():
            layers[next((part for part in name.split(".") if part.isdigit()), "")] += p.numel()
        del layers[""]  # of no layer
        linear = {name: m for name, m in text.named_modules() if hasattr(m, "in_features")}
        linears = {name.rpartition(".")[2]: m.in_features + m.out_features
                   for name, m in linear.items() if ".0." in name}
        inner = max((m.in_features for name, m in linear.items()  # layers may differ: Gemma 4
                     if "mlp" in name and m.in_features != c.hidden_size),
                    default=getattr(c, "intermediate_size", None))
        heads = c.num_attention_heads
        return Shape(
            hidden=c.hidden_size, layers=c.num_hidden_layers, heads=heads, vocab=c.vocab_size,
            intermediate=inner or 4 * c.hidden_size,
            kv_heads=getattr(c, "num_key_value_heads", None) or heads,
            head_dim=max((m.head_dim for m in text.modules() if hasattr(m, "head_dim")),
                         default=c.hidden_size // heads),
            layer=max(layers.values()), root=params - layers.total(), params=params,
            fused=not getattr(c, "attn_logit_softcapping", None), linears=linears)
