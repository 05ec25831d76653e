"""shapes.py: the sizes of a model, from its config alone: how many parameters it has, and what a layer keeps for backward."""
import json
from dataclasses import dataclass, fields
from pathlib import Path

from plan import SettingsError


@dataclass(frozen=True)
class Shape:
    """The sizes of a dense decoder: attention, gated MLP, RMS norms (Llama, Mistral, Qwen 2 and 3)."""
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool = False          # the head is the embedding
    bias: bool = False          # on the projections to q, k and v
    head_dim: int = 0           # 0: hidden / heads
    qk_norm: bool = False       # q and k are normalized (Qwen 3)

    @property
    def q(self) -> int:
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv(self) -> int:
        return self.kv_heads * (self.head_dim or self.hidden // self.heads)

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        projections = 2 * self.hidden * (self.q + self.kv) + self.bias * (self.q + 2 * self.kv)
        return projections + 3 * self.hidden * self.intermediate + 2 * self.hidden + self.qk_norm * 2 * self.q // self.heads

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def root(self) -> int:
        """Parameters outside the layers: embedding, head, last norm."""
        return self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def params(self) -> int:
        return self.layers * self.layer + self.root

    def saved(self, c: int) -> int:
        """Bytes that one layer keeps for backward, per token, without checkpointing. c: bytes of a computed number.

        Two norms keep their float32 input and both sides of their scale; attention q, k, v, its output and float32 log-sums
        (the attention kernel never keeps a length x length matrix); the MLP its gate before and after, up, and their product.
        """
        norms = 2 * (4 * self.hidden + 4 + 2 * c * self.hidden)
        qk_norms = self.qk_norm * ((self.q + self.kv) * (4 + c) + 4 * (self.heads + self.kv_heads))
        attention = c * (2 * self.q + 2 * self.kv) + 4 * self.heads
        return norms + qk_norms + attention + 4 * c * self.intermediate


QWEN = dict(bias=True)
SHAPES = {
    "tiny": Shape(128, 256, 2, 4, 4, 320, tied=True, **QWEN),
    "Qwen2.5-0.5B": Shape(896, 4864, 24, 14, 2, 151936, tied=True, **QWEN),
    "Qwen2.5-1.5B": Shape(1536, 8960, 28, 12, 2, 151936, tied=True, **QWEN),
    "Qwen2.5-3B": Shape(2048, 11008, 36, 16, 2, 151936, tied=True, **QWEN),
    "Qwen2.5-7B": Shape(3584, 18944, 28, 28, 4, 152064, **QWEN),
    "Qwen2.5-14B": Shape(5120, 13824, 48, 40, 8, 152064, **QWEN),
    "Qwen2.5-32B": Shape(5120, 27648, 64, 40, 8, 152064, **QWEN),
    "Qwen3-0.6B": Shape(1024, 3072, 28, 16, 8, 151936, tied=True, head_dim=128, qk_norm=True),
    "Qwen3-1.7B": Shape(2048, 6144, 28, 16, 8, 151936, tied=True, head_dim=128, qk_norm=True),
    "Qwen3-4B": Shape(2560, 9728, 36, 32, 8, 151936, tied=True, head_dim=128, qk_norm=True),
    "Qwen3-8B": Shape(4096, 12288, 36, 32, 8, 151936, head_dim=128, qk_norm=True),
    "Llama-3.2-1B": Shape(2048, 8192, 16, 32, 8, 128256, tied=True),
    "Llama-3.2-3B": Shape(3072, 8192, 28, 24, 8, 128256, tied=True),
    "Llama-3.1-8B": Shape(4096, 14336, 32, 32, 8, 128256),
}


def shape_of(model: str, sizes: tuple[str, ...] = ()) -> Shape:
    """The shape of --model: from --sizes, this file's table, a folder's config.json, or the hub's, in this order."""
    if sizes:
        try:
            return Shape(**{name: int(value) for name, value in (size.split("=") for size in sizes)})
        except (TypeError, ValueError):
            names = " ".join(f"{f.name}=…" for f in fields(Shape))
            raise SettingsError(f"--sizes {' '.join(sizes)}: give all of {names} (whole numbers; the last four may be left out).") from None
    known = SHAPES.get("tiny" if model.startswith("tiny") else model.rpartition("/")[2].removesuffix("-Instruct").removesuffix("-Base"))
    if known and not Path(model).is_dir():
        return known
    path = Path(model) / "config.json"
    if not path.is_file():
        from huggingface_hub import hf_hub_download
        try:
            path = Path(hf_hub_download(model, "config.json"))
        except Exception as error:     # a dozen kinds, from a bad name to no network: all mean "not there"
            raise SettingsError(f"--model {model}: no folder here, not in shapes.py's table, and the hub's config.json could not be had "
                                f"({type(error).__name__}); give its sizes: --sizes hidden=3584 intermediate=18944 layers=28 heads=28 "
                                f"kv_heads=4 vocab=152064.") from None
    return shape_from(json.loads(path.read_text()))


def shape_from(config: dict) -> Shape:
    """The shape in a transformers config. SettingsError for a model that is no plain dense decoder."""
    if config.get("num_experts") or config.get("num_local_experts") or "num_hidden_layers" not in config or "intermediate_size" not in config:
        raise SettingsError(f"there is no memory plan for a model of type {config.get('model_type')!r}, only for dense decoders.")
    kind, heads = config.get("model_type", ""), config["num_attention_heads"]
    return Shape(config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"], heads, config.get("num_key_value_heads") or heads,
                 config["vocab_size"], bool(config.get("tie_word_embeddings")), kind == "qwen2" or bool(config.get("attention_bias")),
                 config.get("head_dim") or 0, kind == "qwen3")
