"""nano.py is short, stands alone, and does what grpo.py does on the same job."""
import ast
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from examples import tiny
from forked import PYTHON

ROOT = Path(__file__).parent.parent
STEPS, P = 20, 16
ENV = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
JOB = "--warmup_steps 10 --max_prompt_tokens 64 --max_tokens 16"  # what ./run.sh gives grpo.py


def start(folder: Path, ranks: int, *command) -> subprocess.Popen:
    """A script in a folder. What it prints is kept in a file: a pipe may become full."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    launcher = torchrun if ranks > 1 else []
    with open(folder / f"{ranks}-{Path(command[0]).stem}.txt", "w") as printed:
        return subprocess.Popen([PYTHON, *launcher, *command], cwd=folder, env=ENV,
                                stdout=printed, stderr=subprocess.STDOUT)


def printed_steps(path: Path) -> list[tuple[float, float]]:
    """(reward, gradient norm) of each step that nano.py printed."""
    text = path.read_text()
    found = re.findall(r"^step (\d+)  reward (\S+)  grad (\S+)$", text, re.M)
    assert [int(step) for step, *_ in found] == [*range(1, STEPS + 1)], text[-3000:]
    return [(float(reward), float(norm)) for _, reward, norm in found]


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> dict:
    """(reward, gradient norm) of each step: of nano.py on 1 and 2 ranks, and of grpo.py."""
    folder = tmp_path_factory.mktemp("nano")
    (folder / "runs").mkdir()
    made = Path(tiny.ensure(str(ROOT / "runs")))
    (folder / "runs" / made.name).symlink_to(made)
    (folder / "nano_20.py").write_text(
        f"import nano\nnano.STEPS, nano.P = {STEPS}, {P}\nnano.train()\n")
    flags = f"--steps {STEPS} --batch {P} {JOB} --name beside --no-export".split()
    started = [start(folder, 1, ROOT / "grpo.py", *flags), start(folder, 1, "nano_20.py")]
    statuses = [process.wait(400) for process in started]
    statuses.append(start(folder, 2, "nano_20.py").wait(400))
    logs = "".join(path.read_text()[-3000:] for path in folder.glob("*.txt"))
    assert statuses == [0, 0, 0], logs
    rows = [json.loads(line) for line in (folder / "runs/beside/metrics.jsonl").open()]
    return {"grpo": [(row["reward/mean"], row["grad/norm"]) for row in rows],
            1: printed_steps(folder / "1-nano_20.txt"), 2: printed_steps(folder / "2-nano_20.txt")}


@pytest.mark.parametrize("other", [2, "grpo"])
def test_one_rank_of_nano_trains_like_two_and_like_grpo(steps, other):
    assert len(steps[other]) == STEPS
    for step, ((reward, norm), (its_reward, its_norm)) in enumerate(
            zip(steps[1], steps[other], strict=True), start=1):
        assert abs(reward - its_reward) < 1e-4, (step, reward, its_reward)  # printed: 4 digits
        assert abs(norm / its_norm - 1) < 5e-5, (step, norm, its_norm)


def test_nano_learns(steps):
    rewards = [reward for reward, _ in steps[1]]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.1


def test_nano_has_the_settings_of_the_default_job():
    code, job = (ROOT / "nano.py").read_text(), (ROOT / "run.sh").read_text()
    assert 'sorting="--steps 35 ' in job
    assert all(flag in " ".join(job.split()) for flag in re.findall(r"--\w+ \d+", JOB))
    for constants in ("STEPS, P, G, SEED = 35, 64, 8, 0 ", "MAX_PROMPT, MAX_TOKENS = 64, 16 ",
                      "LR, WARMUP, MAX_NORM = 3e-4, 10, 1.0 "):
        assert constants in code


def test_nano_is_short_and_needs_only_the_tiny_model():
    code = (ROOT / "nano.py").read_text()
    lines = code.splitlines()
    assert len(lines) <= 130 and max(map(len, lines)) <= 100
    imported = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    ours = {path.stem for path in ROOT.glob("*.py")} | {"examples"}
    assert {name for name in imported if name.split(".")[0] in ours} == {"examples.tiny"}
