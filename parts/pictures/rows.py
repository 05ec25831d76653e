"""rows.py: the pictures of a row: in its columns, in its text, and in the ids of its prompt."""
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from data import Row
from errors import SettingsError
from messages import CHAT, CHATS, PROMPTS, chat_of, from_json
from parts.pictures.eyes import opened
from parts.pictures.sources import (
    COLUMNS,
    KEYS,
    PARTS,
    is_of_objects,
    one_place,
    source_of,
    values_of,
)

MARK = "<image>"  # a picture, in a text


class Pictures(NamedTuple):
    """Of a prompt."""
    sources: tuple[str | bytes, ...]  # paths, or the bytes of files: no pixels are held
    short_ids: list[int]  # the prompt with one token for each: the engine makes more of it itself
    places: list[int]  # where in the prompt's ids their features stand
    eyes: object  # of the model's family: idefics3.Eyes
    positions: list | None = None  # (3, P) of the prompt, if they have three axes
    bytes: int = 0  # of its pixels, as files have them and as the tower gets them


@dataclass
class PicturedRow(Row):
    """A row whose prompt has pictures."""
    pictures: Pictures | None = None

    def digested(self, of_file) -> list:
        """See data.Row."""
        return [*super().digested(of_file), [
            of_file(it) if isinstance(it, str) else it for it in self.pictures.sources]]


@cache
def with_pictures(kind: type[Row]) -> type[Row]:
    """PicturedRow, of a row that a script extends in another way too."""
    @dataclass
    class Both(PicturedRow, kind):
        pass

    return PicturedRow if kind is Row else Both


def pictures_in(row: Row) -> Pictures | None:
    """None: text alone."""
    return row.pictures if isinstance(row, PicturedRow) else None


# ---- from columns ----

def folder_of(spec: str) -> Path:
    """Of the data: paths of pictures begin there. samples/ has them, and is read elsewhere."""
    return Path(re.sub(r"(?<=\.py):\w+$", "", spec)).expanduser().absolute().parent


def make_row(index: int, columns: dict, name: str, tokenizer, marks, args, *,
             make, eyes, folder: Path) -> Row | None:
    """In the place of `make`, data.make_row or that of a script. folder: of the data."""
    found, columns = values_of(columns), columns.copy()
    for column in (*CHATS, *PROMPTS):
        inside = []  # the pictures of a chat, which may hold them itself
        columns |= {column: in_texts(columns[column], inside)} if column in columns else {}
        if found and inside:
            raise one_place()
        found = found or inside
    sources = tuple(source_of(value, folder) for value in found)
    columns = {column: value for column, value in columns.items() if column not in COLUMNS}
    columns |= {column: marked(column, columns[column], len(sources))
                for column in (*CHATS, *PROMPTS) if isinstance(columns.get(column), str | list)}
    if re.search("""['"]image['"]""", str(tokenizer.chat_template)):  # it asks for them apart
        tokenizer = InParts(tokenizer)
    row = make(index, columns, name, tokenizer, marks, args)
    return row and placed(row, sources, eyes)


class InParts:
    """A tokenizer whose chat template gets each content as texts and pictures apart."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __getattr__(self, name: str):
        return getattr(self.tokenizer, name)

    def __call__(self, *args, **options):
        return self.tokenizer(*args, **options)

    def apply_chat_template(self, messages: list[dict], **options) -> str:
        """The tokenizer's own."""
        messages = [m | {"content": parts_of(m["content"])} for m in messages]
        return self.tokenizer.apply_chat_template(messages, **options)


def parts_of(text: str) -> list[dict]:
    """Texts and pictures apart."""
    return [{"type": "image"} if part == MARK else {"type": "text", "text": part}
            for part in re.split(f"({MARK})", text) if part]


def marked(column: str, prompt, count: int):
    """A prompt column with a mark for each picture: in front, unless it has marks."""
    if isinstance(prompt, str) and not CHAT.match(prompt):
        return prompt if MARK in prompt or not prompt.strip() else MARK * count + prompt
    chat = chat_of(column, prompt, None)
    asked = next((m for m in chat if m["role"] == "user"), None)
    if asked and MARK not in str(chat):
        asked["content"] = MARK * count + asked["content"]
    return chat


def in_texts(stored, found: list):
    """Messages, as stored, with a text in the place of each part that is a picture, which is added
    to `found` if the part holds it. JSON text and other values stay as they are."""
    if isinstance(stored, str) and CHAT.match(stored):
        return in_texts(from_json(stored), found)
    if is_of_objects(stored):
        stored = list(stored)
    if isinstance(stored, list | tuple):
        return [in_texts(value, found) for value in stored]
    if not isinstance(stored, Mapping):
        return stored
    if stored.get("type") in PARTS:
        if any(stored.get(key) is not None for key in KEYS):
            found.append(stored)
        return {"type": "text", "text": MARK}
    return {key: in_texts(value, found) for key, value in stored.items()}


# ---- in ids ----

def placed(row: Row, sources: tuple, eyes) -> Row:
    """The row with the ids of its pictures."""
    short, ids = row.prompt_ids, []
    if short.count(eyes.token) != len(sources):
        raise SettingsError(f"the prompt has {short.count(eyes.token)} places {MARK} and the row "
                            f"{len(sources)} pictures: they must be as many.")
    if eyes.token in getattr(row, "ids", short)[len(short):]:  # a row of sft.py has more ids
        raise SettingsError(f"{MARK} is in what the assistant says; pictures are for prompts.")
    if not sources:
        return row
    sizes = [opened(source).size for source in sources]
    rest = iter(sizes)
    for token in short:
        ids += eyes.ids_of(next(rest)) if token == eyes.token else [token]
    places = [i for i, token in enumerate(ids) if token == eyes.token]
    held = eyes.bytes * len(places) + sum(3 * width * height for width, height in sizes)
    pictures = Pictures(sources, short, places, eyes, eyes.positions(short, sizes), held)
    return with_pictures(type(row))(**vars(row) | {"prompt_ids": ids, "pictures": pictures})
