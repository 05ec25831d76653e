"""limits.py: the model has a position and an embedding for each token.

An id outside the vocabulary ends an engine in the middle of a run:
https://github.com/OpenRLHF/OpenRLHF/issues/1117
"""
from data import Row


def model_limits(args, config, rows: list[Row]) -> list[str]:
    """Returns a sentence for each thing that the model or its engine cannot take: sequences longer
    than its positions, and rows with ids outside its vocabulary."""
    found, text = [], config.get_text_config()
    prompt, longest = args.max_prompt_tokens, args.max_tokens
    room = text.to_dict().get("max_position_embeddings")
    if room and prompt + longest > room:
        works = f" Would work: --max_tokens {room - prompt}." if prompt < room else ""
        found.append(f"--max_prompt_tokens {prompt} + --max_tokens {longest} must be at most the "
                     f"{room} positions of {args.model}.{works}")
    for row in rows:
        largest = max(row.prompt_ids, default=None)
        if largest is None or largest >= text.vocab_size:  # it would break the engine
            found.append(f"--model {args.model}: row {row.number} of {row.source} must have tokens "
                         f"with ids below {text.vocab_size} (the largest is {largest}).")
            break
    return found
