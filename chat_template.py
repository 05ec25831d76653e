"""chat_template.py: the chat template, and the control tokens that begin and end messages.

Top to bottom: `render` applies the chat template, and `prompt_text` gives the text of a prompt.
`prompt_ids` and the functions below it convert between texts and token ids; `marks_of` finds the
control tokens that begin and end messages.

"ids" are token ids. A control token is one of the tokenizer's added tokens, such as <|im_end|>.
"""
import json
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from jinja2 import TemplateError

import part
from errors import SettingsError
from messages import from_json, not_null

# transformers 5.23 and newer pass a function to a template as a text, which cannot be
# called. So `strftime_now` is a macro: it finds what the clock says in a dict, and raises an error
# for a format that is missing.
MISSING = "strftime_now has no text for the format "
DATED = ("{% macro strftime_now(format) %}{{ strftime_texts[format] if format in strftime_texts "
         f"else raise_exception('{MISSING}' ~ format) }}}}{{% endmacro %}}\n")

KEYS = ("tools", "chat_template_kwargs", "system", "system_prompt")  # for parts: columns of a chat
# Columns that are refused if they hold a value of this type, because it belongs to the prompt and
# would be left out. (A text column `history` is the school subject.)
UNREAD = {"history": list, "functions": list, "videos": list, "audios": list, "images": object,
          "image": object}


def render(messages: list[dict], tokenizer, options: dict, **more) -> str:
    """Returns the text that the chat template makes of the messages. Without a template, their
    texts are joined by blank lines. The template's function `strftime_now` reads the attribute
    `clock` of the tokenizer, which preflight.py sets to the time at which the run began.
    options, more: further arguments of the template. Raises a SettingsError if the template raises
    an error.
    """
    if tokenizer.chat_template is None:
        return "\n\n".join(m["content"] for m in messages)
    clock, texts = getattr(tokenizer, "clock", datetime.now().strftime), {}
    while True:  # once more for each format that the template asks for
        try:
            template = tokenizer.get_chat_template(
                options.get("chat_template"), options.get("tools"))
            if "strftime_now" in template:
                template = DATED + template
            return tokenizer.apply_chat_template(
                messages, tokenize=False, **options | {"chat_template": template}, **more,
                strftime_texts=texts)
        except (TemplateError, TypeError) as error:
            _, missing, form = str(error).partition(MISSING)
            if not missing or form in texts:
                raise SettingsError(f"the chat template: {error}") from error
            texts[form] = clock(form)


def prompt_text(messages: list[dict], tokenizer, options: dict) -> str:
    """Returns the text that the model sees. A chat that ends with an assistant message is
    continued. SettingsError: the template refuses the chat, writes nothing, or leaves out a message
    whose role is neither user nor assistant, as some do with a system message or a tool's answer.
    """
    goes_on = messages[-1]["role"] == "assistant"
    text = render(messages, tokenizer, options, add_generation_prompt=not goes_on,
                  continue_final_message=goes_on)
    if not text:
        raise SettingsError("the chat template writes nothing for it.")
    for m in messages:
        said = m["content"].strip()
        as_json = json.dumps(said, ensure_ascii=False)  # how Llama's template writes tool answers
        if m["role"] not in ("user", "assistant") and said not in text and as_json not in text:
            raise SettingsError(f"the chat template leaves out the message of role {m['role']}.")
    return text


def options_of(columns: dict, messages: list[dict], tokenizer) -> dict:
    """Returns what the chat template gets besides the messages: a row's tools (schemas) and its
    chat_template_kwargs. SettingsError: they have another format, the template has no place for
    part of the row, or the row has a column of UNREAD."""
    columns = not_null(columns)
    tools, options = (from_json(columns.get(key)) for key in ("tools", "chat_template_kwargs"))
    tools, options = tools or [], options or {}
    if not isinstance(tools, list) or not all(isinstance(it, dict) for it in [*tools, options]):
        raise SettingsError("tools must be a list of schemas and chat_template_kwargs an object, "
                            f"not {tools!r:.300} and {options!r:.300}.")
    if tools:
        options = options | {"tools": tools}
    for name, kind in UNREAD.items():
        if columns.get(name) and isinstance(columns[name], kind):
            raise no_place(name)
    part.check_chat(messages, options, tokenizer)
    return options


def no_place(name: str) -> SettingsError:
    """Returns the error for a value that a chat template does not use."""
    return SettingsError(
        f"the chat template of the model has no place for {name}. Would work: rows without it, or "
        "another model; docs/use/data_and_rewards.md has the forms, examples/convert.py converts "
        "others.")


# ---- texts ↔ ids ----

def prompt_ids(text: str, tokenizer, add_bos: bool) -> list[int]:
    """Returns the ids of a prompt. If `add_bos` is True, they begin with what the tokenizer puts
    before a text (BOS), but do not end with what it puts after one. Otherwise it adds nothing.
    Raises a SettingsError if the prompt ends in the end token, because a completion would end
    there.
    """
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if add_bos:
        whole, n = tokenizer(text)["input_ids"], len(ids)
        ids = whole[:next((i + n for i in range(len(whole)) if whole[i:i + n] == ids), None)]
    if ids[1:] and ids[-1] == tokenizer.eos_token_id:
        raise SettingsError(f"the prompt must not end in {tokenizer.eos_token}, where a completion "
                            f"ends (see its text, and the chat template).")
    return ids


def ids_after(text: str, tokenizer) -> list[int]:
    """Returns the ids of a text that follows a control token. They may differ from the ids of the
    same text by itself: after a control token some tokenizers omit the space before the first word.
    """
    known = tokenizer.added_tokens_decoder.values()
    mark = next((t.content for t in known if t.special and not t.rstrip), "")
    ids = tokenizer(mark + text, add_special_tokens=False)["input_ids"]
    return ids[1:] if mark else ids


def eos_ids(source: str, tokenizer) -> list[int]:
    """Returns the ids that end a completion, sorted. They are the eos_token_id of the model's
    generation_config.json (or else of its config.json), that of the tokenizer, and the token with
    which the chat template ends a message of the assistant. source: the model's folder. Raises a
    SettingsError if eos_token_id in the file is anything but ids.
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
    """Returns the texts of those of the ids that are control tokens."""
    known = tokenizer.added_tokens_decoder
    return [known[i].content for i in ids if i in known]


def decoder(tokenizer, eos_ids: list[int]):
    """Returns a function that decodes the ids of a completion (a list or array) into the text for a
    reward. The text leaves out the tokens that end, begin or pad a text. Other control tokens, such
    as <think>, stay in it as words of the model.
    """
    texts, known = marks_of(tokenizer, eos_ids).silent, tokenizer.added_tokens_decoder
    silent = {i for i, t in known.items() if t.content in texts}

    def decode(ids) -> str:
        ids = [int(i) for i in ids]
        if ids and ids[-1] in eos_ids:  # the end token may be an ordinary token
            ids.pop()
        return tokenizer.decode([i for i in ids if i not in silent], skip_special_tokens=False,
                                clean_up_tokenization_spaces=False)
    return decode


# ---- the control tokens that begin and end messages ----

class Marks(NamedTuple):
    """The control tokens of a tokenizer and its chat template, as texts."""
    begins: list[str]  # those that begin a chat or a message
    end: list[str]  # the one that ends the assistant's message, or none
    silent: list[str]  # all that begin, end or pad a text: they are no words
    normal: Callable[[str], str] = str  # the tokenizer's normalizer, such as NFKC

    def check(self, said) -> None:
        """Raises a SettingsError if the words of a row contain a control token of `silent`, or if
        the tokenizer's normalizer makes one out of them. said: messages or schemas of tools.
        """
        text = json.dumps(said, ensure_ascii=False, default=str)
        texts = text, self.normal(text)
        for mark in self.silent:
            forms = [json.dumps(form, ensure_ascii=False)[1:-1]  # a quote is \" in `text`
                     for form in (mark, self.normal(mark).strip("▁") or mark)]
            if any(form in text for form in forms for text in texts):
                raise SettingsError(f"its words hold {mark}, which begins, ends or pads a text of "
                                    "this model. Would work: without it.")


def marks_of(tokenizer, eos_ids=()) -> Marks:
    """Finds the control tokens that begin and end messages, by rendering small chats with the
    template. The token that ends the assistant's message is what the template writes there, or else
    what begins the next message (GLM). eos_ids: further ids that end a completion; their control
    tokens become `silent` too.
    """
    known = [t for t in tokenizer.added_tokens_decoder.values() if t.content]
    controls = [t.content for t in known
                if t.special or re.fullmatch(r"[<\[].+[>\]]", t.content)]
    token = "|".join(map(re.escape, sorted(controls, key=len, reverse=True))) or "(?!)"

    def written(*roles: str) -> list[list[str]]:
        """Renders a chat with these roles and one word in each message. Returns the control tokens
        with which the text begins, and those that directly follow each message. In the text, the
        name of a role may precede the last of them.
        """
        text, chat = "", [{"role": role, "content": "QX7"} for role in roles]
        if tokenizer.chat_template:
            with suppress(SettingsError, ValueError, KeyError):  # the template refuses such a chat
                text = render(chat, tokenizer, {})
        runs = [re.match(rf"((\s*({token}))+(\w+({token}))?)?", part)[0]
                for part in text.split("QX7")]
        return [re.findall(token, run) for run in runs] + [[]] * 3  # a refused chat has none

    # Of ChatML: [<|im_start|>], [<|im_end|>, <|im_start|>], [<|im_end|>].
    before, header, closing, *_ = written("user", "assistant")
    replied, system = written("user", "assistant", "user")[2], written("system", "user")[0]
    header = [t for t in header if t not in closing][:1]  # the first: <think> may follow
    begins = [t for t in before + system + replied + header if t not in closing]
    begins, end = [t for t in [tokenizer.bos_token, *begins] if t], (closing + replied)[:1]
    silent = {*begins, *end, *texts_of(eos_ids, tokenizer), tokenizer.eos_token,
              tokenizer.pad_token}
    # A tokenizer that does not use the library `tokenizers` has no backend_tokenizer.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    normal = backend.normalizer.normalize_str if backend and backend.normalizer else str
    return Marks(begins, end, [t.content for t in known if t.content in silent], normal)
