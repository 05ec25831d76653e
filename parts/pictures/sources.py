"""sources.py: what a row holds of a picture → a path, or the bytes of a file."""
import base64
import io
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from urllib.parse import unquote

import numpy as np

from errors import SettingsError
from messages import from_json
from parts.pictures.eyes import is_picture, upright

COLUMNS = ("images", "image")
PARTS = ("image", "image_url", "input_image")  # types of a part of a content that is a picture
KEYS = ("bytes", "path", "url", "image", "image_url", "base64", "data", "source")  # of a struct
BESIDE = {"type": {*PARTS, "base64", "url"}, "detail": {"auto"}}  # what else it may have
FORMS = ("a path beside the data, bytes, base64, a data: URL, a PIL image, an array (H, W, 3) of "
         "uint8, or a struct with one of these in `bytes`, `path` or `url`")


def values_of(columns: dict) -> list:
    """What a row has in `images` or `image`."""
    found = {name: listed(columns[name]) for name in COLUMNS if name in columns}
    found = [values for values in found.values() if values]
    if len(found) > 1:
        raise one_place()
    return found[0] if found else []


def one_place() -> SettingsError:
    """The error for pictures in two places of a row, of which nobody says the order."""
    return SettingsError("its pictures are in two places. Would work: all of them in images.")


def listed(value) -> list:
    """The pictures of a column, which may be JSON text. Nothing for null and NaN."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        value = from_json(value)
    if is_of_objects(value) or getattr(value, "ndim", None) == 4:  # pictures of one size
        value = list(value)
    if value is None or isinstance(value, float) and value != value:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def is_of_objects(value) -> bool:
    """Whether it is numpy's array of anything, as pandas has it in a cell."""
    return isinstance(value, np.ndarray) and value.dtype.hasobject


def source_of(value, folder: Path) -> str | bytes:
    """A path, or the bytes of a file. folder: of the data, where a path begins."""
    if isinstance(value, Mapping):
        return source_of(inner(value), folder)
    if isinstance(value, str | PurePath):
        return of_text(str(value), folder)
    if isinstance(value, io.BytesIO):
        return value.getvalue()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, list) and value and all(
            type(byte) is int and 0 <= byte < 256 for byte in value):  # bytes, as JSON has them
        return bytes(value)
    from PIL import Image
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        value = of_pixels(value)
    if not isinstance(value, Image.Image):
        raise SettingsError(f"its picture is {short(repr(value))}. Would work: {FORMS}.")
    file = io.BytesIO()
    upright(value, "it").save(file, "png", compress_level=1)
    return file.getvalue()


def inner(struct: Mapping):
    """The picture of a struct. SettingsError: it has none, or it asks for more, such as a size."""
    there = {key: value for key, value in struct.items()
             if value is not None and not (isinstance(value, str | bytes) and not value)}
    more = [key for key, value in there.items() if key not in KEYS and value not in BESIDE.get(
        key, ()) and not key.endswith(("_type", "format"))]
    found = [key for key in KEYS if key in there]
    if more or not found:
        raise SettingsError(f"its picture is a struct with {', '.join(more or struct)}. Would "
                            f"work: {FORMS}.")
    return there[found[0]]


def of_text(text: str, folder: Path) -> str | bytes:
    """Of a path, a file: URL, a data: URL or base64."""
    if text.startswith("data:"):
        head, _, body = text.partition(",")
        if not head.endswith(";base64") or (found := decoded(body)) is None:
            raise SettingsError(f"its picture is {short(text)}. Would work: "
                                "data:image/png;base64,… with valid base64.")
        return found
    scheme = re.match(r"([A-Za-z][\w+.-]*)://", text)
    if scheme and scheme[1].lower() != "file":
        raise SettingsError(f"its picture is {short(text)}, and a run fetches none. Would work: "
                            "the file itself, and its path beside the data.")
    names = [text]
    if scheme:
        rest = text[len(scheme[0]):].removeprefix("localhost")
        names = [unquote(rest), rest]
    for name in names:
        with suppress(OSError, ValueError):  # too long to be a path
            if (folder / name).is_file():
                return str(folder / name)
    found = decoded(text)
    if found and is_picture(found):
        return found
    raise SettingsError(f"there is no picture {short(str(folder / names[0]))}. Would work: a path "
                        f"of a file, from the folder of the data on.")


def decoded(text: str) -> bytes | None:
    """Of base64, also that of URLs, with or without line breaks and padding. None: it is none."""
    text = "".join(text.split()).translate(str.maketrans("-_", "+/")).rstrip("=")
    with suppress(ValueError):
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)


def of_pixels(value):
    """A picture of an array (H, W), (H, W, channels) or (channels, H, W) of uint8 or bool: gray,
    gray with opacity, RGB, RGB with opacity. None: it is another array."""
    from PIL import Image
    pixels, first = np.asarray(value), hasattr(value, "permute")  # torch has channels first
    if pixels.dtype == bool:
        pixels = pixels.astype(np.uint8) * 255
    channels = (1, 2, 3, 4)
    if pixels.ndim == 3 and pixels.shape[0] in channels and (
            first or pixels.shape[-1] not in channels):
        pixels = np.moveaxis(pixels, 0, -1)
    if pixels.ndim == 3 and pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    fits = pixels.ndim == 2 or pixels.ndim == 3 and pixels.shape[-1] in channels
    if pixels.dtype == np.uint8 and fits and pixels.size:
        return Image.fromarray(np.ascontiguousarray(pixels))


def short(text: str) -> str:
    """The begin of a text, for a sentence: a picture as text has thousands of characters."""
    text = " ".join(text.split())
    return text if len(text) <= 200 else f"{text[:60]}… ({len(text):,} characters)"
