"""Models of the hub by their names, without weights and without the network."""
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from architecture import Shape
from examples import tiny
from model_files import shape_from

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "vocab_size")
MIXTURE = dict(head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
MODELS = {
    "tiny": ("qwen2", (128, 256, 2, 4, 4, 320), {}),
    "Qwen2.5-0.5B": ("qwen2", (896, 4864, 24, 14, 2, 151936), {}),
    "Qwen2.5-1.5B": ("qwen2", (1536, 8960, 28, 12, 2, 151936), {}),
    "Qwen2.5-7B": ("qwen2", (3584, 18944, 28, 28, 4, 152064), dict(tie_word_embeddings=False)),
    "Qwen3-0.6B": ("qwen3", (1024, 3072, 28, 16, 8, 151936), {}),
    "Qwen3-30B-A3B": ("qwen3_moe", (2048, 6144, 48, 32, 4, 151936),
                      dict(tie_word_embeddings=False) | MIXTURE),
    "Llama-3.2-1B": ("llama", (2048, 8192, 16, 32, 8, 128256), {})}


def config_of(name: str, layers: int = 0):
    """layers: fewer than it has; 0: all."""
    family, sizes, more = MODELS[name.rpartition("/")[2].removesuffix("-Instruct")]
    sizes = dict(zip(SIZES, sizes, strict=True))
    sizes["num_hidden_layers"] = layers or sizes["num_hidden_layers"]
    return AutoConfig.for_model(family, max_position_embeddings=32768,
                                **dict(tie_word_embeddings=True) | sizes | more)


def shape_of(name: str, layers: int = 0) -> Shape:
    with torch.device("meta"):
        return shape_from(AutoModelForCausalLM.from_config(config_of(name, layers)))


def in_cache(folder: Path, *names: str) -> dict[str, str]:
    """A cache of the hub that has these models' small files, with tiny.py's tokenizer → what the
    environment needs to use it."""
    commit = "0" * 40
    for name in names:
        place = folder / f"models--{name.replace('/', '--')}"
        files = place / "snapshots" / commit
        config_of(name).save_pretrained(files)
        tiny.make_tokenizer().save_pretrained(files)
        (place / "refs").mkdir()
        (place / "refs/main").write_text(commit)
    return {"HF_HUB_CACHE": str(folder), "HF_HUB_OFFLINE": "1"}
