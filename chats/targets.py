"""chats.py: a whole chat → the ids after its prompt, and which of them the assistant says.

    <user> x <end> <assistant> | y1 <end> | \\n <user> z <end> \\n <assistant> | y2 <end>
    the prompt                   learned    given                               learned

A row has `messages`, or a prompt with its completion. The chat template renders the chat up to the
begin and up to the end of each turn of the assistant. These texts are prefixes of each other, and
so are their ids. Nothing is decoded. See docs/data.md.
"""
from functools import partial

import data
from data import ANSWERS, PROMPTS, Row, messages_of, not_null, with_system
from dist import SettingsError
from scoring.replies import is_message

COMPLETIONS = ("completion", "response", *ANSWERS)


def load(spec: str, tokenizer, args, eos_ids: list[int], *, seed: int = 0):
    """The rows of `spec`, each with its target, and a sentence with their counts.

    args: those of the script. eos_ids: what ends a turn; []: the model is not here.
    """
    make = partial(make_row, eos_ids=eos_ids)
    rows, note = data.load(spec, tokenizer, args.data_args, seed=seed, make=make)
    if not eos_ids:
        return rows, note
    lengths = sorted(len(row.target[0]) for row in rows)
    kept = [row for row in rows if len(row.target[0]) <= args.max_tokens]
    if not kept:
        raise SettingsError(
            f"{spec}: no chat is left; after its prompt the shortest has more than "
            f"{args.max_tokens} tokens: --max_tokens {lengths[0]} keeps it, {lengths[-1]} keeps "
            f"all.")
    learned = sum(sum(row.target[1]) for row in kept)
    return kept, (f"{note}; after the prompt {lengths[0]} to {lengths[len(kept) - 1]} tokens, "
                  f"{learned:,} in all to learn; left out: {len(rows) - len(kept)} longer than "
                  f"{args.max_tokens}")


def make_row(index: int, columns: dict, name: str, tokenizer, controls: list[str], args,
             eos_ids: list[int]) -> Row | None:
    """A row with its target. None: its prompt is empty."""
    prompt, replies = split(columns)
    if prompt is not None:
        columns = columns | {"prompt": prompt}
    "".join(m["content"] for m in replies).encode()  # a ValueError, as in data.make_row
    row = data.make_row(index, columns, name, tokenizer, controls, args)
    if row and eos_ids:
        asked = messages_of(columns, not_null(columns), args.prompt_template)
        if args.system is not None:
            asked = with_system(asked, args.system)
        texts = plain_texts(row.prompt, replies, tokenizer)
        if tokenizer.chat_template and not row.finished:
            texts = chat_texts(asked, replies, tokenizer)
        row.target = target(row.prompt, row.prompt_ids, texts, tokenizer, eos_ids)
    return row


def split(columns: dict) -> tuple[str | list[dict] | None, list[dict]]:
    """The prompt of a row, and the messages after it. The last one is the assistant's. None:
    --prompt_template makes the prompt, or there is none."""
    there = not_null(columns)
    if "messages" in there:
        chat = there["messages"]
        if not isinstance(chat, list) or not all(map(is_message, chat)):
            raise SettingsError('messages must be a list of {"role": text, "content": text}, not '
                                f"{repr(chat)[:80]}.")
        said = [i for i, m in enumerate(chat) if m["role"] == "assistant"]
        if not said:
            raise SettingsError("messages must have one of the role assistant.")
        return chat[:said[0]], chat[said[0]:said[-1] + 1]
    asked = [name for name in PROMPTS if name in there]
    answer = next((there[name] for name in COMPLETIONS if name in there), None)
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    if not isinstance(answer, list) or not answer or not all(map(is_message, answer)):
        raise SettingsError(f"a row to learn needs messages, or a prompt and a text in one of "
                            f"{', '.join(COMPLETIONS)}; this one has {', '.join(columns)}.")
    return there[asked[0]] if asked else None, answer


# ---- texts: the chat up to the end of a message, and whether the assistant says its last part ----

def chat_texts(asked: list[dict], replies: list[dict], tokenizer):
    """By the chat template. The turn's header is part of what is before the turn."""
    for k, message in enumerate(replies):
        if message["role"] != "assistant":
            continue
        chat = [*asked, *replies[:k + 1]]
        for messages, said in (chat[:-1], False), (chat, True):
            yield tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not said), said


def plain_texts(prompt: str, replies: list[dict], tokenizer):
    """Without a template, as in turns.Bridge: an empty line around what others say."""
    end = tokenizer.eos_token or ""
    text = prompt
    for message in replies:
        if message["role"] == "assistant":
            text += message["content"] + end
            yield text, True
        else:
            text += f"\n\n{message['content']}\n\n"
            yield text, False


# ---- ids ----

def target(text: str, prompt_ids: list[int], texts, tokenizer, eos_ids: list[int]):
    """(ids after the prompt, which of them are learned). A turn is learned with its end.

    Where the template ends no turn (GLM), the control token after it does.
    """
    ids, learned, is_open = list(prompt_ids), [], False
    for longer, said in texts:
        whole = extended(ids, text, longer, tokenizer)
        new = whole[len(ids):]
        ends = [i for i, token in enumerate(new) if token in eos_ids]
        spoken = 0  # how many of the new ids are learned
        if said:
            spoken = ends[-1] + 1 if ends else len(new)
            is_open = not ends
        elif is_open:
            if not ends or ends[0] > 0:
                raise SettingsError(f"the chat template has {longer[len(text):][:20]!r} after a "
                                    f"turn of the assistant, which is no end of a turn by "
                                    f"eos_token_id in generation_config.json.")
            spoken, is_open = 1, False
        learned += [True] * spoken + [False] * (len(new) - spoken)
        ids, text = whole, longer
    found = ids[len(prompt_ids):len(prompt_ids) + last_true(learned) + 1]
    learned = learned[:len(found)]
    if is_open:
        end = tokenizer.eos_token_id
        found.append(eos_ids[0] if end is None else end)
        learned.append(True)
    return found, learned


def last_true(flags: list[bool]) -> int:
    """The place of the last True; -1 if there is none."""
    return max((i for i, flag in enumerate(flags) if flag), default=-1)


def extended(ids: list[int], text: str, longer: str, tokenizer) -> list[int]:
    """The ids of `longer`, which begin with `ids`, those of `text`. Where a tokenizer would join
    tokens over the end of `text`, the rest has ids of its own, as in a rollout."""
    if not longer.startswith(text):
        at = next(i for i, c in enumerate(text) if longer[i:i + 1] != c)
        part = slice(max(0, at - 20), at + 20)
        raise SettingsError(
            f"the chat template rewrites what comes before a message: {text[part]!r} becomes "
            f"{longer[part]!r}. Would work: one row for each turn of the assistant, or a template "
            f"that leaves earlier turns as they are.")
    whole = tokenizer(longer, add_special_tokens=False)["input_ids"]
    if whole[:len(ids)] == ids:
        return whole
    end = tokenizer.eos_token or ""  # some tokenizers put a space before the first word
    rest = tokenizer(end + longer[len(text):], add_special_tokens=False)["input_ids"]
    return ids + (rest[1:] if end else rest)
