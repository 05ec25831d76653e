"""rows.py: the pictures of a row: in its columns, in its text, and in the ids of its prompt."""
import re
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from data import CHAT, CHATS, MARK, PROMPTS, Row, chat_of, not_null
from errors import SettingsError
from parts.pictures.eyes import opened

COLUMNS = ("images", "image")


class Pictures(NamedTuple):
    """Of a prompt."""
    sources: tuple[str | bytes, ...]  # paths, or the bytes of files: no pixels are held
    short_ids: list[int]  # the prompt with one token for each: the engine makes more of it itself
    places: list[int]  # where in the prompt's ids their features stand
    eyes: object  # of the model's family: idefics3.Eyes
    positions: list | None = None  # (3, P) of the prompt, if they have three axes
    bytes: int = 0  # of its pixels, as files have them and as the tower gets them


def parts_of(text: str) -> list[dict]:
    """Texts and pictures apart."""
    return [{"type": "image"} if part == MARK else {"type": "text", "text": part}
            for part in re.split(f"({MARK})", text) if part]


def make_row(index: int, columns: dict, name: str, tokenizer, marks, args, *,
             make, eyes, folder: Path) -> Row | None:
    """In the place of `make`, data.make_row or that of targets.py. folder: of the data."""
    sources = tuple(source_of(value, folder) for value in values_of(columns))
    columns = {column: value for column, value in columns.items() if column not in COLUMNS}
    columns |= {column: marked(column, columns[column], len(sources))
                for column in (*CHATS, *PROMPTS) if isinstance(columns.get(column), str | list)}
    asks = re.search("""['"]image['"]""", str(tokenizer.chat_template))  # for them apart
    row = make(index, columns, name, tokenizer, marks, args, parts=parts_of if asks else None)
    if row:
        place(row, sources, eyes)
    return row


def values_of(columns: dict) -> list:
    """What a row has in `images` or `image`."""
    found = next((value for name, value in not_null(columns).items() if name in COLUMNS), [])
    return found if isinstance(found, list) else [found]


def source_of(value, folder: Path) -> str | bytes:
    """A path beside the data, bytes, or the struct of `datasets` → a path or bytes."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str):
        value = str(folder / value)
        if not Path(value).is_file():
            raise SettingsError(f"there is no picture {value}.")
    elif not isinstance(value, bytes):
        raise SettingsError("a picture must be a path beside the data, the bytes of a file, or "
                            f"both in a struct, not {repr(value)[:80]}.")
    return value


def marked(column: str, prompt, count: int):
    """A prompt column with a mark for each picture: in front, unless it has marks."""
    if isinstance(prompt, str) and not CHAT.match(prompt):
        return prompt if MARK in prompt or not prompt.strip() else MARK * count + prompt
    chat = chat_of(column, prompt, None, MARK)
    asked = next((m for m in chat if m["role"] == "user"), None)
    if asked and MARK not in str(chat):
        asked["content"] = MARK * count + asked["content"]
    return chat


def place(row: Row, sources: tuple, eyes) -> None:
    """The row gets the ids of its pictures."""
    short, ids = row.prompt_ids, []
    if short.count(eyes.token) != len(sources):
        raise SettingsError(f"the prompt has {short.count(eyes.token)} places {MARK} and the row "
                            f"{len(sources)} pictures: they must be as many.")
    if row.target and eyes.token in row.target[0]:
        raise SettingsError(f"{MARK} is in what the assistant says; pictures are for prompts.")
    sizes = [opened(source).size for source in sources]
    rest = iter(sizes)
    for token in short:
        ids += eyes.ids_of(next(rest)) if token == eyes.token else [token]
    if sources:
        places = [i for i, token in enumerate(ids) if token == eyes.token]
        held = eyes.bytes * len(places) + sum(3 * width * height for width, height in sizes)
        row.prompt_ids, row.pictures = ids, Pictures(
            sources, short, places, eyes, eyes.positions(short, sizes), held)
        row.shown = {"images": [s if isinstance(s, str) else f"{crc32(s):x}" for s in sources]}
