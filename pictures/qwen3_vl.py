"""qwen3_vl.py: Qwen3-VL. As Qwen2-VL, but the first layers of the text model also get features of
inner layers of the tower (deepstack).     https://arxiv.org/abs/2511.21631
"""
from pictures.qwen2_vl import TEXT, TOWER, Eyes, features, nothing, unserved_text  # noqa: F401

CLASS = "Qwen3VLForConditionalGeneration"


def unserved(config):
    """See idefics3."""
    text = config.get_text_config()
    yield from unserved_text(config)
    yield "no mrope_interleaved", not text.rope_parameters.get("mrope_interleaved")
    yield "attention_bias", text.attention_bias
