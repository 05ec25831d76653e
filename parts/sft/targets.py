"""targets.py: a whole chat → the ids after its prompt, and which of them the assistant says.

    <user> x <end> <assistant> | y1 <end> | \\n <user> z <end> \\n <assistant> | y2 <end>
    the prompt                   learned    given                               learned

The chat template renders the chat up to the begin and up to the end of each turn that is learned.
A turn ends where the engine would stop: what a template writes after that is left out (Phi-3's puts
`<|endoftext|>` after the last turn). So the texts are prefixes of each other, and so are their ids.
"""
import json
import re
from dataclasses import dataclass, replace
from os.path import commonprefix

import data
from chat_template import Marks, ids_after, options_of, prompt_ids, render, texts_of
from data import Row
from errors import SettingsError
from messages import CHATS, PROMPTS, chat_of, first_of, from_json, messages_of, not_null

ONE_EACH = 'Would work: one row for each turn to learn, with "weight": 0 in the turns before it.'
# A row that has both is learned by its solution, and scored by its answer.
COMPLETIONS = "completion", "response", "solution", "answer", "ground_truth", "target", "output"


@dataclass
class LearnedRow(Row):
    """A row with what the assistant says."""
    target: tuple[list[int], list[bool]] | None = None  # ids after the prompt; which are learned

    @property
    def ids(self) -> list[int]:
        """See data.Row."""
        return self.prompt_ids + self.target[0]

    def digested(self, of_file) -> list:
        """See data.Row."""
        return [*super().digested(of_file), self.target]


def keep(rows: list[LearnedRow], spec: str, most: int) -> tuple[list[LearnedRow], str]:
    """Those with at most so many tokens after the prompt, and a sentence with their counts."""
    lengths = sorted(len(row.target[0]) for row in rows)
    kept = [row for row in rows if len(row.target[0]) <= most]
    if not kept:
        raise SettingsError(
            f"{spec}: no chat is left; after its prompt the shortest has more than {most} tokens: "
            f"--max_tokens {lengths[0]} keeps it, {lengths[-1]} keeps all.")
    learned = sum(sum(row.target[1]) for row in kept)
    return kept, (f"; after the prompt {lengths[0]} to {lengths[len(kept) - 1]} tokens, "
                  f"{learned:,} in all to learn; left out: {len(rows) - len(kept)} longer than "
                  f"{most}")


def make_row(index: int, columns: dict, name: str, tokenizer, marks: Marks, args,
             eos_ids: list[int]) -> LearnedRow | None:
    """In the place of data.make_row. None: nothing of it is learned."""
    columns = {column: data.plain(value, column) for column, value in columns.items()}
    prompt, replies = split(columns)
    learned, asked = (first_of(names, columns) for names in ((*CHATS, *COMPLETIONS), PROMPTS))
    if prompt is not None:
        columns = columns | {"prompt": prompt}
    json.dumps(replies, ensure_ascii=False, default=str).encode()  # as in data.make_row
    row, asked_of = begun(index, columns, name, tokenizer, marks, args)
    if not row:
        return None
    marks.check(replies)
    options = options_of(columns, [*asked_of, *replies], tokenizer)
    unasked = row.origins["prompt"] is None
    if unasked:
        row = headed(row, [*asked_of, replies[0]], tokenizer, options)
    texts = plain_texts(row.prompt, replies, tokenizer)
    if tokenizer.chat_template and not row.rendered:
        texts = chat_texts(asked_of, replies, tokenizer, options, row.prompt if unasked else None)
    ids, marked = target(row.prompt, row.prompt_ids, texts, tokenizer, eos_ids)
    if not row.prompt_ids:  # no token stands before the first one, so nothing predicts it
        row, ids, marked = replace(row, prompt_ids=ids[:1]), ids[1:], marked[1:]
    asked = None if unasked else learned if learned in CHATS else asked or row.origins["prompt"]
    origins = {"prompt": asked, "learned": learned}
    return LearnedRow(**vars(row) | {"origins": origins}, target=(ids, marked)) if ids else None


def begun(index: int, columns: dict, name: str, tokenizer, marks: Marks, args):
    """The row before what is learned, and the messages of its prompt. Where nobody asks, as in
    pre-training, a question stands in, so that all else is checked; origins["prompt"] is None."""
    asked = messages_of(columns, args.prompt_template, args.system)
    if asked or args.prompt_template:
        return data.make_row(index, columns, name, tokenizer, marks, args), asked
    stored = columns.get("prompt")
    chat = chat_of("prompt", stored, "user") if stored and str(stored).strip() else []
    silent = [m for m in chat[-1:] if m["role"] == "user"]  # it has no words
    question = {"role": "user", "content": "?"}
    beside = columns | {"prompt": [*chat[:len(chat) - len(silent)], question]}
    row = data.make_row(index, beside, name, tokenizer, marks, args)
    asked = [*messages_of(beside, None, args.system)[:-1], *silent]
    return replace(row, columns=columns, origins={"prompt": None}), asked


def headed(row: Row, chat: list[dict], tokenizer, options: dict) -> Row:
    """The row whose prompt is what the template writes before the words of the chat's last
    message, or without a template the messages before it."""
    plain = tokenizer.chat_template is None
    header = render(chat[:-1], tokenizer, options) if plain else commonprefix([
        render([*chat[:-1], {"role": chat[-1]["role"], "content": words}], tokenizer, options)
        for words in ("0", "1")])
    ids = prompt_ids(header or "0", tokenizer, plain)
    words = [] if header else tokenizer("0", add_special_tokens=False)["input_ids"]
    return replace(row, prompt=header, prompt_ids=ids[:len(ids) - len(words)])


def split(columns: dict) -> tuple[str | list[dict] | None, list[dict]]:
    """The prompt of a row, and the messages after it. The last one is the assistant's. None:
    --prompt_template makes the prompt, or there is none."""
    there = not_null(columns)
    column = first_of((*CHATS, *COMPLETIONS), there)
    if column is None:
        raise SettingsError(f"a row to learn needs messages, or a prompt and a text in one of "
                            f"{', '.join(COMPLETIONS)}; this one has {', '.join(columns)}.")
    for name, value in there.items():
        read = from_json(value.lower() if isinstance(value, str) else value)  # "False" of a .csv
        if re.search("label|weight|mask|kto_tag|(^|_)(loss|train)(_|$)", name) and (
                isinstance(read, list) or isinstance(read, int | float) and read != 1):
            raise SettingsError(f"its {name} is {value!r:.300}, and {column} would be learned all "
                                "the same.")
    if column in CHATS:
        chat = chat_of(column, there[column], None)
        first = next((i for i, m in enumerate(chat) if is_learned(m)), len(chat))
        while first and chat[first - 1]["role"] == "assistant":
            first -= 1
        prompt, replies = chat[:first], chat[first:]
    else:
        replies = chat_of(column, there[column], "assistant")
        prompt = there.get(first_of(PROMPTS, there))
    said = [i for i, m in enumerate(replies) if is_learned(m)]
    if not said:
        raise SettingsError("a chat to learn needs a message of the role assistant whose weight is "
                            "not 0.")
    return prompt, replies[:said[-1] + 1]


def is_learned(message: dict) -> bool:
    """Does the assistant say it, with a weight that is not 0?"""
    return message["role"] == "assistant" and "weight" not in message


# ---- texts: for each turn that is learned (its message, the chat before it, the chat with it) ----

def chat_texts(asked: list[dict], replies: list[dict], tokenizer, options: dict,
               header: str | None):
    """By the chat template. The turn's header is part of what is before the turn. header: what
    stands before the first one, where nobody asks for it."""
    for k, message in enumerate(replies):
        if is_learned(message):
            chat, before = [*asked, *replies[:k + 1]], header
            if k or header is None:
                before = render(chat[:-1], tokenizer, options, add_generation_prompt=True)
            yield message, before, render(chat, tokenizer, options)


def plain_texts(prompt: str, replies: list[dict], tokenizer):
    """Without a template, as in turns.Bridge: an empty line around what others say."""
    text = prompt
    for message in replies:
        before, said = text, message["content"]
        assistant = message["role"] == "assistant"
        text += said + (tokenizer.eos_token or "") if assistant else f"\n\n{said}\n\n"
        if is_learned(message):
            yield message, before, text


# ---- ids ----

def target(text: str, prompt_ids: list[int], texts, tokenizer, eos_ids: list[int]):
    """(ids after the prompt, which of them are learned). A turn is learned with its end.

    Where the template ends no turn (GLM), the control token after it does.
    """
    ids, learned, is_open, last = list(prompt_ids), [], False, None
    for message, before, whole in texts:
        check(text, before, whole, message, last)
        given = extended(ids, text, before, tokenizer)
        marks = [False] * (len(given) - len(ids))
        if is_open:
            if not marks or given[len(ids)] not in eos_ids:
                raise SettingsError(f"the chat template has {before[len(text):][:20]!r} after a "
                                    f"turn of the assistant, which is no end of a turn by "
                                    f"eos_token_id in generation_config.json. {ONE_EACH}")
            marks[0] = True
        text, is_open = up_to_end(before, whole, texts_of(eos_ids, tokenizer))
        ids, last = extended(given, before, text, tokenizer), message
        learned += marks + [True] * (len(ids) - len(given))
    found = ids[len(prompt_ids):]
    if is_open:
        end = tokenizer.eos_token_id
        found.append(end if end in eos_ids else eos_ids[0])
        learned.append(True)
    return found, learned


def check(text: str, before: str, whole: str, message: dict, last: dict | None) -> None:
    """SettingsError: the template writes the chat in another way once it goes on. text: up to the
    end of `last`, the turn learned before; before, whole: without and with `message`."""
    said, same = message["content"], commonprefix([before, whole])
    if not before.startswith(text):
        at, old = len(commonprefix([before, text])), repr(last["content"]) if last else "the prompt"
        raise SettingsError(f"the chat template rewrites {old:.80} before {said!r:.80}: "
                            f"{text[at:]!r:.60} becomes {before[at:]!r:.60}. {ONE_EACH}")
    words = without_space(said)
    if words not in without_space(whole)[max(0, 1 + len(without_space(same)) - len(words)):]:
        raise SettingsError(
            f"the chat template leaves out words of {said!r:.80}: {whole[len(same):]!r:.60}. Would "
            f"work: a prompt that is its own text up to {before[-30:]!r}, with a completion.")
    if opened := before[len(same):]:
        raise SettingsError(
            f"the chat template begins a turn with {opened!r:.80} where the model is asked, and "
            f"{said!r:.80} does not. Would work: {opened + said!r:.80}.")


def without_space(text: str) -> str:
    """Templates trim words, and put lines between them."""
    return "".join(text.split())


def up_to_end(text: str, longer: str, ends: list[str]) -> tuple[str, bool]:
    """`longer` up to the first end after `text`, where the engine stops; whether there is none. The
    words hold none: Marks.check."""
    places = [longer.find(end, len(text)) + len(end) for end in ends if end in longer[len(text):]]
    return longer[:min(places, default=None)], not places


def extended(ids: list[int], text: str, longer: str, tokenizer) -> list[int]:
    """The ids of `longer`, which begin with `ids`, those of `text`. Where a tokenizer would join
    tokens over the end of `text`, the rest has ids of its own, as in a rollout."""
    whole = tokenizer(longer, add_special_tokens=False)["input_ids"]
    if whole[:len(ids)] == ids:
        return whole
    return ids + ids_after(longer[len(text):], tokenizer)
