"""One run's folder between commands, with a light engine (light.py): what a person and a machine do
to it, and what must hold after each command. test_life.py draws and writes down sequences."""
import atexit
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import ClassVar

import faults
from forked import PYTHON

ROOT = Path(__file__).parent.parent
CLOCKED = re.compile("^time/|^memory/|per_s$")
REWARD = """def mine(completion, answer, **row):
    return {} * len({{*completion}} & {{*answer}})
"""
LOSS = """import losses
def own(logp, old, A, row, **others):
    ratio = losses.capped_ratio(logp, old)
    return -{} * ratio * A, losses.ratio_metrics(logp - old, ratio, 0 * ratio)
"""
ADVANTAGE = "def own(rewards, group, **others):\n    return {} * (rewards - rewards.mean())\n"
FLAGS = """--model model --data rows.jsonl --eval_data ev.jsonl --reward rew.py:mine
    --loss loss.py:own --advantage adv.py:own --batch 2 --group 2 --max_tokens 4
    --max_prompt_tokens 32 --lr 1e-3 --samples_every 1 --reward_workers 1 --save_every 1
    --eval_every 2 --no-report""".split()
LIMIT = 120  # seconds of a command that does not hang


def lines(first: int, n: int) -> str:
    return "".join(json.dumps({"question": f"Sort {i}", "answer": "".join(sorted(str(i)))}) + "\n"
                   for i in range(first, first + n))


@cache
def made_once(kind: type, steps: int, ranks: int = 1) -> "Life":
    """A run that ended after so many steps, and was left alone. kind: Life, or a class of it."""
    it = kind(Path(tempfile.mkdtemp(prefix="life-")))
    atexit.register(shutil.rmtree, it.place, ignore_errors=True)
    assert it.go(steps=steps, ranks=ranks) == 0, it.text
    return it


class Life:
    """A folder with a run `x`, and what is known of it."""

    files: ClassVar = {
        "rew.py": REWARD.format(1), "loss.py": LOSS.format(1), "adv.py": ADVANTAGE.format(1),
        "rows.jsonl": lines(500100, 12), "ev.jsonl": lines(600100, 3)}
    more: ClassVar = []  # flags of a kind of run

    def __init__(self, place: Path):
        self.place, self.run, self.text = place, place / "runs/x", ""
        (place / "runs").mkdir(parents=True)
        shutil.copytree(faults.model(), place / "model")
        for name, text in self.files.items():
            (place / name).write_text(text)
        self.exact = True  # nothing that acts on a number has changed
        self.acts, self.idle = [], []  # words for the edits since the last start

    def flags(self) -> list[str]:
        return [*FLAGS, *self.more]

    def begin(self, steps: int):
        """The run has ended after so many steps. It was made once, and is copied."""
        made = made_once(type(self), steps)
        shutil.copytree(made.run, self.run)

    def alone(self, steps: int, ranks: int = 1) -> list[dict]:
        """The rows of the same run, which nobody disturbs."""
        return made_once(type(self), steps, ranks).rows()

    # ---- commands

    def start(self, *flags: str, ranks: int = 1, script: str = "grpo", **env: str):
        """A command, not waited for."""
        launch = [ROOT / "tools/launch.py", "--standalone", "--nproc_per_node", str(ranks)]
        return subprocess.Popen(
            [PYTHON, *launch * (ranks > 1), ROOT / "tests/light.py", script, *flags],
            cwd=self.place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | env)

    def command(self, *flags: str, **options) -> int:
        """A command → its exit status. What it printed is `text`."""
        process = self.start(*flags, **options)
        self.text = process.communicate(timeout=LIMIT)[0]
        return process.returncode

    def go(self, *flags: str, steps: int | None = 4, **options) -> int:
        """Starts the run or resumes it, and holds what must hold. steps: None resumes by its name
        alone."""
        before, begins = self.seen(), faults.last(self.run)
        words = [*self.flags(), "--name", "x", "--steps", str(steps), *flags] if steps else [
            "--name", "x", *flags]
        status = self.command(*words, **options)
        self.hold(before, begins, status, "--steps" in words or begins > 0)
        return status

    # ---- what must hold

    def rows(self, run: Path | None = None) -> list[dict]:
        """The lines of metrics.jsonl, without what a clock decides and a line that is cut."""
        path, found = (run or self.run) / "metrics.jsonl", []
        for line in path.read_text().split("\n")[:-1] if path.exists() else []:
            found.append({k: v for k, v in json.loads(line).items() if not CLOCKED.search(k)})
        return found

    def seen(self) -> dict:
        """What a run or a person has made: {thing: its content}."""
        found = {(row["step"], "eval/rows" in row): row for row in self.rows()}
        for path in [*self.run.glob("samples/*"), *self.run.glob("model/*"),
                     *self.run.glob("checkpoints/step_*[0-9]"), *self.run.glob("eval_only_*")]:
            files = sorted(path.rglob("*")) if path.is_dir() else [path]
            found[str(path.relative_to(self.run))] = hashlib.sha1(b"".join(
                file.read_bytes() for file in files if file.is_file())).hexdigest()
        return found

    def hold(self, before: dict, begins: int, status: int, trains: bool):
        """The invariants, after a command that began with a checkpoint after `begins` steps."""
        text, after = self.text, self.seen()
        assert "Traceback" not in text or "a fault was put into" in text, text
        refused = status == 2
        if refused:
            assert after == before, text  # it changes nothing
            assert "Would work" in text or "choose another" in text or "must" in text, text
        moved = re.search(r"all of it is now in runs/x\.(\d+)/", text)
        for thing, content in before.items():
            if after.get(thing) == content or moved:
                continue
            if isinstance(thing, tuple):  # a row: of a step that is made again
                assert thing[0] > begins, (thing, text)
                assert thing not in after or self.acts or not self.exact, (thing, text)
            elif thing.startswith("samples/"):
                assert int(re.search(r"\d+", thing)[0]) > begins, (thing, text)
            elif thing.startswith("checkpoints/"):
                assert f"removed {thing[12:]}" in text or f", {thing[12:]}" in text, (thing, text)
            else:
                assert thing.startswith("model/") and "model, from an earlier end" in text, (
                    thing, text)
        if trains and not refused and "resumed from" in text:
            for words in self.acts:
                assert words in text, (words, text)
            for words in self.idle:
                assert words not in text, (words, text)
        if not refused and "compared this" in text:
            self.exact = self.exact and not self.acts
            self.acts, self.idle = [], []

    def same_as(self, other: list[dict]):
        """The rows are those of a run that was left alone. Evaluations at an earlier end are
        more."""
        ours, ends = self.rows(), {(row["step"], "eval/rows" in row) for row in other}
        assert [row for row in ours if (row["step"], "eval/rows" in row) in ends] == other
        assert all("eval/rows" in row for row in ours if row not in other)

    def edit(self, name: str, change, acts: bool, words: str = ""):
        """Changes a file that a flag names. acts: on a number of the run, so it must be said."""
        path = self.place / name
        path.write_bytes(change(path.read_bytes()))
        (self.acts if acts else self.idle).append(words or name)
