"""eyes.py: a picture, from its file."""
import io
from contextlib import contextmanager, suppress
from pathlib import Path

from errors import SettingsError

LARGEST = 50_000_000  # pixels of a picture: decoded it has 3 bytes for each


def opened(source: str | bytes):
    """A path, or the bytes of a file → a picture in RGB, upright."""
    from PIL import Image
    name = "its bytes" if isinstance(source, bytes) else source
    with as_picture(name):
        # Not by the path: PIL maps some TIFF files into memory, and turns those in another way.
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
        return upright(Image.open(io.BytesIO(data)), name)


def upright(image, name: str):
    """A picture of PIL → the same in RGB, upright. What is transparent is white, as it is for
    `vllm serve`, which gets the exported model; convert("RGB") alone would show what is stored
    below, mostly black. name: of the picture, in a sentence."""
    from PIL import Image, ImageOps
    with as_picture(name):
        if not 0 < image.width * image.height <= LARGEST:  # by its header: nothing is decoded yet
            raise ValueError(f"{image.width} x {image.height} pixels")
        if image.mode[0] in "IF":  # convert("RGB") would cut all values above 255
            raise ValueError(f"its mode is {image.mode}")
        image = ImageOps.exif_transpose(image)
        if image.mode == "RGB" or not image.has_transparency_data:
            return image.convert("RGB")
        image, white = image.convert("RGBA"), Image.new("RGB", image.size, "white")
        white.paste(image, mask=image)
        return white


def is_picture(data: bytes) -> bool:
    """Whether bytes begin as an image file does."""
    from PIL import Image
    with suppress(OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        Image.open(io.BytesIO(data))
        return True
    return False


@contextmanager
def as_picture(name: str):
    """Turns an exception of PIL into a SettingsError."""
    from PIL import Image
    try:
        yield
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise SettingsError(
            f"a picture must be a whole image file of 1 to {LARGEST:,} pixels with 8 bits a "
            f"channel, and {name} cannot be opened ({str(error)[:200]}).") from None
