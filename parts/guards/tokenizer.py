"""tokenizer.py: transformers and vLLM read a text as the model's own tokenizer.json does.

transformers 5 takes the pre_tokenizer and the decoder of many models from a class, not from their
tokenizer.json: https://github.com/huggingface/transformers/issues/45488
"""
import json
import re
import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from errors import SettingsError

# Changes of tokenizer_config.json with which transformers 4 and 5, and vLLM, use tokenizer.json as
# it is. For some model_types (qwen2) transformers 5 respects the first only beside an auto_map.
EDITS = [{"tokenizer_class": "PreTrainedTokenizerFast"}]
EDITS += [EDITS[0] | {"auto_map": {"AutoTokenizer": ["-.-", None]}}]


def check_tokenizer(tokenizer, folder: str, rows: list) -> None:
    """Checks on the texts of these rows that transformers reads a text as the folder's
    tokenizer.json does: that it gives the same ids, and that these decode to the same text. Also
    checks that the ids decode to the original text, apart from what the normalizer of
    tokenizer.json changes. Raises a SettingsError that shows the first text for which this fails.

    For many a tokenizer_class, transformers 5 takes only the vocabulary from tokenizer.json, and
    takes the pre_tokenizer and the decoder from that class:
    https://github.com/huggingface/transformers/issues/45488
    """
    from transformers import PreTrainedTokenizerFast
    path = Path(folder, "tokenizer.json")
    if not path.exists():  # a folder with a vocabulary alone has one reading
        return
    own = PreTrainedTokenizerFast(tokenizer_file=str(path))
    for text in (text for row in rows for text in (row.prompt, str(row.answer))):
        right, given = reading(own, text), reading(tokenizer, text)
        pieces = [*re.findall(r"\S+\s+\S+", text), text]
        if right != given:
            piece = next(it for it in pieces if reading(own, it) != reading(tokenizer, it))
            (ids, back), (others, other) = reading(own, piece), reading(tokenizer, piece)
            raise SettingsError(
                f"{path} reads {piece!r:.60} as {ids[:9]} and writes {back!r:.60}; transformers "
                f"and vLLM take it for a {type(tokenizer).__name__}, which reads {others[:9]} and "
                f"writes {other!r:.60}. Would work: {works(folder, text, right)}.")
        if words(own, text) != words(own, right[1]):
            piece = next(it for it in pieces if words(own, it) != words(own, reading(own, it)[1]))
            raise SettingsError(
                f"{path} reads {piece!r:.60} and writes {reading(own, piece)[1]!r:.60}. Would "
                "work: the tokenizer.json with which the model was trained.")


def reading(tokenizer, text: str) -> tuple[list[int], str]:
    """Returns the ids of a text, and the text that these ids decode to."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids, tokenizer.decode(ids, skip_special_tokens=False,
                                 clean_up_tokenization_spaces=False)


def words(tokenizer, text: str) -> list[str]:
    """Returns the pieces of a text between its control tokens, as the normalizer of tokenizer.json
    changes them. White space at the ends of a piece is removed, because some control tokens and
    some decoders remove it (▁ is a space of sentencepiece).
    """
    marks = "|".join(re.escape(t.content) for t in tokenizer.added_tokens_decoder.values())
    normalizer = tokenizer.backend_tokenizer.normalizer
    parts = re.split(marks or "(?!)", text)
    return [(normalizer.normalize_str(part) if normalizer else part).replace("▁", " ").strip()
            for part in parts]


def works(folder: str, text: str, right: tuple) -> str:
    """Returns words for a message: the first of EDITS with which transformers gives the reading
    `right` (ids and decoded text, see `reading`) of this text. Each edit is tried on a copy of the
    folder. If none works, the words name the files to use instead.
    """
    from transformers import AutoTokenizer
    for edit in EDITS:
        with TemporaryDirectory() as copy, suppress(Exception):  # transformers may refuse the copy
            for path in Path(folder).glob("*.json"):
                shutil.copyfile(path, Path(copy, path.name))
            path = Path(copy, "tokenizer_config.json")
            path.write_text(json.dumps(json.loads(path.read_text()) | edit))
            if reading(AutoTokenizer.from_pretrained(copy), text) == right:
                return f"{json.dumps(edit)[1:-1]} in its tokenizer_config.json"
    return "a tokenizer.json and a tokenizer_config.json that one save_pretrained wrote"
