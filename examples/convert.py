"""Rows of other systems as docs/use/data_and_rewards.md has them.

    python examples/convert.py chats rows.jsonl > mine.jsonl

    chats   lists of messages: LLaMA-Factory's sharegpt, ms-swift, axolotl, OpenAI; and `alpaca`
    alpaca  a question and an answer: `instruction` and `input`, or `query`; `output` or `response`;
            `history`. A `text` alone, for pre-training, is what the assistant says
    pandas  columns of objects and lists, which to_csv wrote as Python's own text

Other columns stay as they are. A value that has no place in a row is named with the number of its
row, and then nothing is written.
"""
import argparse
import ast
import base64
import io
import json
import re
import sys
import tokenize
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))
import data
from errors import SettingsError
from messages import ANSWERS, CHAT, PROMPTS, chat_of, first_of, from_json, not_null

LISTS = ("messages", "conversations", "conversation")
ASKED, SAID = ("instruction", "query", *PROMPTS), ("output", "response")
NOWHERE = ("videos", "video", "audios", "audio", "objects", "train_detail")
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "observation": "tool",
         "observations": "tool", "tool_response": "tool", "function_response": "tool",
         "function": "tool", "tool_call": "call", "function_call": "call", "user": "user",
         "assistant": "assistant", "system": "system", "tool": "tool"}
# Of a turn: whether it is learned. The first four are read in the assistant's turns only.
WEIGHTS = ("weight", "loss", "loss_scale", "loss_weight", "loss_mask", "mask", "train", "training",
           "trainable", "train_on_turn")
PICTURES = ("image_url", "image", "url", "path", "base64", "data", "source")  # keys of a part
MARK = "<image>"  # a picture, in a text


# ---- forms ----

def chats(row: dict) -> dict:
    """A row with a list of messages, or of the form `alpaca`. ValueError: what has no place."""
    if isinstance(row.get("input"), dict):  # OpenAI's, of preferences
        row = without(row, "input") | row["input"]
    column = first_of(LISTS, row)
    if column is None:
        return alpaca(row)
    turns = parsed(row[column])
    if not isinstance(turns, list):
        raise ValueError(f"its {column} must be a list of messages, not {turns!r:.80}")
    return row_of(without(row, column), turns)


def alpaca(row: dict) -> dict:
    """A row of a question and an answer, with the turns before them in `history`."""
    there = not_null(row)
    asked, said = only(ASKED, there), only(SAID, there)
    question = [there[name] for name in (asked, "input") if there.get(name)]
    if not all(isinstance(part, str) for part in question):
        raise ValueError(f"its question must be a text, not {question!r:.80}")
    turns = parsed(there.get("history")) or []
    if not isinstance(turns, list):
        raise ValueError(f"its history must be a list of pairs, not {turns!r:.80}")
    turns, used = [*turns, ["\n".join(question) or None, there.get(said)]], (*ASKED, *SAID)
    if turns == [[None, None]]:
        if column := first_of(LISTS, there):
            raise ValueError(f"alpaca reads no {column}. Would work: chats")
        if not there.get("text"):
            raise ValueError(f"a row needs one of {', '.join((*LISTS, *ASKED))}, or a text alone; "
                             f"it has {', '.join(there)}")
        turns, used = [[None, there["text"]]], (*used, "text")
    return row_of(without(row, *used, "input", "history"), turns)


def pandas(row: dict) -> dict:
    """Objects and lists that to_csv wrote as Python's own text. Other texts stay, such as "[INST]
    …". In a prompt or an answer so does a list of numbers: "[3, 1]" may be the text itself."""
    found = dict(row)
    for name, value in row.items():
        value = parsed(value)
        inner = value if isinstance(value, list) else [value]
        kinds = dict if name in PROMPTS else dict | str if name in ANSWERS else object
        form = CHAT if name in (*PROMPTS, *ANSWERS) else re.compile(r"\s*\[?\s*\{\s*['\"]\w+['\"]:")
        if isinstance(value, str) and form.match(value):
            raise ValueError(f"its {name} cannot be read as Python's text: {value!r:.80}")
        if isinstance(value, dict | list) and inner and all(isinstance(it, kinds) for it in inner):
            found[name] = value
    return found


FORMS = {"chats": chats, "alpaca": alpaca, "pandas": pandas}


def without(row: dict, *names: str) -> dict:
    """The other columns."""
    return {name: value for name, value in row.items() if name not in names}


def only(names: tuple, there: dict) -> str | None:
    """The one of these columns that has a text."""
    found = [name for name in names if there.get(name)]
    if len(found) > 1:
        raise ValueError(f"its {found[0]} and {found[1]} are the same part of a chat. Would work: "
                         "one of them")
    return found[0] if found else first_of(names, there)


def parsed(value):
    """What a text says as JSON or as Python writes it. Any other value stays as it is."""
    if not isinstance(value, str) or value.strip()[:1] not in ("{", "["):
        return value
    made = from_json(value)
    try:
        made = ast.literal_eval(with_commas(value)) if made is value else made
        json.dumps(made, default=as_text)  # a set is none of to_csv, but mathematics
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, tokenize.TokenError):
        return value
    keys = made if isinstance(made, dict) else ()
    return made if all(isinstance(key, str) for key in keys) else value


def with_commas(text: str) -> str:
    """Python's text of a list, with a comma between any two values: numpy writes none."""
    found, last = [], ""
    for token in tokenize.generate_tokens(io.StringIO(text.strip()).readline):
        value = token.type in (tokenize.STRING, tokenize.NUMBER)
        if (value or token.string in ("{", "[")) and last in ("value", "}", "]"):
            found.append(",")
        if token.string.strip():
            found.append(token.string)
            last = "value" if value else token.string
    return " ".join(found)


# ---- a chat ----

def row_of(rest: dict, turns: list) -> dict:
    """The row of these turns. rest: its other columns."""
    for name in NOWHERE:
        if rest.get(name):
            raise ValueError(f"a row has no place for its {name}. Would work: without it")
    chat, pictures = [], []
    for i, turn in enumerate(split(turns)):
        try:
            add(chat, not_null(turn), pictures)
        except ValueError as error:
            raise ValueError(f"message {i}: {error}: {turn!r:.200}") from None
    name = first_of(("system", "system_prompt"), rest)
    if name and rest[name] and chat and chat[0]["role"] != "system":
        chat, rest = [{"role": "system", "content": rest[name]}, *chat], without(rest, name)
    name = first_of(("tools", "functions"), rest)
    if name and (tools := parsed(rest[name])):
        rest = without(rest, name) | {"tools": schemas(tools)}
    if any(pictures):
        if not all(pictures) or rest.get("images") or rest.get("image"):
            raise ValueError("its pictures are in its messages, and in a column of their own too")
        rest = rest | {"images": pictures}
    return rest | {"messages": chat_of("messages", chat, None)}


def split(turns: list):
    """Each turn as a message. A pair of a history, and an object of ms-swift's `conversation`
    ({"human": text, "assistant": text}), have two."""
    for turn in turns:
        if isinstance(turn, list | tuple) and len(turn) == 2:
            turn = dict(zip(("user", "assistant"), turn, strict=True))
        if not isinstance(turn, dict):
            raise ValueError(f"a turn must be a message or a pair, not {turn!r:.80}")
        if turn.keys() & {"role", "from"}:
            yield turn
        elif not turn.keys() <= ROLES.keys():
            raise ValueError(f"a turn has no role: {turn!r:.80}")
        else:
            yield from ({"role": role, "content": text} for role, text in not_null(turn).items())


def add(chat: list[dict], turn: dict, pictures: list) -> None:
    """Adds a turn to a chat, and what it shows to the pictures."""
    role = str(turn.pop("role" if "role" in turn else "from", ""))
    role = ROLES.get(role.lower().replace("-", "_"), role)
    content = turn.pop("content" if "content" in turn else "value", None)
    for name in NOWHERE:
        if turn.get(name):
            raise ValueError(f"a chat has no place for its {name}")
    if not role:
        raise ValueError("it has no role")
    learned = learned_of(role, turn)
    calls = [*calls_of(turn.pop("function_call", None)), *calls_of(turn.pop("tool_calls", None))]
    last = chat[-1] if chat else {}
    if role == "call":
        role, calls, content = "assistant", calls_of(content), None
        if last.get("role") == role and last.get("weight", 1) == learned:
            # ms-swift has a message for each call, and another for the words before them.
            last["tool_calls"] = [*last.get("tool_calls", []), *calls]
            return
    found = turn | {"role": role, "content": words(content, pictures)}
    if calls:
        found |= {"tool_calls": calls, "content": found["content"] or ""}
    chat.append(found if learned else found | {"weight": 0})


def learned_of(role: str, turn: dict) -> int:
    """1 or 0, by the keys of WEIGHTS, which are taken out. A half has no place."""
    found = [1]
    for name in WEIGHTS:
        if (value := turn.pop(name, None)) is None:
            continue
        number = {"true": 1, "false": 0}.get(str(value).strip().lower(), from_json(value))
        if number not in (0, 1):
            raise ValueError(f"its {name} is {value!r:.80}, and a turn is learned or not: 1 or 0")
        if number and role not in ("assistant", "call") and name in WEIGHTS[4:]:
            raise ValueError(f"its {name} is {value!r}, and no turn of the role {role} is learned")
        found.append(int(number))
    return min(found)


def calls_of(stored) -> list[dict]:
    """Calls of tools in OpenAI's form, of one or of several, or of their text."""
    found, calls = parsed(stored), []
    for call in found if isinstance(found, list) else [found] if found else []:
        call = parsed(call)
        if not isinstance(call, dict):
            raise ValueError("its call of a tool is no object of JSON")
        if "function" not in call:
            if "arguments" not in call and "parameters" in call:  # Llama's word
                call = without(call, "parameters") | {"arguments": call["parameters"]}
            call = {"type": "function", "function": call}
        calls.append(call)
    return calls


def words(content, pictures: list):
    """A content as a text, with a mark in the place of each picture, which is added to pictures."""
    if not isinstance(content, list | dict):
        return content
    text = ""
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image", "image_url", "input_image"):
            pictures.append(picture(part))
            text += MARK
        elif kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            text += part["text"]
        else:
            raise ValueError("a part of its content is no text and no picture")
    return text


def picture(part: dict):
    """Its path, URL or bytes. None: it is in a column."""
    if part.get("detail", "auto") not in (None, "auto"):
        raise ValueError("a row has no place for its detail. Would work: --max_image_tokens")
    value = part.get(first_of(PICTURES, part))
    return picture(value) if isinstance(value, dict) else value


def schemas(tools) -> list[dict]:
    """Schemas of tools as transformers documents them: {"type": "function", "function": …}."""
    found = [parsed(tool) for tool in (tools if isinstance(tools, list) else [tools])]
    if not all(isinstance(tool, dict) for tool in found):
        raise ValueError(f"its tools must be schemas, not {tools!r:.80}")
    return [tool if "function" in tool else {"type": "function", "function": without(tool, "type")}
            for tool in found]


# ---- rows ----

def as_text(value) -> str:
    """What JSON has no type for: bytes of a picture, a date."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def converted(spec: str, form: str) -> list[str]:
    """The rows as lines of JSON. SettingsError: what has no place, with its row."""
    found = []
    for number, row in enumerate(data.read(spec)[0], 1):
        try:
            row = {name: data.plain(value, name) for name, value in row.items()}
            found.append(json.dumps(FORMS[form](row), default=as_text))
        except ValueError as error:
            raise SettingsError(f"{spec}, row {number}: {data.one_line(error)}.") from error
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("form", choices=FORMS)
    parser.add_argument("data", help="rows, as --data takes them")
    options = parser.parse_args()
    try:
        print("\n".join(converted(options.data, options.form)))
    except SettingsError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
