"""Kills a short run at random instants, resumes it each time, and compares it with an unkilled run.

    python tests/faults.py                    20 kills of grpo.py on 2 ranks: 6 minutes on 2 cores
    python tests/faults.py --kills 5 --script ppo --seed 1 --minibatches 4
    python tests/faults.py --kills 5 --task kk          the model is tiny:kk

Flags that are not its own are the script's.

A kill is KILL or TERM of one rank or of all, or TERM of torchrun: half of them after some steps, a
quarter in a save, a quarter in the start. Exit status 1: anything but the times differs.
"""
import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FLAGS = ("--batch 4 --group 4 --minibatches 2 --max_tokens 12 --max_prompt_tokens 32 --lr 1e-3 "
         "--samples_every 1 --kv_cache_gb 0.1 --reward_workers 1 --save_every 2 "
         "--update_tokens 256").split()


def model(task: str = "sort") -> str:
    """The folder of a tiny model, made once for all runs of this checkout."""
    sys.path.insert(0, str(ROOT))
    from examples import tiny
    return tiny.ensure(str(ROOT / "runs"), task)


class Attempt:
    """One start of the real script in its own session, its output in a file."""

    def __init__(self, cwd: Path, *flags: str, script="grpo", ranks=2, faults="", torchrun=True,
                 signals=False, **env: str):
        self.out = open(Path(cwd) / f"out-{time.time_ns()}.txt", "w+")
        python = os.environ.get("PYTHON_EXEC", sys.executable)  # of ranks too; of tests a fork,
        of_torchrun = sys.executable if signals else python     # which has no group to signal
        env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | env
        launch = [of_torchrun, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
        wrapped = faults or "RECORD" in env
        target = [HERE / "faulty.py", script] if wrapped else [ROOT / f"{script}.py"]
        self.process = subprocess.Popen(
            [*(launch if torchrun else [python]), *target, *FLAGS, *flags], cwd=cwd,
            stdout=self.out, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | env | {"FAULTS": faults})

    def ranks(self) -> list[int]:
        """Process ids of the ranks, in rank order."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, KeyError):              # gone since, or not a rank
                parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
                if int(parent) == self.process.pid:
                    environ = (entry / "environ").read_text().split("\0")
                    values = dict(e.split("=", 1) for e in environ if "=" in e)
                    found[int(values["RANK"])] = int(entry.name)
        return [found[r] for r in sorted(found)]

    def text(self) -> str:
        return Path(self.out.name).read_text()

    def until(self, condition, seconds: float = 900.0) -> bool:
        """Waits until condition() holds; False if the process ended first."""
        end = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                return bool(condition())
            assert time.monotonic() < end, f"nothing came in {seconds} s:\n{self.text()[-3000:]}"
            time.sleep(0.02)
        return True

    def printed(self, words: str, seconds: float = 900.0) -> bool:
        return self.until(lambda: words in self.text(), seconds)

    def end(self, seconds: float = 900.0) -> tuple[int, str]:
        """Waits for the end: (exit status, everything printed)."""
        try:
            self.process.wait(seconds)
        finally:
            self.kill()
        return self.process.returncode, self.text()

    def kill(self) -> None:
        for pid in [*self.ranks(), self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def metrics(run: Path) -> list[dict]:
    """The run's metrics without what a clock or the machine decides."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]

    def clocked(name):
        return name.startswith(("time/", "memory/")) or name.endswith("per_s")

    return [{k: v for k, v in row.items() if not clocked(k)} for row in rows]


def differences(one: Path, other: Path) -> list[str]:
    """What differs, bit for bit, between two runs: metrics, samples, weights, the last tensors."""
    ours, theirs = metrics(one), metrics(other)
    found = [] if len(ours) == len(theirs) else [f"{len(ours)} and {len(theirs)} steps"]
    steps = [r["step"] for r in ours if "eval/rows" not in r]
    if steps != sorted(set(steps)):
        found.append(f"{one}: steps are {steps}")
    for a, b in zip(ours, theirs, strict=False):
        found += [f"step {a['step']}: {k} is {a.get(k)} and {b.get(k)}"
                  for k in a | b if a.get(k) != b.get(k)]
    files = [{p.relative_to(run): p.read_bytes() for part in ("samples", "model")
              for p in run.glob(f"{part}/*")} for run in (one, other)]
    found += [str(p) for p in sorted(files[0] | files[1]) if files[0].get(p) != files[1].get(p)]
    states = [{p.name: p.read_bytes() for p in last(run).glob("*.distcp")} for run in (one, other)]
    if last(one).name != last(other).name or states[0] != states[1] or not states[0]:
        found.append(f"tensors of {last(one)} and {last(other)}")
    return found


def last(run: Path) -> Path:
    return max((run / "checkpoints").glob("step_*[0-9]"), key=lambda p: int(p.name[5:]))


def progress(run: Path) -> int:
    """Steps in metrics.jsonl, whole lines only, without evaluations."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return sum(line.endswith("\n") and "eval/rows" not in line for line in lines)


# ---- the command ----

def kill(attempt: Attempt, run: Path, at: int, rng) -> str:
    """Waits until the run has about `at` steps and ends some of its processes → what was done."""
    when = rng.choice(["step", "step", "save", "start"])
    if when != "start":
        attempt.printed("step ")  # this attempt's own, not an earlier one's
        attempt.until(lambda: progress(run) >= at)
        if when == "save":
            attempt.until(lambda: list((run / "checkpoints").glob("*.partial")))
    time.sleep(rng.uniform(0, {"start": 12, "step": 1, "save": 0.05}[when]))
    number, pids = rng.choice([signal.SIGKILL, signal.SIGTERM]), attempt.ranks()
    targets = ["a rank", "a rank", "all ranks"] + ["torchrun"] * (number == signal.SIGTERM)
    target, done = rng.choice(targets), progress(run)
    if target == "torchrun" or not pids:
        pids = [attempt.process.pid]
    elif target == "a rank":
        pids = [rng.choice(pids)]
    assert attempt.process.poll() is None, f"it was over:\n{attempt.text()[-3000:]}"
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return f"{number.name} to {target} ({when}) after {done} steps"


def main() -> None:
    """Kills a run as often as the flags say, and ends with status 1 if anything differs."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    for name, value in dict(script="grpo", task="sort", kills=20, ranks=2, seed=0).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    a, flags = parser.parse_known_args()
    cwd = Path(tempfile.mkdtemp(prefix="faults-"))
    steps, rng = 2 * a.kills + 8, random.Random(a.seed)
    whole, run, latest = cwd / "runs/alone", cwd / "runs/killed", 0
    print(f"{a.script}.py, {a.ranks} ranks, {steps} steps, in {cwd}", flush=True)

    def start(folder):
        return Attempt(cwd, "--model", model(a.task), "--name", folder.name, "--steps", str(steps),
                       *flags, script=a.script, ranks=a.ranks)

    def end(folder):
        status, text = start(folder).end()
        assert status == 0, text[-3000:]

    end(whole)
    for i in range(a.kills):
        attempt = start(run)
        said = kill(attempt, run, 2 * i + 1, rng)
        status, text = attempt.end()
        kept = int(last(run).name[5:]) if list((run / "checkpoints").glob("step_*[0-9]")) else 0
        print(f"  {i + 1:>2}. {said}: ended with {status}, goes on from step {kept}", flush=True)
        assert kept >= latest, f"a checkpoint was lost: {latest} was there\n{text[-3000:]}"
        latest = kept
    end(run)
    found = differences(whole, run)
    print("\n".join(found) or f"{a.kills} of {a.kills} kills survived; metrics, samples, weights "
          "and AdamW's state are those of the run that was not killed, bit for bit")
    if not found:
        shutil.rmtree(cwd)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
