"""idefics3.py: Idefics3 (SmolVLM). It scales a picture to a longest edge and cuts it into square
tiles. Each becomes a fixed number of tokens, and so does the whole, scaled to one tile.

https://arxiv.org/abs/2408.12637
"""
import torch

from errors import SettingsError
from parts.pictures.eyes import opened

# In transformers: the whole, and its parts.
TEXT = "text_model"
TOWER = ["vision_model", "connector"]


class Eyes:
    """A picture → ids and pixels, as the model's own processor makes them.

    least, most: tokens of a picture (--min_image_tokens, --max_image_tokens). 0: the model's own.
    """

    def __init__(self, folder: str, config, least: int = 0, most: int = 0):
        from transformers import AutoProcessor
        if least:
            raise SettingsError("--min_image_tokens must be 0: an idefics3 scales all pictures to "
                                "one longest edge.")
        self.processor, self.token = AutoProcessor.from_pretrained(folder), config.image_token_id
        self.images = self.processor.image_processor
        self.tile, usual = (size["longest_edge"] for size in (
            self.images.max_image_size, self.images.size))
        c = config.vision_config
        tokens = (c.image_size // c.patch_size // config.scale_factor) ** 2
        if (self.tile, self.processor.image_seq_len) != (c.image_size, tokens) or not (
                self.images.do_pad and self.images.do_resize):
            raise ValueError("its tiles or their tokens are not the model's, or its do_pad or "
                             "do_resize is off")
        self.bytes = 12 * self.tile**2 // self.processor.image_seq_len  # pixels of a token
        for tiles in range(max(1, usual // self.tile), 0, -1):  # of an edge
            self.size = {"longest_edge": tiles * self.tile}
            longest = len(self.ids_of([tiles * self.tile] * 2))  # a square has the most
            if longest <= (most or longest):
                break
        else:
            raise SettingsError(f"--max_image_tokens must be at least {longest}, the tokens of "
                                f"one tile (got {most}).")
        # Models with equal ones take the same ids and the same pixels.
        self.kind = self.token, self.processor.image_seq_len, self.images.to_dict()

    def ids_of(self, size) -> list[int]:
        """(width, height) → what stands for such a picture in a prompt."""
        _, rows, cols = self.images.get_number_of_image_patches(
            size[1], size[0], {"size": self.size})
        text = self.processor.replace_image_token({"rows": [[rows]], "cols": [[cols]]}, 0)
        return self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]

    def positions(self, short_ids, sizes) -> None:
        """A token's position is its place."""

    def pixels(self, sources) -> tuple:
        """Of the pictures of a prompt, as float32: (tiles, 3, tile, tile)."""
        images = [opened(source) for source in sources]
        return (self.images([images], size=self.size, return_tensors="pt")["pixel_values"][0],)


def nothing(config) -> tuple:
    """The smallest pixels."""
    side = config.vision_config.patch_size * config.scale_factor
    return (torch.ones(1, 3, side, side),)  # of zeros would be padding


def features(lm, pixels) -> list:
    """(n, H) of all pictures."""
    hidden = lm.base_model.vision_model(pixel_values=pixels).last_hidden_state
    return [lm.base_model.connector(hidden).flatten(0, 1)]
