"""qwen2_5_vl.py: Qwen2.5-VL. As Qwen2-VL, but most layers of its tower attend in windows, and its
MLP has a gate.     https://arxiv.org/abs/2502.13923
"""
from pictures.qwen2_vl import TEXT, TOWER, Eyes, features, nothing  # noqa: F401
from pictures.qwen2_vl import unserved_text as unserved  # noqa: F401

CLASS = "Qwen2_5_VLForConditionalGeneration"
