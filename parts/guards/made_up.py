"""made_up.py: a made-up completion is scored before the weights load.

A reward with a wrong result otherwise fails after the first rollout, or trains on it:
https://github.com/huggingface/trl/issues/6533
"""
from contextlib import closing
from dataclasses import replace

from batch import Sample
from data import Prompt
from errors import SettingsError
from rewards import Pool, item_of, weighted_sum


def try_once(args, rows: list, pool: Pool, warnings: dict) -> None:
    """Scores a made-up completion of the first row before the weights are loaded, if a reward comes
    from a file and none is `async def` (such a function calls a server). Raises a SettingsError if
    a result cannot be a reward. Adds only a warning if a function raises an error, is late or
    returns None, because it may work for a real completion; also if it has no `return` with a
    value. pool: from `check`.
    """
    for name in pool.silent:
        said = f"--reward {name} has no `return` with a value, so no completion has a reward."
        warnings[said] = "rollout/unscored"
    if pool.waits or pool.silent or not rows or not any(".py:" in spec for spec in args.reward):
        return
    row, text = rows[0], "a made-up completion"
    item = item_of(Sample(Prompt(0, row), text=text)) | {"tokens": len(text)}
    with closing(Pool(list(args.reward), replace(args, reward_workers=1))) as pool:
        pool.wait()
        size = args.group if pool.groups else 1
        *_, error = weighted_sum(pool.specs, pool.ask([item] * size, size)[0])
    if not error:
        return
    lines = error.strip().splitlines()
    why = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    said = f"--reward, for {text!r} of row {row.number} of {row.source}: {why}"
    if why.startswith("TypeError: a reward must be "):  # worker.py raises it for a wrong result
        raise SettingsError(said)
    warnings[f"{said}. It may work for real ones; then rollout/unscored stays 0."] = (
        "rollout/unscored")
