"""shape.py: the sizes of a model, from its config, its parameters or its name."""
from collections import Counter
from dataclasses import dataclass

import torch

from pictures import seeing
from trainer import experts
from trainer.packing import EVEN


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
    mixture: experts.Sizes | None = None  # of experts
    tower: seeing.Tower | None = None  # of a model that sees
    state: int = 0  # columns of the values of a layer with a state (Qwen3.5)
    teacher: "Shape | None" = None  # of --teacher

    def adapter(self, lora) -> int:
        """Parameters of LoRA's adapters. 0: all weights are trained."""
        layer = sum(n for name, n in self.linears.items() if lora.chosen(name))
        return lora.lora_rank * self.layers * layer

    def layer_bytes(self, c: int, keys: int) -> float:
        """What a layer keeps for backward, per token. keys: copies of a token's keys and values
        (plan.Phase)."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        norms = (8 + 4 * c) * self.hidden + (4 + c) * (q + kv)
        attention = c * (q + 2 * q / EVEN + 2 * kv * keys)  # EVEN: with padding
        mlp = 4 * c * self.wide
        if self.state:  # packing.put_in_rows
            mlp += keys * ((70 + 20 * c) * self.state + c * self.hidden)
        return norms + attention + mlp + experts.saved(self.mixture, self.hidden, c)

    @property
    def wide(self) -> int:
        """Columns of the MLP that a token uses."""
        return self.intermediate * (self.mixture.used if self.mixture else 1)


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "vocab_size", "head_dim")
KNOWN = """\
tiny qwen2 128 256 2 4 4 320 tied
Qwen2.5-0.5B qwen2 896 4864 24 14 2 151936 tied
Qwen2.5-1.5B qwen2 1536 8960 28 12 2 151936 tied
Qwen2.5-3B qwen2 2048 11008 36 16 2 151936 tied
Qwen2.5-7B qwen2 3584 18944 28 28 4 152064 untied
Qwen3-0.6B qwen3 1024 3072 28 16 8 151936 tied
Qwen3-30B-A3B qwen3_moe 2048 6144 48 32 4 151936 128 untied
Llama-3.2-1B llama 2048 8192 16 32 8 128256 tied"""


def shape_of(model: str) -> Shape | None:
    """A model's shape, if its name is KNOWN; no file is read."""
    from transformers import AutoConfig, AutoModelForCausalLM
    name = model.rpartition("/")[2].partition(":")[0]
    name = name.removesuffix("-Instruct").removesuffix("-Base")
    for line in KNOWN.splitlines():
        known, family, *sizes, head = line.split()
        if known == name:
            sizes = dict(zip(SIZES, map(int, sizes), strict=False))  # head_dim may be missing
            with torch.device("meta"):
                config = AutoConfig.for_model(
                    family, tie_word_embeddings=head == "tied", **sizes)
                return shape_from(AutoModelForCausalLM.from_config(config))
    return None


def shape_from(lm) -> Shape:
    """A model's shape, with or without its weights."""
    c, text, tower = lm.config.get_text_config(), seeing.text_of(lm), seeing.tower_sizes(lm)
    layers, params = Counter(), sum(p.numel() for p in lm.parameters())
    for name, p in text.named_parameters():
        layers[next((part for part in name.split(".") if part.isdigit()), "")] += p.numel()
    del layers[""]  # of no layer
    linear = {name: m for name, m in text.named_modules() if hasattr(m, "in_features")}
    linears = {name.rpartition(".")[2]: m.in_features + m.out_features
               for name, m in linear.items() if ".0." in name}
    heads, mixture = c.num_attention_heads, experts.sizes(lm)
    inner = mixture.inner if mixture else max(  # layers may differ: Gemma 4
        (m.in_features for name, m in linear.items() if "mlp" in name
         and m.in_features != c.hidden_size), default=getattr(c, "intermediate_size", None))
    return Shape(
        hidden=c.hidden_size, layers=c.num_hidden_layers, heads=heads, vocab=c.vocab_size,
        intermediate=inner or 4 * c.hidden_size,
        kv_heads=getattr(c, "num_key_value_heads", None) or heads,
        head_dim=max((m.head_dim for m in text.modules() if hasattr(m, "head_dim")),
                     default=c.hidden_size // heads),
        layer=max(layers.values()), params=params, linears=linears, mixture=mixture, tower=tower,
        root=params - layers.total() - (tower.sharded if tower else 0),
        state=max((m.value_dim for m in text.modules() if hasattr(m, "value_dim")), default=0),
        fused=not getattr(c, "attn_logit_softcapping", None))
