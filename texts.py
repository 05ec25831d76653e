"""texts.py: a tokenizer's texts: what begins and ends them, and whether it is the folder's own."""
import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from jinja2 import TemplateError

from errors import SettingsError


def templated(messages: list[dict], tokenizer, options: dict, **more) -> str:
    """Returns the text that the chat template makes of the messages. Its `strftime_now` reads the
    tokenizer's `clock`, which inputs.py sets to when the run began. Raises a SettingsError if the
    template raises an error.
    """
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, **options, **more,
            strftime_now=getattr(tokenizer, "clock", datetime.now().strftime))
    except (TemplateError, TypeError) as error:
        raise SettingsError(f"the chat template: {error}") from error


# ---- what begins and what ends ----

def prompt_ids(text: str, tokenizer, plain: bool) -> list[int]:
    """Returns the ids of a prompt. plain: with what the tokenizer puts before a text (BOS), and
    without what it puts after. Raises a SettingsError if the prompt ends in the end token, where a
    completion would end.
    """
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if plain:
        whole, n = tokenizer(text)["input_ids"], len(ids)
        ids = whole[:next((i + n for i in range(len(whole)) if whole[i:i + n] == ids), None)]
    if ids[1:] and ids[-1] == tokenizer.eos_token_id:
        raise SettingsError(f"the prompt must not end in {tokenizer.eos_token}, where a completion "
                            f"ends (see its text, and the chat template).")
    return ids


def ids_after(text: str, tokenizer) -> list[int]:
    """Returns the ids of a text that follows a control token: after it some tokenizers put no space
    before the first word.
    """
    known = tokenizer.added_tokens_decoder.values()
    mark = next((t.content for t in known if t.special and not t.rstrip), "")
    ids = tokenizer(mark + text, add_special_tokens=False)["input_ids"]
    return ids[1:] if mark else ids


def eos_ids(source: str, tokenizer) -> list[int]:
    """Returns the ids that end a completion, by the model's files, the tokenizer and the chat
    template. source: the model's folder. Raises a SettingsError if a file names something else than
    ids.
    """
    path = Path(source) / "generation_config.json"
    found = json.loads((path if path.exists() else path.with_name("config.json")).read_text())
    ids = found.get("eos_token_id", found.get("text_config", {}).get("eos_token_id"))
    ids = ids if isinstance(ids, list) else [ids]
    if any(i is not None and type(i) is not int for i in ids):
        raise SettingsError(f"{path}: eos_token_id must be the number of a token or a list of "
                            f"numbers, not {ids!r}.")
    ends = tokenizer.convert_tokens_to_ids(marks_of(tokenizer).end)
    return sorted({i for i in [*ids, *ends, tokenizer.eos_token_id] if i is not None})


def texts_of(ids: list[int], tokenizer) -> list[str]:
    """Returns the texts of those ids that are control tokens."""
    known = tokenizer.added_tokens_decoder
    return [known[i].content for i in ids if i in known]


class Marks(NamedTuple):
    """The control tokens of a tokenizer and its chat template."""
    begins: list[str]  # of a chat or a message
    end: list[str]  # the one, if any, that ends the assistant's
    silent: list[str]  # all that begin, end or pad: no words
    normal: Callable[[str], str] = str  # the tokenizer's normalizer, such as NFKC

    def check(self, said) -> None:
        """Raises a SettingsError if messages or schemas hold one of `silent`, or if the tokenizer's
        normalizer makes one of their words.
        """
        text = json.dumps(said, ensure_ascii=False, default=str)
        texts = text, self.normal(text)
        for mark in self.silent:
            forms = [json.dumps(form, ensure_ascii=False)[1:-1]  # a quote in it is \" there
                     for form in (mark, self.normal(mark).strip("▁") or mark)]
            if any(form in text for form in forms for text in texts):
                raise SettingsError(f"its words hold {mark}, which begins, ends or pads a text of "
                                    "this model. Would work: without it.")


def reader(tokenizer, eos_ids: list[int]):
    """Returns a function that decodes ids for a reward: without tokens that end, begin or pad.
    Other control tokens, such as <think>, are words of the model.
    """
    texts, known = marks_of(tokenizer, eos_ids).silent, tokenizer.added_tokens_decoder
    silent = {i for i, t in known.items() if t.content in texts}

    def read(ids) -> str:
        ids = [int(i) for i in ids]
        if ids and ids[-1] in eos_ids:  # it may be an ordinary token
            ids.pop()
        return tokenizer.decode([i for i in ids if i not in silent], skip_special_tokens=False,
                                clean_up_tokenization_spaces=False)
    return read


def marks_of(tokenizer, eos_ids=()) -> Marks:
    """Finds the control tokens that begin and end messages, by rendering small chats. The end of
    the assistant's message is what the template writes there, or else what begins the next message
    (GLM).
    """
    known = [t for t in tokenizer.added_tokens_decoder.values() if t.content]
    controls = [t.content for t in known
                if t.special or re.fullmatch(r"[<\[].+[>\]]", t.content)]
    token = "|".join(map(re.escape, sorted(controls, key=len, reverse=True))) or "(?!)"

    def written(*roles: str) -> list[list[str]]:
        """What comes first before, between and after messages: tokens, with a role among them."""
        text, chat = "", [{"role": role, "content": "QX7"} for role in roles]
        if tokenizer.chat_template:
            with suppress(SettingsError, ValueError, KeyError):  # it takes no such chat
                text = templated(chat, tokenizer, {})
        runs = [re.match(rf"((\s*({token}))+(\w+({token}))?)?", part)[0]
                for part in text.split("QX7")]
        return [re.findall(token, run) for run in runs] + [[]] * 3

    before, header, closing, *_ = written("user", "assistant")
    again, system = written("user", "assistant", "user")[2], written("system", "user")[0]
    header = [t for t in header if t not in closing][:1]  # <think> may follow
    begins = [t for t in before + system + again + header if t not in closing]
    begins, end = [t for t in [tokenizer.bos_token, *begins] if t], (closing + again)[:1]
    silent = {*begins, *end, *texts_of(eos_ids, tokenizer), tokenizer.eos_token,
              tokenizer.pad_token}
    backend = getattr(tokenizer, "backend_tokenizer", None)  # None: it is not of `tokenizers`
    normal = backend.normalizer.normalize_str if backend and backend.normalizer else str
    return Marks(begins, end, [t.content for t in known if t.content in silent], normal)


# ---- one reading of a text ----

# What tokenizer_config.json may say so that transformers 4 and 5, and vLLM, take tokenizer.json as
# it is. For some model_types (qwen2) transformers 5 heeds the first only beside an auto_map.
EDITS = [{"tokenizer_class": "PreTrainedTokenizerFast"}]
EDITS += [EDITS[0] | {"auto_map": {"AutoTokenizer": ["-.-", None]}}]


def check_tokenizer(tokenizer, folder: str, rows: list) -> None:
    """Checks on the texts of these rows that transformers' tokenizer reads a text as the folder's
    tokenizer.json does: to the same ids, and back to the same text, but for what its own normalizer
    changes. Raises a SettingsError that shows the first text of which this is not so.

    For many a tokenizer_class transformers 5 takes of tokenizer.json the vocabulary alone, and that
    class's pre_tokenizer and decoder: https://github.com/huggingface/transformers/issues/45488
    """
    from transformers import PreTrainedTokenizerFast
    path = Path(folder, "tokenizer.json")
    if not path.exists():  # a vocabulary alone: there is one reading
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
    """Returns what stands between the control tokens of a text, as tokenizer.json's normalizer has
    it, without white space at its ends: some control tokens take it, and some decoders (▁ is a
    space of sentencepiece).
    """
    marks = "|".join(re.escape(t.content) for t in tokenizer.added_tokens_decoder.values())
    normalizer = tokenizer.backend_tokenizer.normalizer
    parts = re.split(marks or "(?!)", text)
    return [(normalizer.normalize_str(part) if normalizer else part).replace("▁", " ").strip()
            for part in parts]


def works(folder: str, text: str, right: tuple) -> str:
    """Returns the first of EDITS with which transformers reads this text right, tried on a copy of
    the folder.
    """
    from transformers import AutoTokenizer
    for edit in EDITS:
        with TemporaryDirectory() as copy, suppress(Exception):  # transformers refuses it
            for path in Path(folder).glob("*.json"):
                shutil.copyfile(path, Path(copy, path.name))
            path = Path(copy, "tokenizer_config.json")
            path.write_text(json.dumps(json.loads(path.read_text()) | edit))
            if reading(AutoTokenizer.from_pretrained(copy), text) == right:
                return f"{json.dumps(edit)[1:-1]} in its tokenizer_config.json"
    return "a tokenizer.json and a tokenizer_config.json that one save_pretrained wrote"
