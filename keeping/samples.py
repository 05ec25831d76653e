"""samples.py: what is kept of completions for people to read: their texts, numbers and tokens."""
import reprlib

import numpy as np

from keeping.files import as_lines, write_whole
from keeping.log import Log
from trainer.batch import Sample

SHORT = reprlib.Repr()
SHORT.maxstring = 140  # characters


def token_row(s: Sample, decode) -> dict:
    """Lists with an item a token. Its numbers are 0 if a reply put it in. decode: the tokenizer's.
    """
    ids, sampled = s.completion.ids.tolist(), s.completion.sampled
    advantages = np.zeros(len(ids))
    advantages[sampled] = s.advantages
    numbers = {"engine_logprobs": s.completion.logprobs, "advantages": advantages}
    # Some tokenizers drop a space at the start: a token's text is the second of two.
    texts = {i: decode([i, i])[len(decode([i])):] for i in set(ids)}
    row = {"token_texts": [texts[i] for i in ids], "sampled": sampled.tolist()} | {
        name: np.round(np.asarray(x, np.float64), 7).tolist() for name, x in numbers.items()}
    if s.completion.steps is not None:  # of --carry
        row["steps"] = s.completion.steps.tolist()
    return row


def sample_row(s: Sample, decode=None) -> dict:
    """An object of samples/. With its tokens, if an update has learned from it. decode: the
    tokenizer's: the prompt is shown as the model saw it."""
    turns = s.completion.turns or [{"role": "assistant", "content": s.text}]
    asked = s.prompt.row
    ids = asked.pictures.short_ids if asked.pictures else asked.prompt_ids
    prompt = decode(ids, clean_up_tokenization_spaces=False) if decode else asked.prompt
    row = {"position": s.prompt.position, "prompt": prompt, "completion": s.text,
           "turns": turns, "answer": asked.answer, "reward": s.score.total,
           "rewards": s.score.parts, "advantage": s.advantage, "tokens": s.completion.tokens,
           "truncated": s.completion.truncated} | asked.shown
    if decode and s.advantages is not None:
        row |= token_row(s, decode)
    return row


def short(row: dict) -> str:
    """A line of the screen."""
    reward = "unscored" if row["reward"] is None else f"{row['reward']:g}"
    prompt, text = SHORT.repr(row["prompt"]), SHORT.repr(row["completion"])
    return f"    [{reward}] {prompt[1:-1]} -> {text[1:-1]}"


def write_samples(log: Log, name: str, samples: list[Sample], show: int = 0, decode=None):
    """Writes samples/NAME.jsonl. Prints `show` of them in short. Only rank 0 does."""
    if not log.writing:
        return
    rows = [sample_row(s, decode) for s in samples]
    write_whole(log.folder / f"samples/{name}.jsonl", as_lines(rows))
    for row in rows[::max(1, len(rows) // max(1, show))][:show]:
        log.say(short(row))
