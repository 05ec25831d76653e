"""Two checkouts side by side: what bench/learn.py and bench/sync.py share.

Each contestant is a process that keeps its models. They take turns, because the speed of a machine
that other work shares changes from minute to minute: a ratio is the median of those of the rounds.
"""
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Contestant:
    """A process of `script` with --serve that times the code of the checkout `folder`. It answers a
    case's name, a line, with a JSON line, which has "seconds". ranks: of torchrun."""

    def __init__(self, script: str, folder: Path, *flags: str, ranks: int = 1):
        python = [sys.executable]
        if ranks > 1:
            python += ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"]
        self.process = subprocess.Popen(
            [*python, str(ROOT / "bench" / script), "--serve", *flags], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={"OMP_NUM_THREADS": "1"} | os.environ | {
                "CONTESTANT": str(Path(folder).resolve()), "VLLM_LOGGING_LEVEL": "ERROR"})

    def run(self, case: str) -> dict:
        """One turn."""
        print(case, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("{"):  # other lines are of libraries
                return json.loads(line)
        raise RuntimeError(f"a contestant ended with status {self.process.wait()}")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def measure(case: str, other: Contestant, ours: Contestant, times: int) -> tuple[str, list]:
    """`times` rounds after one to warm up → the cells "seconds → seconds | ratio (range)", and the
    answers of the last round, of the other one and of ours."""
    rounds = [[one.run(case) for one in (other, ours)] for _ in range(times + 1)][1:]
    ratios = [theirs["seconds"] / mine["seconds"] for theirs, mine in rounds]
    before, after = (statistics.median(one["seconds"] for one in column)
                     for column in zip(*rounds, strict=True))
    return (f"{before:.3g} → {after:.3g} | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f}–{max(ratios):.2f})"), rounds[-1]
