"""architecture.py: how a model_type is computed, and its sizes: here, dense text models.

An Architecture says which class of transformers makes a model and which weights its parameters are
saved as.
A Shape has the sizes from which memory.py computes memory. model_files.architecture_of chooses the
Architecture. Where models need more, a part has a subclass of Architecture and of Shape.
"""
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

# ---- its sizes, for the plan ----


@dataclass
class Shape:
    """The sizes of a model, from which memory.py computes memory. Its parameters are counted on the
    model itself."""
    hidden: int  # columns of the residual stream
    wide: int  # columns of the MLP that a token uses: its intermediate size
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layer: int  # parameters of the largest layer
    root: int  # parameters of the rest: embedding, head, last norm
    params: int  # parameters of the whole model
    fused: bool  # whether attention is fused; else its memory grows with length²
    linears: dict  # {name: inputs + outputs} of the linear layers of a layer
    reference: "Shape | None" = None  # sizes of the reference model, if it is another model
    kind: ClassVar[str] = "text"  # a part's subclass has another word


# ---- what it computes, and what its files say ----

class Architecture:
    """How one model_type is computed: here a dense text model. config is transformers'
    configuration object."""
    auto = "AutoModelForCausalLM"  # the class of transformers that makes it

    def __init__(self, config):
        self.config = config

    @property
    def class_name(self) -> str:
        """The name of transformers' class for this model_type, such as "Qwen2ForCausalLM". It is ""
        if transformers has no causal language model of this type."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ALL
        name = ALL.get(self.config.model_type, "")
        return name if name.endswith(("CausalLM", "HeadModel")) else ""

    def skeleton(self, dtype, **options):
        """Makes the model without weights, on the device "meta". `options` go to transformers'
        from_config."""
        import transformers
        with torch.device("meta"):
            return getattr(transformers, self.auto).from_config(
                self.config, dtype=dtype, attn_implementation="sdpa", **options)

    def stacks(self, lm) -> list:
        """Returns the modules that have a list of layers, which FSDP shards one by one. The first
        module reads tokens."""
        return [lm]

    def pieces(self, name: str, tensor, first: int = 0):
        """Yields the weights that one parameter is saved as: (name, tensor, its first row in the
        tensor of the file), under the names that transformers saves and vLLM loads. A folder's own
        files may have older names, which model_files.names_in_files finds.

        `tensor` holds the rows of the parameter from its row `first` on: a rank has only some of
        the rows. Here each parameter is one weight of its own name. A part's subclass may split
        one, or rename it.
        """
        yield name, tensor, first

    def shape(self, lm) -> Shape:
        """Returns the sizes of lm, which needs no weights. Parameters and linear layers are counted
        on its modules, and config.json has the rest."""
        text, c = self.stacks(lm)[0], lm.config.get_text_config()
        more, params = c.to_dict(), sum(p.numel() for p in lm.parameters())
        layers = Counter()  # {number of a layer: its parameters}
        for name, p in text.named_parameters():
            layers.update({n: p.numel() for n in name.split(".") if n.isdigit()})
        linears = {name: m for name, m in text.named_modules() if isinstance(m, nn.Linear)}
        wide = [m.in_features for name, m in linears.items()  # layers may differ: Gemma 4
                if "mlp" in name and m.in_features != c.hidden_size]
        head_dims = [m.head_dim for m in text.modules() if "head_dim" in vars(m)]
        return Shape(
            hidden=c.hidden_size, layers=c.num_hidden_layers, heads=c.num_attention_heads,
            wide=max(wide, default=more.get("intermediate_size") or 4 * c.hidden_size),
            kv_heads=more.get("num_key_value_heads") or c.num_attention_heads,
            head_dim=max(head_dims, default=c.hidden_size // c.num_attention_heads),
            vocab=c.vocab_size, layer=max(layers.values()), root=params - layers.total(),
            params=params, fused=not more.get("attn_logit_softcapping"),
            linears={name.rpartition(".")[2]: m.in_features + m.out_features
                     for name, m in linears.items() if ".0." in name})
