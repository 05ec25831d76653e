"""eyes.py: a picture, from its file."""
import io

from errors import SettingsError

LARGEST = 50_000_000  # pixels of a picture: decoded it has 3 bytes for each


def opened(source: str | bytes):
    """A path, or the bytes of a file → a picture in RGB, upright. What is transparent is white, as
    it is for `vllm serve`, which gets the exported model; convert("RGB") alone would show what is
    stored below, mostly black."""
    from PIL import Image, ImageOps
    try:
        image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
        if not 0 < image.width * image.height <= LARGEST:  # by its header: nothing is decoded yet
            raise ValueError(f"{image.width} x {image.height} pixels")
        image = ImageOps.exif_transpose(image)
        if image.mode == "RGB" or not image.has_transparency_data:
            return image.convert("RGB")
        image, white = image.convert("RGBA"), Image.new("RGB", image.size, "white")
        white.paste(image, mask=image)
        return white
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        name = "its bytes" if isinstance(source, bytes) else source
        raise SettingsError(f"a picture must be a whole image file of 1 to {LARGEST:,} pixels, and "
                            f"{name} cannot be opened ({str(error)[:200]}).") from None
