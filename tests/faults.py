"""Kills a short run at random instants, resumes it each time, and compares it with one that was left alone.

    python tests/faults.py                                    20 kills of grpo.py on 2 ranks: about 6 minutes on 2 cores
    python tests/faults.py --kills 5 --script ppo --seed 1

Each kill is KILL or TERM, of any one rank, of all of them at once, or TERM of torchrun; half of them come a random moment after
the run has got a bit further, a quarter in the middle of a save, a quarter at a random moment of the start; how long a start and a step
take is measured on the run left alone, so that none comes when all is over. Ends with status 1 if anything but the times differs.
The functions above `main` are what test_faults.py uses too.
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
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FLAGS = ("--batch 4 --group 4 --minibatches 2 --max_tokens 12 --max_prompt_tokens 32 --lr 1e-3 --samples_every 1 --kv_cache_gb 0.1 --reward_workers 1 "
         "--save_every 2 --update_tokens 256").split()


def model() -> str:
    """The tiny model's folder, made once for all runs of this checkout."""
    made = subprocess.run([sys.executable, "-c", f"import tiny; print(tiny.ensure({str(ROOT / 'runs')!r}))"], cwd=ROOT, capture_output=True, text=True, check=True)
    return made.stdout.split()[-1] if " in " not in made.stdout else next(w for w in made.stdout.split() if w.startswith(str(ROOT / "runs")))


class Attempt:
    """One start of the real script in its own session, its output in a file."""

    def __init__(self, cwd: Path, *flags: str, script: str = "grpo", ranks: int = 2, faults: str = "", torchrun: bool = True, **env: str):
        self.out = open(Path(cwd) / f"out-{time.time_ns()}.txt", "w+")
        launch = [str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node", str(ranks)] if torchrun else [sys.executable]
        command = [*launch, str(HERE / "faulty.py"), script] if faults else [*launch, str(ROOT / f"{script}.py")]
        self.process = subprocess.Popen([*command, *FLAGS, *flags], cwd=cwd, stdout=self.out, stderr=subprocess.STDOUT, start_new_session=True,
                                        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "FAULTS": faults, **env})

    def ranks(self) -> list[int]:
        """Process ids of the ranks, in rank order."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == self.process.pid:
                    environment = dict(e.split("=", 1) for e in (entry / "environ").read_text().split("\0") if "=" in e)
                    found[int(environment["RANK"])] = int(entry.name)
            except (OSError, KeyError):                    # gone since, or not a rank
                continue
        return [found[r] for r in sorted(found)]

    def text(self) -> str:
        """What was printed so far."""
        return Path(self.out.name).read_text()

    def until(self, condition, seconds: float = 300.0) -> bool:
        """Waits until condition() holds; False if the process ended first."""
        end = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                return bool(condition())
            assert time.monotonic() < end, f"nothing came in {seconds} s:\n{self.text()[-3000:]}"
            time.sleep(0.02)
        return True

    def says(self, words: str, seconds: float = 300.0) -> bool:
        """Waits until the words were printed."""
        return self.until(lambda: words in self.text(), seconds)

    def end(self, seconds: float = 400.0) -> tuple[int, str]:
        """Waits for the end: (exit status, everything printed)."""
        try:
            self.process.wait(seconds)
        finally:
            self.kill()
        return self.process.returncode, self.text()

    def kill(self) -> None:
        """Whatever is left of this attempt, at once."""
        for pid in [*self.ranks(), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def metrics(run: Path) -> list[dict]:
    """The run's metrics without what a clock or the machine decides."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "memory/")) and not k.endswith("per_s")} for row in rows]


def differences(one: Path, other: Path) -> list[str]:
    """What of two finished runs is not the same, bit for bit: metrics, samples, exported weights, and the last checkpoint's tensors."""
    found = []
    if [r["step"] for r in metrics(one)] != sorted({r["step"] for r in metrics(one)}):
        found.append(f"{one}: steps are {[r['step'] for r in metrics(one)]}")
    for a, b in zip(metrics(one), metrics(other)):
        found += [f"step {a['step']}: {k} is {a.get(k)} and {b.get(k)}" for k in {**a, **b} if a.get(k) != b.get(k)]
    if len(metrics(one)) != len(metrics(other)):
        found.append(f"{len(metrics(one))} and {len(metrics(other))} steps")
    names = lambda run: sorted(p.relative_to(run) for pattern in ("samples/*", "model/*", "best/*") for p in run.glob(pattern))
    if names(one) != names(other):
        found.append(f"files: {set(names(one)) ^ set(names(other))}")
    found += [str(p) for p in names(one) if (other / p).exists() and (one / p).read_bytes() != (other / p).read_bytes()]
    tensors = lambda run: [f for f in json.loads((last(run) / "manifest.json").read_text())["files"] if f[0].endswith(".distcp")]
    if last(one).name != last(other).name or tensors(one) != tensors(other):
        found.append(f"tensors of {last(one)} and {last(other)}")
    return found


def last(run: Path) -> Path:
    """The newest checkpoint."""
    return max((run / "checkpoints").glob("step_*[0-9]"), key=lambda p: int(p.name[5:]))


def progress(run: Path) -> int:
    """Steps in metrics.jsonl, whole lines only."""
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


# ---- the command ----------------------------------------------------------------------------------------------------

def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(script="grpo", kills=20, ranks=2, seed=0, folder=None).items():
        parser.add_argument(f"--{name}", type=type(default) if default is not None else str, default=default)
    a = parser.parse_args()
    cwd, rng, began = Path(a.folder or tempfile.mkdtemp(prefix="faults-")), random.Random(a.seed), time.monotonic()
    cwd.mkdir(parents=True, exist_ok=True)
    steps = 2 * a.kills + 8
    start = lambda name: Attempt(cwd, "--model", model(), "--name", name, "--steps", str(steps), script=a.script, ranks=a.ranks)
    print(f"{a.script}.py, {a.ranks} ranks, {steps} steps, a checkpoint every 2; in {cwd}", flush=True)
    alone, born = start("alone"), time.monotonic()
    alone.says("step ")
    starting, stepped = time.monotonic() - born, time.monotonic()
    status, text = alone.end()
    assert status == 0, text[-3000:]
    stepping = (time.monotonic() - stepped) / steps
    print(f"  left alone: {starting:.1f} s to the first step, then {stepping:.2f} s a step with its saves", flush=True)
    run, latest = cwd / "runs" / "killed", 0
    for kill in range(a.kills):
        attempt, when = start("killed"), rng.choice(["step", "step", "save", "start"])
        if when == "start":
            time.sleep(rng.uniform(0, starting))
        else:
            attempt.says("step ", 600)                     # this attempt's own steps, not what an earlier one left
            attempt.until(lambda: progress(run) >= min(steps - 1, 2 * kill + 1))
            if when == "save":
                attempt.until(lambda: list((run / "checkpoints").glob("*.partial")))
                time.sleep(rng.uniform(0, 0.05))
            else:
                time.sleep(rng.uniform(0, 2 * stepping))
        number, pids = rng.choice([signal.SIGKILL, signal.SIGTERM]), attempt.ranks()
        target = rng.choice(["a rank", "a rank", "all ranks", "torchrun"]) if number == signal.SIGTERM else rng.choice(["a rank", "a rank", "all ranks"])
        victims = [attempt.process.pid] if target == "torchrun" or not pids else pids if target == "all ranks" else [rng.choice(pids)]
        at = progress(run)
        assert at < steps and attempt.process.poll() is None, f"kill {kill + 1} came when the run was over:\n{attempt.text()[-3000:]}"
        for pid in victims:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        sent = time.monotonic()
        status, text = attempt.end()
        kept = int(last(run).name[5:]) if list((run / "checkpoints").glob("step_*[0-9]")) else 0
        print(f"  {kill + 1:>2}. {number.name} to {target} ({when}) after {at} steps: ended with {status} in {time.monotonic() - sent:.1f} s, "
              f"goes on from step {kept}" + (", said it saved" if "goes on from here" in text else ""), flush=True)
        assert kept >= latest, f"a checkpoint was lost: {latest} was there\n{text[-3000:]}"
        latest = kept
    status, text = start("killed").end()
    assert status == 0, text[-3000:]
    found = differences(cwd / "runs" / "alone", run)
    print("\n".join(found) or f"{a.kills} of {a.kills} kills survived; metrics, samples, weights and AdamW's state are those of the run left alone, "
          f"bit for bit; {time.monotonic() - began:.0f} s")
    if not found and not a.folder:
        shutil.rmtree(cwd)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
