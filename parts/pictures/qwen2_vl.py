"""qwen2_vl.py: Qwen2-VL. A picture keeps its shape: it becomes a grid of tokens, each a square of
patches. A position has three numbers: time, row, column.     https://arxiv.org/abs/2409.12191

Qwen2.5-VL: most layers of its tower attend in windows.       https://arxiv.org/abs/2502.13923
Qwen3-VL: the first layers of the text model also get features of inner layers of the tower
(deepstack).                                                  https://arxiv.org/abs/2511.21631
"""
import numpy as np
import torch

from errors import SettingsError
from parts.pictures.eyes import opened

TEXT, TOWER = "language_model", ["visual"]
INSTALL = ("pip install torchvision==0.28.0; beside a CPU build of torch, with --index-url "
           "https://download.pytorch.org/whl/cpu")


class Eyes:
    """See idefics3.Eyes."""

    def __init__(self, folder: str, config, least: int = 0, most: int = 0):
        try:
            import torchvision  # noqa: F401
        except Exception as error:  # a build for another torch raises a RuntimeError
            raise SettingsError(
                f"the pictures of a {config.model_type} need torchvision, and its import fails "
                f"({str(error)[:200]}). Would work: {INSTALL}.") from None
        from transformers.models.qwen2_vl import image_processing_qwen2_vl as qwen
        images, c = qwen.Qwen2VLImageProcessor.from_pretrained(folder), config.vision_config
        if not images.do_resize or (
                images.patch_size, images.merge_size, images.temporal_patch_size) != (
                c.patch_size, c.spatial_merge_size, c.temporal_patch_size):
            raise ValueError("its do_resize is off, or its sizes of a patch are not the model's")
        self.images, self.fit, self.token = images, qwen.smart_resize, config.image_token_id
        self.side, self.most = c.patch_size * c.spatial_merge_size, most
        self.kind = self.token, images.to_dict()
        area = self.side**2  # pixels of a token
        self.bytes = 12 * c.temporal_patch_size * area
        low, high = (images.size[name] for name in ("shortest_edge", "longest_edge"))
        low, high = max(low, least * area), min(high, most * area or high)
        if low > high:
            raise SettingsError(
                f"--min_image_tokens {least} and --max_image_tokens {most} leave no size: a "
                f"picture has at least {-(-low // area)} and at most {high // area} tokens.")
        self.size = {"shortest_edge": low, "longest_edge": high}  # areas, in spite of their names

    def grid_of(self, size) -> tuple[int, int]:
        """(width, height) → rows and columns of tokens."""
        what = f"a picture of {size[0]:,} x {size[1]:,} pixels"
        if max(size) > 200 * min(size):  # the model's processor would raise
            raise SettingsError(f"{what} has a side that is more than 200 times the other.")
        height, width = self.fit(size[1], size[0], self.side, *self.size.values())
        grid = height // self.side, width // self.side
        if self.most and grid[0] * grid[1] > self.most:
            raise SettingsError(f"{what} has {grid[0] * grid[1]} tokens at its smallest, more than "
                                f"--max_image_tokens {self.most}.")
        return grid

    def ids_of(self, size) -> list[int]:
        """(width, height) → its tokens in a prompt."""
        rows, cols = self.grid_of(size)
        return [self.token] * (rows * cols)

    def positions(self, short_ids, sizes) -> list:
        """(3, P) of a prompt. A picture takes as many steps as its longer side has tokens."""
        parts, start, rest = [], 0, iter(sizes)
        for token in short_ids:
            grid = self.grid_of(next(rest)) if token == self.token else (1, 1)
            parts.append(start + np.indices((1, *grid), np.int32).reshape(3, -1))
            start += max(grid)
        return np.concatenate(parts, 1).tolist()

    def pixels(self, sources) -> tuple:
        """Of the pictures of a prompt: float32 (patches, pixels of one), and the grid of each, in
        patches: (n, 3)."""
        found = self.images([*map(opened, sources)], size=self.size, return_tensors="pt")
        return found["pixel_values"], found["image_grid_thw"]


def nothing(config) -> tuple:
    """The smallest pixels, and their grid (1, 3)."""
    c = config.vision_config
    n, size = c.spatial_merge_size, 3 * c.temporal_patch_size * c.patch_size**2
    return torch.ones(n * n, size), torch.tensor([[1, n, n]])


def features(lm, pixels, grids) -> list:
    """[(n, H) of all pictures, and those of inner layers, if it has such]."""
    found = lm.base_model.visual(pixels, grid_thw=grids)
    return [found.pooler_output, *getattr(found, "deepstack_features", [])]
