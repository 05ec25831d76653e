"""eyes.py: a picture, from its file to tokens and pixels, as the model's own processor makes them.

Idefics3 scales a picture to a longest edge and cuts it into square tiles. Each tile becomes a fixed
number of tokens, and so does the whole, scaled to one tile.     https://arxiv.org/abs/2408.12637
"""
import io

from errors import SettingsError

LARGEST = 50_000_000  # pixels of a picture: decoded it has 3 bytes for each


def opened(source: str | bytes):
    """A path, or the bytes of a file → a picture in RGB, upright."""
    from PIL import Image, ImageOps
    try:
        image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
        if not 0 < image.width * image.height <= LARGEST:  # by its header: nothing is decoded yet
            raise ValueError(f"{image.width} x {image.height} pixels")
        return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        name = "its bytes" if isinstance(source, bytes) else source
        raise SettingsError(f"a picture must be a whole image file of 1 to {LARGEST:,} pixels, and "
                            f"{name} cannot be opened ({str(error)[:200]}).") from None


class Eyes:
    """The processor of an Idefics3. limit: most tokens of a picture; 0: as the model has it."""

    def __init__(self, folder: str, config, limit: int = 0):
        from transformers import AutoProcessor
        self.processor, self.token = AutoProcessor.from_pretrained(folder), config.image_token_id
        self.images = self.processor.image_processor
        self.tile, self.usual = (size["longest_edge"] for size in (
            self.images.max_image_size, self.images.size))
        for tiles in range(max(1, self.usual // self.tile), 0, -1):  # of an edge
            self.size = {"longest_edge": tiles * self.tile}
            self.most = len(self.ids_of([tiles * self.tile] * 2))  # a square has the most tokens
            if self.most <= (limit or self.most):
                break
        else:
            raise SettingsError(f"--max_image_tokens must be at least {self.most}, the tokens of "
                                f"one tile (got {limit}).")
        self.bytes = 12 * self.tile**2 * (self.most // self.processor.image_seq_len)  # its pixels

    @property
    def kind(self) -> tuple:
        """Two models with equal ones take the same ids and the same pixels."""
        return self.token, self.processor.image_seq_len, self.images.to_dict()

    def ids_of(self, size) -> list[int]:
        """(width, height) → what stands for such a picture in a prompt."""
        _, rows, cols = self.images.get_number_of_image_patches(
            size[1], size[0], {"size": self.size})
        text = self.processor.replace_image_token({"rows": [[rows]], "cols": [[cols]]}, 0)
        return self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]

    def pixels(self, sources):
        """Of the pictures of a prompt, as float32: (tiles, 3, tile, tile)."""
        images = [opened(source) for source in sources]
        return self.images([images], size=self.size, return_tensors="pt")["pixel_values"][0]
