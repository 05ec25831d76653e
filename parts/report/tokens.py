"""tokens.py: what the page needs of a token, for samples/."""
import numpy as np

from batch import Sample


def token_row(s: Sample, decode) -> dict:
    """Lists with an item a token. Its numbers are 0 if a reply put it in. {}: no update has learned
    from the completion. decode: the tokenizer's."""
    if decode is None or s.advantages is None:
        return {}
    ids, sampled = s.completion.ids.tolist(), s.completion.sampled
    advantages = np.zeros(len(ids))
    advantages[sampled] = s.advantages
    numbers = {"engine_logprobs": s.completion.logprobs, "advantages": advantages}
    # Some tokenizers drop a space at the start: a token's text is the second of two.
    texts = {i: decode([i, i])[len(decode([i])):] for i in set(ids)}
    return {"token_texts": [texts[i] for i in ids], "sampled": sampled.tolist()} | {
        name: np.round(np.asarray(x, np.float64), 7).tolist() for name, x in numbers.items()
        } | s.completion.shown()
