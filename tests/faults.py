"""Kills a short run at random instants, resumes it each time, and compares it with an unkilled run.

    python tests/faults.py                    20 kills of grpo.py on 2 ranks: 6 minutes on 2 cores
    python tests/faults.py --kills 5 --script ppo --seed 1 --minibatches 4
    python tests/faults.py --kills 5 --task kk          the model is tiny:kk
    python tests/faults.py --kills 10 --target "the whole job"
    python tests/faults.py --script parts/sft/sft --group 1 --reward exact --eval_data tiny@test

Flags that are not its own are the script's.

A kill is KILL or TERM of one rank, of all ranks or of the whole job with its workers, or TERM of
torchrun: half of them after some steps, a quarter in a save, a quarter in the start. Exit status 1:
anything but the times differs.
"""
import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FLAGS = ("--batch 4 --group 4 --minibatches 2 --max_tokens 12 --max_prompt_tokens 32 --lr 1e-3 "
         "--samples_every 1 --kv_cache_gb 0.1 --reward_workers 1 --save_every 2 "
         "--update_tokens 256").split()
LONG = 900  # seconds: nothing takes so long that does not hang


def model(task: str = "sort") -> str:
    """The folder of a tiny model, made once for all runs of this checkout."""
    sys.path.insert(0, str(ROOT))
    from examples import tiny
    return tiny.ensure(str(ROOT / "runs"), task)


class Attempt:
    """One start of the real script in its own session, its output in a file. env: with FAULTS or
    RECORD the script is started by faulty.py. signals: torchrun is no fork of tests/forked.py,
    which has neither a group nor children to signal."""

    def __init__(self, cwd: Path, *flags: str, script="grpo", ranks=2, torchrun=True, signals=False,
                 **env: str):
        self.out = Path(cwd) / f"out-{time.time_ns()}.txt"
        python = os.environ.get("PYTHON_EXEC", sys.executable)  # of ranks too
        launch = [sys.executable if signals else python, "-m", "torch.distributed.run",
                  "--nproc_per_node", str(ranks)] if torchrun else [python]
        wrapped = env.get("FAULTS") or "RECORD" in env
        target = [HERE / "faulty.py", script] if wrapped else [ROOT / f"{script}.py"]
        self.process = subprocess.Popen(
            [*launch, *target, *FLAGS, *flags], cwd=cwd, stdout=open(self.out, "w"),
            stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | env)

    def ranks(self) -> list[psutil.Process]:
        """The ranks: what torchrun started."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children()
        return []

    def text(self) -> str:
        return self.out.read_text()

    def until(self, condition, every: float = 0.02) -> None:
        """Waits until condition() holds or the process ends. every: seconds from look to look."""
        end = time.monotonic() + LONG
        while not condition() and self.process.poll() is None:
            assert time.monotonic() < end, f"nothing came in {LONG} s:\n{self.text()[-3000:]}"
            time.sleep(every)

    def printed(self, words: str) -> None:
        self.until(lambda: words in self.text())

    def end(self) -> tuple[int, str]:
        """Waits for the end: (exit status, everything printed)."""
        try:
            self.process.wait(LONG)
        finally:
            self.kill()
        return self.process.returncode, self.text()

    def kill(self) -> None:
        for process in [*self.ranks(), self.process]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


def metrics(run: Path) -> list[dict]:
    """The run's metrics without what a clock or the machine decides."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    clocked = re.compile("^time/|^memory/|per_s$")
    return [{name: value for name, value in row.items() if not clocked.search(name)}
            for row in rows]


def last(run: Path) -> int:
    """The step of the newest checkpoint; 0: there is none."""
    return max((int(path.name[5:]) for path in run.glob("checkpoints/step_*[0-9]")), default=0)


def written(run: Path) -> dict[str, bytes]:
    """The files of a run that no clock decides: samples, the exported model, the last tensors."""
    return {str(path.relative_to(run)): path.read_bytes()
            for part in ("samples/*", "model/*", f"checkpoints/step_{last(run)}/*.distcp")
            for path in run.glob(part)}


def differences(one: Path, other: Path) -> list[str]:
    """What differs, bit for bit, between two runs: metrics, samples, weights, the last tensors."""
    assert last(one), f"{one} has no checkpoint"
    found = [f"step {(a or b)['step']}: {name} is {a.get(name)} and {b.get(name)}"
             for a, b in zip_longest(metrics(one), metrics(other), fillvalue={})
             for name in a | b if a.get(name) != b.get(name)]
    ours, theirs = written(one), written(other)
    return found + sorted(path for path in ours | theirs if ours.get(path) != theirs.get(path))


def progress(run: Path) -> int:
    """Steps in metrics.jsonl, whole lines only, without evaluations."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return sum(line.endswith("\n") and "eval/rows" not in line for line in lines)


# ---- the command ----

def kill(attempt: Attempt, run: Path, when: str, at: int, rng, only: str, seconds: dict) -> str:
    """Waits until the run has about `at` steps and ends some of its processes → what was done.
    when: in a start, a step or a save; seconds: the longest wait more in each. only: the processes;
    "": drawn."""
    if when != "start":
        attempt.printed("step ")  # this attempt's own, not an earlier one's
        attempt.until(lambda: progress(run) >= at)
        if when == "save":
            attempt.until(lambda: list((run / "checkpoints").glob("*.partial")), every=0.002)
    end = time.monotonic() + rng.uniform(0, seconds[when])
    attempt.until(lambda: time.monotonic() >= end or when == "start" and "step " in attempt.text())
    number, processes = rng.choice([signal.SIGKILL, signal.SIGTERM]), attempt.ranks()
    targets = ["a rank", "all ranks", "the whole job"] + ["torchrun"] * (number == signal.SIGTERM)
    target, done = only or rng.choice(targets), progress(run)
    if target == "the whole job":
        job = psutil.Process(attempt.process.pid)
        processes = [*job.children(recursive=True), job]
    elif target == "torchrun" or not processes:
        processes = [attempt.process]
    elif target == "a rank":
        processes = [rng.choice(processes)]
    assert attempt.process.poll() is None, f"it was over:\n{attempt.text()[-3000:]}"
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    return f"{number.name} to {target} ({when}) after {done} steps"


def main() -> None:
    """Kills a run as often as the flags say, and ends with status 1 if anything differs."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    for name, value in dict(script="grpo", task="sort", kills=20, ranks=2, seed=0,
                            target="").items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    a, flags = parser.parse_known_args()
    cwd = Path(tempfile.mkdtemp(prefix="faults-"))
    steps, rng = 2 * a.kills + 8, random.Random(a.seed)
    whole, run, latest = cwd / "runs/alone", cwd / "runs/killed", 0
    print(f"{a.script}.py, {a.ranks} ranks, {steps} steps, in {cwd}", flush=True)

    def start(folder):
        return Attempt(cwd, "--model", model(a.task), "--name", folder.name, "--steps", str(steps),
                       *flags, script=a.script, ranks=a.ranks, signals=True)

    def end(folder) -> dict[str, float]:
        """Runs it to its end → the seconds of its start, of a step, and of a save (a guess)."""
        began, attempt = time.monotonic(), start(folder)
        attempt.printed("step ")
        first = time.monotonic()
        status, text = attempt.end()
        assert status == 0, text[-3000:]
        return dict(start=first - began, step=(time.monotonic() - first) / steps, save=0.05)

    seconds = end(whole)
    places = [when for _ in range(0, a.kills, 4)
              for when in rng.sample(["step", "step", "save", "start"], 4)]
    for i in range(a.kills):
        attempt = start(run)
        said = kill(attempt, run, places[i], 2 * i + 1, rng, a.target, seconds)
        status, text = attempt.end()
        before, latest = latest, last(run)
        print(f"  {i + 1:>2}. {said}: ended with {status}, goes on from step {latest}", flush=True)
        assert latest >= before, f"a checkpoint was lost: {before} was there\n{text[-3000:]}"
    end(run)
    found = differences(whole, run)
    print("\n".join(found) or f"{a.kills} of {a.kills} kills survived; metrics, samples, weights "
          "and AdamW's state are those of the run that was not killed, bit for bit")
    if not found:
        shutil.rmtree(cwd)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
