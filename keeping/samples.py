"""samples.py: what is kept of completions for people to read: their texts, numbers and tokens."""
import reprlib

import numpy as np
import torch

from keeping.files import as_lines, write_whole
from keeping.log import Log
from trainer.batch import Batch, Sample

SHORT = reprlib.Repr()
SHORT.maxstring = 140  # characters


def look(run, samples: list[Sample]):
    """Adds the policy's log-probs and entropies of now to `looks`: (2, T). A collective."""
    batch, args = Batch(samples), run.args
    with run.log.time("look"):
        found = batch.score(
            run.world, args.update_tokens, "look",
            lambda m: torch.stack(run.policy.logprobs(m, args.temperature, "value")))  # (2, M)
    for s, span in zip(samples, batch.spans, strict=True):
        s.looks += (found[:, span],)


def token_row(s: Sample, decode) -> dict:
    """Lists with an item a token, in nats. decode: the tokenizer's."""
    ids, (before, entropies), (after, _) = s.completion.ids.tolist(), *s.looks
    numbers = {"engine_logprobs": s.completion.logprobs, "logprobs": before,
               "logprobs_after": after, "entropies": entropies,
               "advantages": np.broadcast_to(s.advantages, len(ids))}
    if s.completion.steps is not None:  # of --carry
        numbers["steps"] = s.completion.steps
    # Some tokenizers drop a space at the start: a token's text is the second of two.
    texts = {i: decode([i, i])[len(decode([i])):] for i in set(ids)}
    return {"token_texts": [texts[i] for i in ids], "sampled": s.completion.sampled.tolist()} | {
        name: np.round(np.asarray(x, np.float64), 7).tolist() for name, x in numbers.items()}


def sample_row(s: Sample, decode=None) -> dict:
    """An object of samples/. With its tokens, if the policy looked at them. decode: the
    tokenizer's: the prompt is shown as the model saw it."""
    turns = s.completion.turns or [{"role": "assistant", "content": s.text}]
    asked = s.prompt.row
    ids = asked.pictures.short_ids if asked.pictures else asked.prompt_ids
    prompt = decode(ids, clean_up_tokenization_spaces=False) if decode else asked.prompt
    row = {"position": s.prompt.position, "prompt": prompt, "completion": s.text,
           "turns": turns, "answer": asked.answer, "reward": s.score.total,
           "rewards": s.score.parts, "advantage": s.advantage, "tokens": s.completion.tokens,
           "truncated": s.completion.truncated} | asked.shown
    if s.looks:
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
