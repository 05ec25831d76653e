"""qwen2_vl.py: Qwen2-VL. A picture keeps its shape: it becomes a grid of tokens, each a square of
2 x 2 patches. A token's position has three numbers: time, row and column.

https://arxiv.org/abs/2409.12191
"""
from typing import ClassVar

import numpy as np
import torch

from errors import SettingsError
from pictures.eyes import opened

CLASS = "Qwen2VLForConditionalGeneration"
TEXT, TOWER = "language_model", ("visual",)
ASPECT = 200  # of a picture's sides: the model's processor refuses more
INSTALL = ("pip install torchvision==0.28.0, which beside a CPU build of torch needs "
           "--index-url https://download.pytorch.org/whl/cpu")


class Eyes:
    """See idefics3.Eyes."""
    others: ClassVar[dict] = {"video": 0}

    def __init__(self, folder: str, config, least: int = 0, most: int = 0):
        try:
            from transformers.models.qwen2_vl import image_processing_qwen2_vl as qwen
        except Exception as error:  # a build for another torch raises a RuntimeError
            raise SettingsError(f"the pictures of a {config.model_type} need torchvision, and its "
                                f"import fails ({str(error)[:200]}). Would work: {INSTALL}."
                                ) from None
        self.images, self.fit = qwen.Qwen2VLImageProcessor.from_pretrained(folder), qwen.smart_resize
        self.token, tower, wrong = config.image_token_id, config.vision_config, []
        for theirs, ours in ("patch_size", "patch_size"), ("merge_size", "spatial_merge_size"), (
                "temporal_patch_size", "temporal_patch_size"):
            if getattr(self.images, theirs) != getattr(tower, ours):
                wrong.append(theirs)
        if wrong or not self.images.do_resize:
            raise ValueError(f"its {' and '.join(wrong) or 'do_resize'} is not the model's")
        self.side = tower.patch_size * tower.spatial_merge_size  # pixels of a token
        self.bytes = 12 * tower.temporal_patch_size * self.side**2
        own = [self.images.size[name] for name in ("shortest_edge", "longest_edge")]
        self.least, self.most = least, most
        least, most = max(least * self.side**2, own[0]), min(most * self.side**2 or own[1], own[1])
        if least > most:
            raise SettingsError(f"a picture's least tokens must be at most its most tokens: "
                                f"--min_image_tokens {least // self.side**2} and "
                                f"--max_image_tokens {most // self.side**2}")
        self.size = {"shortest_edge": least, "longest_edge": most}  # areas, by these names
        self.note = None

    @property
    def kind(self) -> tuple:
        return self.token, self.images.to_dict()

    def grid_of(self, size) -> tuple[int, int]:
        """(width, height) → rows and columns of tokens."""
        if max(size) > ASPECT * min(size):
            raise SettingsError(f"a side of a picture must be at most {ASPECT} times the other "
                                f"(it has {size[0]:,} x {size[1]:,} pixels).")
        height, width = self.fit(size[1], size[0], self.side, *self.size.values())
        rows, cols = height // self.side, width // self.side
        if self.most and rows * cols > self.most:
            raise SettingsError(f"a picture of {size[0]:,} x {size[1]:,} pixels has {rows * cols} "
                                f"tokens at its smallest: --max_image_tokens {self.most} is less.")
        return rows, cols

    def ids_of(self, size) -> list[int]:
        return [self.token] * int(np.prod(self.grid_of(size)))

    def positions(self, short_ids, sizes) -> np.ndarray:
        """(3, P) int32 of a prompt: each token is one step behind what came before it. A picture
        takes as many steps as its longer side has tokens."""
        parts, start, rest = [], 0, iter(sizes)
        for token in short_ids:
            grid = self.grid_of(next(rest)) if token == self.token else (1, 1)
            parts.append(start + np.indices((1, *grid), np.int32).reshape(3, -1))
            start += max(grid)
        return np.concatenate(parts, 1)

    def pixels(self, sources) -> tuple:
        """Of the pictures of a prompt: float32 (patches, pixels of one), and each one's grid of
        patches, (n, 3)."""
        images = [opened(source) for source in sources]
        found = self.images(images, size=self.size, return_tensors="pt")
        return found["pixel_values"], found["image_grid_thw"]


def unserved(config):
    yield from unserved_text(config)
    yield "another hidden_act in its tower", config.vision_config.hidden_act != "quick_gelu"
    yield "another spatial_merge_size", config.vision_config.spatial_merge_size != 2


def unserved_text(config):
    """Of all Qwen-VL."""
    text = config.get_text_config()
    rope = text.rope_parameters
    yield "use_sliding_window", getattr(text, "use_sliding_window", False)
    yield "no mrope_section", "mrope_section" not in rope
    yield f"rope_type {rope.get('rope_type')}", rope.get("rope_type", "default") != "default"
    rope = config.vision_config.rope_parameters or {}
    yield "another rope_theta in its tower", rope.get("rope_theta", 10000) != 10000
    yield "another rms_norm_eps for its tower", getattr(config, "rms_norm_eps", 1e-6) != 1e-6


def nothing(config) -> tuple:
    c = config.vision_config
    side = c.spatial_merge_size
    return (torch.ones(side**2, 3 * c.temporal_patch_size * c.patch_size**2),
            torch.tensor([[1, side, side]]))


def features(lm, pixels, grids) -> list:
    found = lm.base_model.visual(pixels, grid_thw=grids)
    return [found.pooler_output, *getattr(found, "deepstack_features", [])]


def sizes(config) -> dict:
    c = config.vision_config
    return grid_sizes(c) | dict(hidden=c.embed_dim, inner=int(2 * c.embed_dim * c.mlp_ratio))


def grid_sizes(c) -> dict:
    patches = c.spatial_merge_size**2
    return dict(patches=patches, pixels=patches * c.patch_size**2 * c.temporal_patch_size)
