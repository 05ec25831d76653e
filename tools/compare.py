"""compare.py: two sets of runs, A and B: how they differ, and B - A with a 95 % interval.

    python tools/compare.py [--reward kk01] results/kk-coin.json -- runs/kk-0 runs/kk-1 runs/kk-2

    python tools/compare.py A ... -- B ... --again A ... -- B ...     keep B? (results/speedrun.md)

Compared are the reward of the last 10 steps that all runs have, and the last pass@1 that all have.
The interval (Student's t) is over seeds: it tells what other seeds would give. Equal seeds are
paired. There is no verdict with fewer than three seeds a side, or where seeds do not differ. An
interval over the rows of the last evaluations follows. It is of these models only, so it never
tells which method is better. Numbers that were measured differently are not compared: those of
other rewards or rows, or of other values of the flags in MEASURED.
"""
import argparse
import math
import re
import shlex
import sys
from itertools import chain
from pathlib import Path

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from errors import SettingsError, command
from files import read
from tools import plot, samples

SEEDS, ROWS = 3, 20  # an interval needs so many on each side
SAMPLED = "max_tokens stop system prompt_template reply max_turns job".split()
MEASURED = {"reward": ["data", "temperature", "max_prompt_tokens", *SAMPLED],
            "eval": ["eval_samples", "eval_temperature", "eval_pass", *SAMPLED]}
# They act on no number that is compared, or are compared otherwise.
OTHERS = set("""name seed began changes ranks resume save_every keep samples_every wandb logger
    report plan metrics timeout export target_reward target_eval eval_every
    row_digests reward_workers command update_tokens logprob_tokens critic_update_tokens
    critic_value_tokens gpu_memory_utilization kv_cache_gb max_num_seqs offload
    cpu_offload shard_size versions""".split())
NOTHING = "These runs do not tell"


# ---- how a run was made, and how its numbers were measured

def settings(run: plot.Run) -> dict[str, object]:
    """What is known of a run: its flags and versions; from a checkpoint also digests of rows and
    code. Of a file of results/: the flags of its command, and the job before them."""
    if "command" in run.args:
        job, *flags = re.split(r"\s--(?=[a-z])", run.args["command"])
        found = {name: shlex.split(value) for name, _, value in (f.partition(" ") for f in flags)}
        return found | {"job": job, "reward": run.args["reward"]}
    kept = run.path.glob("checkpoints/step_*/state.json")
    newest = max(kept, key=lambda path: plot.by_number(path.parent), default=None)
    found = read(newest)["settings"] if newest else {}
    code = {f"code of {path}": digest for path, digest in found.pop("code", {}).items()}
    return found | code | run.args | run.args.get("versions", {})


def known(run: plot.Run, name: str) -> bool:
    """Whether `settings` has the value of this flag, or the lack of it means the default."""
    return name in settings(run) or "command" in run.args


def text(value) -> str:
    """A flag's value as a command has it."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def values(runs, name: str) -> list[str]:
    """The values of a flag in the runs, each once. [] if it is not known of all of them. A command
    lacks what has its default, which is not known beside a run's folder."""
    if not all(known(run, name) for run in runs):
        return []
    found = [settings(run).get(name, "default") for run in runs]
    if "default" in found and any("command" not in run.args for run in runs):
        return []
    return sorted({*map(text, found)})


def rewards(run: plot.Run) -> dict[str, str]:
    """{NAME of reward/NAME: what computes it, without its weight}, the first reward first."""
    found, known_of = {}, settings(run)
    for spec in known_of.get("reward", ()):
        file, name = re.fullmatch(r"(?:(.+\.py):)?(\w+)(?::.+)?", spec).groups()
        digest = known_of.get(f"code of {file}", "")
        found[name] = f"{file}:{name} {digest}".strip() if file else name
    return found


def held_out(run: plot.Run) -> dict[str, object]:
    """What is known of a run's held-out rows: a digest; the rows themselves, if all were kept;
    their number; the flag."""
    count = [*run.metrics.get("eval/rows", {}).values()][-1:]
    rows = frozenset(samples.passed(run))
    return {"rows of --eval_data": settings(run).get("rows of --eval_data"),
            "held-out rows": rows if rows and [len(rows)] == count else None,
            "number of held-out rows": count[0] if count else None,
            "--eval_data": text(settings(run).get("eval_data") or "") or None}


def other_rows(runs) -> str:
    """Why the held-out rows of the runs are not the same. "": they are, as far as is known."""
    found = [held_out(run) for run in runs]
    for name in found[0]:
        of_each = [one[name] for one in found]
        if None not in of_each:
            if len({*of_each}) > 1:
                return f"other {name}"
            if name != "number of held-out rows":  # the same digest, rows or flag
                return ""
    return ""


def unlike(runs, name: str) -> list[str]:
    """Why a metric of these runs was not measured in the same way. []: it was, as far as known."""
    kind, _, part = name.partition("/")
    parts = [rewards(run) for run in runs]
    if kind == "eval":
        paid = [[*one.values()][:1] for one in parts]  # pass@1 is of the first reward
    elif part == "mean":
        paid = [sorted(settings(run).get("reward", ())) for run in runs]
    else:
        paid = [one.get(part) for one in parts]
    found = ["other rewards"] if any(one != paid[0] for one in paid) else []
    found += [f"--{flag} is {' or '.join(values(runs, flag))}".replace("--job is", "other jobs:")
              for flag in MEASURED[kind] if len(values(runs, flag)) > 1]
    if kind == "eval" and (why := other_rows(runs)):
        found.append(why)
    return found


def label(runs, name: str) -> str:
    """A flag with its dashes; the name of anything else."""
    flag = any(name in run.args or "command" in run.args for run in runs)
    return f"--{name}" if flag and name not in ("job", "script") else name


def differences(sides: list[dict[int, plot.Run]]) -> tuple[str, str]:
    """→ (how A and B differ, how the runs of a side differ among themselves, or "")."""
    runs = [run for side in sides for run in side.values()]
    names = sorted({*chain.from_iterable(map(settings, runs))} - OTHERS,
                   key=lambda name: (not label(runs, name).startswith("--"), name))  # flags first
    found, mixed = [], []
    for name in names:
        ours, theirs = (values(side.values(), name) for side in sides)
        what = label(runs, name)
        if ours != theirs and values(runs, name):
            found.append(f"{what} (A {' and '.join(ours)}; B {' and '.join(theirs)})")
        if what.startswith(("--", "code of")):
            mixed += [f"runs of {side} differ in {what} ({' and '.join(own)})"
                      for side, own in zip("AB", (ours, theirs), strict=True) if len(own) > 1]
    said = "A and B differ in " + ", ".join(found) if found else "A and B differ in no known flag"
    if files := sorted({run.args["command"] for run in runs if "command" in run.args}):
        said += f". Of files of results/ only the command is known: {'; '.join(files)}"
    return f"{said}.", "; ".join(mixed)


# ---- the numbers

def spread_of(numbers) -> float:
    """How far the numbers are apart. 0 where that may be rounding: those of results/ have four
    digits."""
    largest = np.abs(numbers).max()
    apart = np.ptp(numbers)
    return 0.0 if apart <= 2e-4 * 10 ** math.ceil(math.log10(largest or 1)) else apart


def test_of(a: dict, b: dict):
    """Student's t of b - a → (how, its interval), which is None if the numbers have no variance. a,
    b: a number for each seed or row."""
    ours, theirs = np.array([*a.values()]), np.array([*b.values()])
    if a.keys() == b.keys():
        theirs = np.array([b[key] for key in a])
        varies = spread_of([*ours, *theirs]) and spread_of(theirs - ours)
        how, test = f"paired, {len(a)}", stats.ttest_rel
    else:
        varies = spread_of(ours) or spread_of(theirs)
        how, test = f"Welch, {len(a)} and {len(b)}", lambda x, y: stats.ttest_ind(
            x, y, equal_var=False)
    return how, tuple(map(float, test(theirs, ours).confidence_interval())) if varies else None


def report(title: str, a: dict, b: dict, of: str, mixed: str = "") -> str:
    """The means of A and B, B - A, the interval over `of`, seeds or rows, and a verdict. mixed: how
    the runs of a side differ, and so have no spread of seeds."""
    least = {"seeds": SEEDS, "rows": ROWS}[of]
    mean_a, mean_b = (np.mean([*one.values()]) for one in (a, b))
    shown = f"{title}\n  A {mean_a:.3f}   B {mean_b:.3f}   B - A {mean_b - mean_a:+.3f}"
    if min(len(a), len(b)) < least:
        return f"{shown} (an interval needs {least} {of} a side)\n  {NOTHING}."
    how, ends = test_of(a, b)
    if not ends:
        return f"{shown} ({how} {of})\n  {NOTHING}: the {of} have no variance."
    low, high = ends
    verdict = f"{NOTHING}."
    if of == "rows":
        verdict = f"{NOTHING} which method is better: other seeds may differ otherwise."
    elif mixed:
        verdict = f"{NOTHING}: {mixed}."
    elif low > 0:
        verdict = f"B is better by {low:.3f} to {high:.3f}."
    elif high < 0:
        verdict = f"A is better by {-high:.3f} to {-low:.3f}."
    return f"{shown}, 95 %: {low:+.3f} to {high:+.3f} ({how} {of})\n  {verdict}"


def read_side(side: str, paths: list[str]) -> dict[int, plot.Run]:
    """The runs of a side, by seed."""
    runs = [run for path in paths for run in plot.runs_in(Path(path))]
    seeds = [run.args["seed"] for run in runs]
    if not runs or len({*seeds}) < len(seeds):
        raise SettingsError(f"set {side} has the seeds {seeds}; give one run of each seed.")
    return dict(zip(seeds, runs, strict=True))


def first_line(sides: list[dict[int, plot.Run]]) -> str:
    """What the intervals are of."""
    few, counts = min(map(len, sides)), f"{len(sides[0])} and {len(sides[1])} seeds"
    if few < SEEDS:
        return (f"{NOTHING} which of A and B is better: {counts} are too few for an interval over "
                f"seeds, and one over rows is of these models only.")
    return f"The intervals are over {counts} of A and B: they tell what other seeds would give."


def compare(sides: list[dict[int, plot.Run]], reward: str) -> list[str]:
    """What the intervals are of, how the runs differ, and what they tell, for each number that all
    have. SettingsError: they have none that was measured in the same way."""
    runs, texts, refused, absent = [run for side in sides for run in side.values()], [], [], []
    said, mixed = differences(sides)
    shared = sorted(set.intersection(*(set(rewards(run)) for run in runs)))  # names of rewards
    for name, last in (reward, 10), ("eval/pass@1", 1):
        steps = sorted(set.intersection(*(set(run.metrics.get(name, ())) for run in runs)))[-last:]
        if not steps or steps[-1] == 0:  # 0: not trained yet
            if name == reward:
                absent.append(f"no {name} in all runs")
            continue
        if why := unlike(runs, name):
            refused.append(f"{name} is not compared: {'; '.join(why)}.")
            works = [one for one in shared if not unlike(runs, f"reward/{one}")]
            if name == "reward/mean" and works:
                refused[-1] += f" Would work: --reward {works[0]}."
            continue
        means = [{seed: np.mean([run.metrics[name][step] for step in steps])
                  for seed, run in side.items()} for side in sides]
        texts.append(report(f"{name}, steps {steps[0]} to {steps[-1]}", *means, "seeds", mixed))
    found = [[samples.passed(run) for run in side.values()] for side in sides]
    rows = set.intersection(*(set(one) for side in found for one in side))
    if rows and not unlike(runs, "eval/pass@1"):
        means = [{row: np.mean([one[row] for one in side]) for row in rows} for side in found]
        texts.append(report("pass@1, rows of the last evaluation", *means, "rows"))
    if absent and reward != "reward/mean":  # pass@1 does not answer what was asked
        raise SettingsError(f"these runs share no step with {reward}. Would work: --reward "
                            f"{' or '.join(['mean', *shared])}.")
    if not texts:
        raise SettingsError("\n".join(refused) or (
            f"these runs share no step with {reward}, and no evaluation."))
    return [first_line(sides), said, *texts, *refused, *absent]


def keep(words: list[str]) -> None:
    """Compares twice, with other seeds of both sides the second time, and says whether to keep B:
    if the first interval over seeds is above 0 in both. --again stands between the two."""
    cut = words.index("--again")
    options = words[:2] if words[0] == "--reward" else []
    tried, seeds = (words[:cut], [*options, *words[cut + 1:]]), []
    for number, one in enumerate(tried, 1):
        print(f"comparison {number}")
        sides, name = sides_of(one)
        seeds.append({seed for side in sides for seed in side})
        found = compare(sides, name)
        print("\n".join(found))
        better = [text for text in found if "seeds)" in text][:1]
        if not (better and "B is better" in better[0]):
            print(f"Do not keep B: comparison {number} does not show that it is better.")
            return
    if seeds[0] & seeds[1]:
        raise SettingsError(f"the second comparison has the seeds {sorted(seeds[0] & seeds[1])} of "
                            "the first. Would work: fresh seeds of both sides.")
    print("Keep B: it is better in both comparisons.")


def sides_of(words: list[str]) -> tuple[list[dict[int, plot.Run]], str]:
    """Returns the runs of the two sides, by seed, and the metric of --reward."""
    parser = argparse.ArgumentParser(usage=__doc__.replace("%", "%%"))
    parser.add_argument("--reward", default="mean", help="reward/NAME of metrics.jsonl")
    parser.add_argument("a", nargs="+", metavar="A ... -- B")
    cut = words.index("--") if "--" in words else len(words)
    asked = parser.parse_args(words[:cut])
    if "--" not in words:
        raise SettingsError("two sets of runs need -- between them: A ... -- B ...")
    sides = [read_side("A", asked.a), read_side("B", words[cut + 1:])]
    return sides, f"reward/{asked.reward}"


def main(words: list[str]) -> None:
    if "--again" in words:
        keep(words)
    else:
        print("\n".join(compare(*sides_of(words))))


if __name__ == "__main__":
    command(main, sys.argv[1:])
