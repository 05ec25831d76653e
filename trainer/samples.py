"""samples.py: what a run keeps of a completion for people to read: its text, numbers and tokens."""
import reprlib

import numpy as np
import torch

from trainer.batch import Batch, Sample

SHORT = reprlib.Repr()
SHORT.maxstring = 140  # characters


def look(run, samples: list[Sample]):
    """Adds the policy's log-probs and entropies of now to `looks`: (2, T). A collective."""
    batch, args = Batch(samples), run.args
    found = torch.zeros(2, int(batch.lengths.sum()))  # (2, M)
    with run.log.time("look"), torch.no_grad():
        for micro in batch.micros(run.world, range(len(samples)), args.update_tokens, "look"):
            both = run.policy.logprobs(micro, args.temperature, "value")  # (b, t) each
            for whole, values in zip(found, both, strict=True):
                batch.put(whole, micro.rows, values.float().cpu())
        found = run.world.sum(found)
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
    """An object of samples/. With its tokens, if the policy looked at them."""
    turns = s.completion.turns or [{"role": "assistant", "content": s.text}]
    row = {"position": s.prompt.position, "prompt": s.prompt.row.prompt, "completion": s.text,
           "turns": turns, "answer": s.prompt.row.answer, "reward": s.score.total,
           "rewards": s.score.parts, "advantage": s.advantage, "tokens": s.completion.tokens,
           "truncated": s.completion.truncated}
    if s.looks:
        row |= token_row(s, decode)
    return row


def short(row: dict) -> str:
    """A line of the screen."""
    reward = "unscored" if row["reward"] is None else f"{row['reward']:g}"
    prompt, text = SHORT.repr(row["prompt"]), SHORT.repr(row["completion"])
    return f"    [{reward}] {prompt[1:-1]} -> {text[1:-1]}"
