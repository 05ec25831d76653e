"""messages.py: messages as people store them → as chat templates want them.

Where they cannot be read a ValueError names the message and the key.
"""
import json
import re

from jinja2 import TemplateError

from errors import SettingsError

MARK = "<image>"  # a picture, in a text
KEYS = ("role", "content", "name", "tool_call_id", "weight")  # of a message: OpenAI's
ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # OpenAI's
SHAREGPT = {"human": "user", "gpt": "assistant"}
UNREAD = ("history", "functions", "videos", "audios")  # columns: lists that would change the prompt
PAGE = "docs/use/data_and_rewards.md has the forms, examples/convert.py converts others"
FORM = ('{"role": text, "content": text or [{"type": "text", "text": text}], '
        '"tool_calls": [{"function": {"name": text, "arguments": object}}], "weight": 0 or 1}')
CHAT = re.compile(r"""\s*\[\s*\{\s*["'](role|from|content|value)["']\s*:""")  # JSON, or Python's


def not_null(columns: dict) -> dict:
    """Without None and NaN."""
    return {column: value for column, value in columns.items()
            if value is not None and value == value}  # NaN differs from itself


def from_json(value):
    """What a JSON text says; other texts and values as they are."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def struct(column: str, value):
    """A text that begins as an object does is its JSON, as in a .csv."""
    if not str(value).startswith("{"):
        return value
    if isinstance(from_json(value), str):
        raise SettingsError(f"{column} must be an object or its JSON text, not {value!r:.300}.")
    return from_json(value)


def chat_of(column: str, value, role: str | None, image: str | None = None) -> list[dict]:
    """The messages of a column: OpenAI's or ShareGPT's, a list or its JSON text. Each content
    becomes a text; a weight stays where it is 0.

    role: of a plain text; None: it must be a chat. image: the text for a picture; None: refused.
    """
    if isinstance(value, str) and role and not CHAT.match(value):
        return [{"role": role, "content": value}]
    stored, found = from_json(value), []
    if not isinstance(stored, list):
        text = "text or " if role else ""
        raise ValueError(f"the {column} must be {text}a list of {FORM}, not {value!r:.300}")
    for i, m in enumerate(stored):
        try:
            found.append(message_of(m, image))
        except ValueError as wrong:
            raise ValueError(f"message {i} of {column}: its {wrong} cannot be used: {m!r:.300}. "
                             f"Would work: {FORM}") from None
    return found


def message_of(stored, image: str | None) -> dict:
    """ValueError: the key that is wrong."""
    m = not_null(stored) if isinstance(stored, dict) else {}
    if "from" in m and "role" not in m:
        m = {"role": m.pop("from"), "content": m.pop("value", None)} | m
    if not isinstance(m.get("role"), str):
        raise ValueError("role")
    m["role"] = SHAREGPT.get(m["role"], m["role"])
    calls = m.pop("tool_calls", None)
    if calls:
        m["tool_calls"] = [call_of(c) for c in (calls if isinstance(calls, list) else [calls])]
    m["content"] = text_of(m.get("content", "" if calls else None), image)
    weight = m.pop("weight", 1)
    if weight not in (0, 1):
        raise ValueError("weight")
    return m if weight or m["role"] != "assistant" else m | {"weight": 0}


def text_of(content, image: str | None) -> str:
    """The texts of its parts, one after another."""
    text, parts = "", content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        part = not_null(part) if isinstance(part, dict) else {}
        said = image if part == {"type": "image"} else part.get("text")
        if not isinstance(said, str) or part.get("type") not in ("text", "image"):
            raise ValueError("content")
        text += said
    return text


def call_of(stored) -> dict:
    """A call. Its arguments become an object: OpenAI's are a JSON text."""
    call = stored if isinstance(stored, dict) else {}
    function = call["function"] if isinstance(call.get("function"), dict) else {}
    arguments = from_json(function.get("arguments") or {})
    if not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
        raise ValueError("tool_calls")
    return not_null(call) | {"function": not_null(function) | {"arguments": arguments}}


# ---- what the chat template gets ----

def templated(messages: list[dict], tokenizer, options: dict, parts=None, **more) -> str:
    """The text that the chat template makes of them. SettingsError: it raises. parts: what it gets
    in the place of a content, by pictures/rows.py; None: the text."""
    if parts:
        messages = [m | {"content": parts(m["content"])} for m in messages]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options, **more)
    except (TemplateError, TypeError) as error:
        raise SettingsError(f"the chat template: {error}") from error


def render(messages: list[dict], tokenizer, finished: bool, options: dict, parts=None) -> str:
    """The text that the model sees. SettingsError: the chat template cannot write it."""
    if finished:
        if len(messages) > 1 or options:
            raise SettingsError("a finished chat text takes no --system, no tools and no other "
                                "messages.")
        return messages[0]["content"]
    if tokenizer.chat_template is None:
        return "\n\n".join(m["content"] for m in messages)
    goes_on = messages[-1]["role"] == "assistant"
    text = templated(messages, tokenizer, options, parts, add_generation_prompt=not goes_on,
                     continue_final_message=goes_on)
    for m in messages if text else ():
        said = m["content"].strip()  # Llama writes what a tool says as JSON
        if (m["role"] not in ("user", "assistant") and said not in text
                and json.dumps(said, ensure_ascii=False) not in text):
            raise SettingsError(f"the chat template leaves out the message of role {m['role']}.")
    return text


def options_of(columns: dict, messages: list[dict], tokenizer) -> dict:
    """What the chat template gets beside the messages: a row's tools, which are schemas, and its
    chat_template_kwargs. SettingsError: it has no place for them, or for a key or a role of a
    message that OpenAI's do not have."""
    there, template = not_null(columns), tokenizer.chat_template
    own, more = (from_json(there.get(key)) for key in ("tools", "chat_template_kwargs"))
    own, more = own or [], more or {}
    if not (isinstance(own, list) and all(isinstance(one, dict) for one in [*own, more])):
        raise SettingsError("tools must be a list of schemas and chat_template_kwargs an object, "
                            f"not {own!r:.300} and {more!r:.300}.")
    options = more | ({"tools": own} if own else {})
    meant = [key for m in messages for key, value in m.items()
             if key not in KEYS and value not in (None, "", [], {})]
    meant += [m["role"] for m in messages if m["role"] not in ROLES]
    unread = [name for name in UNREAD if there.get(name) and isinstance(there[name], list)]
    for key in [*options, *meant, *unread]:
        known = template == "" or re.search(rf"\b{re.escape(key)}\b", str(template))
        if key in unread or not known:
            raise SettingsError(f"the chat template of the model has no place for {key}. Would "
                                f"work: rows without it, or another model; {PAGE}.")
    return options
