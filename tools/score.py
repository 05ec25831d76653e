"""tools/score.py: a reward, tried on the completions that a run kept. Nothing is trained.

    python tools/score.py runs/NAME near.py:near          beside the reward that the run had
    python tools/score.py runs/NAME exact near.py:near:0.1 --show 5

For both it prints the mean, and in how many groups of two and more the rewards differ: only these
have a gradient.
Then come the completions of which they think most differently. samples/ keeps prompt, answer and
turns, and no other column of a row: a reward that needs one is refused.
"""
import argparse
import contextlib
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import log
import losses
import part
import rewards
from errors import SettingsError, command
from flags import CommonArgs
from tools.samples import read
from worker import ITEM

KEPT = {"prompt", "answer"}


def item_of(row: dict) -> dict:
    """What a worker gets of a completion (worker.ITEM)."""
    return {name: row.get(name, nothing) for name, nothing in ITEM.items()}


def groups_of(rows: list[dict]) -> list[list[int]]:
    """The places of each prompt's completions in a step."""
    found = {}
    for place, row in enumerate(rows):
        found.setdefault((row["file"], row["position"]), []).append(place)
    return [*found.values()]


def score(rows: list[dict], specs: list[str]) -> list[tuple]:
    """(reward, rewards, error) of each completion. SettingsError if a reward cannot load, or needs
    what is not kept."""
    args = CommonArgs(reward=tuple(specs))
    kind = part.pool(rewards.Pool, args, rewards.check(specs, args).waits)
    with contextlib.closing(kind(specs, args)) as pool:
        pool.wait()
        for name, column, _ in pool.needs:
            if column not in KEPT:
                raise SettingsError(f"{name} needs {column!r}, which samples/ does not keep. Would "
                                    f"work: a reward of completion, answer, prompt and turns.")
        sizes = {len(group) for group in groups_of(rows)}
        if pool.groups and len(sizes) > 1:
            raise SettingsError("a reward of whole groups needs groups of one size.")
        found = pool.ask([*map(item_of, rows)], sizes.pop() if pool.groups else 1)
        return [rewards.weighted_sum(pool.specs, one) for one in found]


def do_differ(rewards: list[float]) -> bool:
    return bool(rewards) and not losses.equal(max(rewards), min(rewards))


def summary(name: str, totals: list[float | None], groups: list[list[int]]) -> str:
    """The mean of the scored ones, and the share of groups with two different rewards."""
    scored = [total for total in totals if total is not None]
    differ = np.mean([do_differ([totals[i] for i in group if totals[i] is not None])
                      for group in groups if len(group) > 1] or [0.0])
    mean = f"{np.mean(scored):8.3f}" if scored else "    none"
    return f"{name:<30} mean {mean}   groups that differ {differ:6.1%}   unscored " \
           f"{len(totals) - len(scored)}"


def page(rows: list[dict], specs: list[str], show: int) -> str:
    found, kept = score(rows, specs), [row["reward"] for row in rows]
    new, groups = [reward for reward, _, _ in found], groups_of(rows)
    lines = [f"{len(rows):,} completions in {len(groups):,} groups",
             summary("the run's reward", kept, groups), summary(" ".join(specs), new, groups)]
    both = [i for i in range(len(rows)) if None not in (kept[i], new[i])]
    error = next((error for _, _, error in found if error), None)
    if error:
        lines.append(f"the first that has no score: {error}")
    most = sorted(both, key=lambda i: -abs(new[i] - kept[i]))[:show]
    most = [i for i in most if new[i] != kept[i]]
    lines += ["the largest differences:"] if most else []
    lines += [f"  {kept[i]:g} -> {new[i]:g} {log.short(rows[i]).lstrip()}" for i in most]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("rewards", nargs="+", metavar="REWARD")
    parser.add_argument("--show", type=int, default=5)
    args = parser.parse_args()
    rows = [row for row in read(args.run, "step") if not row["file"].startswith("eval")]
    if not rows:
        raise SettingsError(f"no completions in {args.run}/samples/")
    print(page(rows, args.rewards, args.show))


if __name__ == "__main__":
    command(main)
