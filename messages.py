"""messages.py: a stored row → the messages of a chat, and the right answer.

A chat has OpenAI's form (`FORM`), or ShareGPT's; a plain text is one message of the user. Nothing
here knows a tokenizer. What cannot be read is a ValueError that names the message and the key.
docs/use/data_and_rewards.md has the columns and forms, examples/convert.py converts others.
"""
import json
import re

from answers import ANSWERS, last_boxed
from errors import SettingsError

PROMPTS = ("prompt", "question", "problem")
CHATS = ("messages", "conversations")
SHAREGPT = {"human": "user", "gpt": "assistant"}
FORM = ('{"role": text, "content": text or [{"type": "text", "text": text}], '
        '"tool_calls": [{"function": {"name": text, "arguments": object}}], "weight": 0 or 1}')
# How the text of a stored list of messages begins, as JSON or as Python writes it.
CHAT = re.compile(r"""\s*\[\s*\{\s*["'](role|from|content|value)["']\s*:""")


# ---- columns ----

def not_null(columns: dict) -> dict:
    """The columns that hold a value: neither None nor NaN."""
    return {column: value for column, value in columns.items()
            if value is not None and value == value}  # NaN differs from itself


def first_of(names: tuple[str, ...], columns: dict) -> str | None:
    """The first of these names that is a column with a value. None: there is none."""
    return next((name for name in names if name in not_null(columns)), None)


def from_json(value):
    """What a JSON text says. A text that is no JSON, and any other value, stays as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def answer_of(columns: dict) -> tuple[str | None, object]:
    """The column of the right answer, and the answer. (None, None): the row has none."""
    verl = from_json(columns.get("reward_model"))
    if isinstance(verl, dict) and verl.get("ground_truth") is not None:
        return "reward_model", verl["ground_truth"]
    column = first_of(ANSWERS, columns)
    answer = columns.get(column)
    box = last_boxed(answer) if column == "solution" and isinstance(answer, str) else None
    return ("the last box of solution", box) if box else (column, answer)


# ---- one column → messages ----

def chat_of(column: str, value, role: str | None) -> list[dict]:
    """The messages of a column: a list of them, or its JSON text.

    Each content becomes one text, and each call's arguments an object. `weight` is kept only where
    it is 0 (parts/sft reads it). role: whose message a plain text is; None: the column must hold a
    chat.
    """
    if isinstance(value, str) and role and not CHAT.match(value):
        return [{"role": role, "content": value}]
    stored, found = from_json(value), []
    if not isinstance(stored, list):
        text = "text or " if role else ""
        raise ValueError(f"the {column} must be {text}a list of {FORM}, not {value!r:.300}")
    for i, message in enumerate(stored):
        try:
            found.append(message_of(message))
        except ValueError as key:
            raise ValueError(f"message {i} of {column}: its {key} cannot be used: "
                             f"{message!r:.300}. Would work: {FORM}") from None
    return found


def message_of(stored) -> dict:
    """One message. ValueError: the name of the key that is wrong."""
    message = not_null(stored) if isinstance(stored, dict) else {}
    if "from" in message and "role" not in message:
        message = {"role": message.pop("from"), "content": message.pop("value", None)} | message
    if not isinstance(message.get("role"), str):
        raise ValueError("role")
    message["role"] = SHAREGPT.get(message["role"], message["role"])
    calls = message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = [
            call_of(call) for call in (calls if isinstance(calls, list) else [calls])]
    message["content"] = text_of(message.get("content", "" if calls else None))
    weight = message.pop("weight", 1)
    if weight not in (0, 1):
        raise ValueError("weight")
    return message if weight or message["role"] != "assistant" else message | {"weight": 0}


def text_of(content) -> str:
    """The text of a content, which is a text or a list of parts that hold texts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(
                part.get("text"), str):
            raise ValueError("content")
    return "".join(part["text"] for part in parts)


def call_of(stored) -> dict:
    """A call of a tool. Its arguments become an object: OpenAI's are a JSON text."""
    function = stored.get("function") if isinstance(stored, dict) else None
    function = function if isinstance(function, dict) else {}
    arguments = from_json(function.get("arguments") or {})
    if not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
        raise ValueError("tool_calls")
    return not_null(stored) | {"function": not_null(function) | {"arguments": arguments}}


# ---- a row → messages ----

def messages_of(columns: dict, prompt_template: str | None, system: str | None) -> list[dict]:
    """The chat of a row, which ends where the model is asked. []: the row asks nothing.

    prompt_template, system: the flags of these names. SettingsError: the row has no prompt column,
    or a column of CHATS ends with what the assistant says. (A `prompt` may: it is continued.)
    """
    there = not_null(columns)
    column = first_of((*PROMPTS, *CHATS), there)
    if not column and columns.keys() & {*PROMPTS}:
        return []
    messages = chat_of(column, there[column], "user") if column else []
    last = messages[-1] if messages else {"role": "user", "content": ""}
    answered = last["role"] == "assistant" and (column in CHATS or "tool_calls" in last)
    if prompt_template is not None and (answered or not column):
        last = {"role": "user", "content": fill_template(prompt_template, columns)}
        messages, prompt_template = [last], None
    elif answered:
        raise SettingsError(f"{column} ends with what the assistant says. Would work: a chat that "
                            "ends before it.")
    elif not column:
        raise SettingsError(f"no prompt column in ({', '.join(columns)}); it needs "
                            f"{', '.join(PROMPTS)}, or --prompt_template, such as "
                            "'{instruction} {input}' for Alpaca's.")
    asked = last["content"]
    if asked.strip() and prompt_template is not None:
        asked = fill_template(prompt_template, {"question": asked, **columns, "prompt": asked})
        messages = [*messages[:-1], last | {"content": asked}]
    if not asked.strip() and last["role"] != "tool":
        return []
    if system is not None:
        messages = [m for m in messages if m["role"] != "system"]
    else:
        system = there.get("system") or there.get("system_prompt") or None
    if system is not None and (not messages or messages[0]["role"] != "system"):
        messages = [*chat_of("system", system, "system"), *messages]
    return messages


def fill_template(prompt_template: str, columns: dict) -> str:
    """The --prompt_template with each {name} replaced by that column, except in the braces of
    LaTeX. SettingsError: it names no column, or one that the row does not have."""
    pattern = r"\\[A-Za-z]{2,}(?:\{[^{}]*\})+|\{([A-Za-z_]\w*)\}"
    names = {*re.findall(pattern, prompt_template)} - {""}
    if not names or names - columns.keys():
        raise SettingsError(f"--prompt_template {prompt_template!r} must name one or more columns "
                            f"of the row ({', '.join(columns)}); plain braces are {{ word }}.")
    there = {"": None} | not_null(columns)  # an empty cell is an empty text
    return re.sub(
        pattern, lambda match: str(there.get(match[1], "")) if match[1] else match[0],
        prompt_template)
