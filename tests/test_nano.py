"""nano.py and the files of ladder/ are short, stand alone, and do what grpo.py does on the same
job."""
import json
import os
import re
import subprocess
from difflib import unified_diff
from pathlib import Path

import pytest

from examples import tiny
from families import ROOT
from forked import PYTHON
from ladder import climb

STEPS, P, WARMUP = 5, 16, 3
BUDGET = 200  # several micro-batches a rank
NEAR = {"ladder.nano_packed": 2e-4}  # dense attention with a mask rounds otherwise; others: 5e-5
ENV = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
LADDER = {  # file: the flags of grpo.py with which it does the same
    "ladder.nano_clip": "--epochs 2",
    "ladder.nano_kl": "--epochs 2 --kl_loss_coef 0.04",
    "ladder.nano_packed": "--epochs 2 --kl_loss_coef 0.04 --update_tokens 1024"}
JOB = "--warmup_steps 10 --max_prompt_tokens 64 --max_tokens 16"  # what ./run.sh gives grpo.py


@pytest.mark.parametrize("file, flags", [("nano", ""), *LADDER.items()])
def test_it_trains_on_two_ranks_like_grpo_on_one(file, flags, tmp_path):
    """Rewards and norms of the gradients of five steps are the same, to the printed digits."""
    (tmp_path / "runs").mkdir()
    made = Path(tiny.ensure(str(ROOT / "runs")))
    (tmp_path / "runs" / made.name).symlink_to(made)
    (tmp_path / "short.py").write_text(
        f"import {file} as nano\nnano.STEPS, nano.P, nano.WARMUP = {STEPS}, {P}, {WARMUP}\n"
        f"nano.BUDGET = {BUDGET}\nnano.train()\n")
    started = []
    for name, command in (
            ("grpo", f"{ROOT}/grpo.py --steps {STEPS} --batch {P} {JOB} --warmup_steps {WARMUP} "
                     f"{flags.replace('1024', str(BUDGET))} --name beside --no-export"),
            ("nano", "-m torch.distributed.run --standalone --nproc_per_node 2 short.py")):
        with open(tmp_path / f"{name}.txt", "w") as printed:  # a pipe may become full
            started.append(subprocess.Popen([PYTHON, *command.split()], cwd=tmp_path, env=ENV,
                                            stdout=printed, stderr=subprocess.STDOUT))
    assert [process.wait(400) for process in started] == [0, 0], [
        path.read_text()[-3000:] for path in tmp_path.glob("*.txt")]
    found = re.findall(r"^step (\d+)  reward (\S+)  grad (\S+)$",
                       (tmp_path / "nano.txt").read_text(), re.M)
    rows = [json.loads(line) for line in (tmp_path / "runs/beside/metrics.jsonl").open()]
    assert [int(step) for step, *_ in found] == [row["step"] for row in rows] and len(rows) == STEPS
    for (_, reward, norm), row in zip(found, rows, strict=True):
        assert abs(float(reward) - row["reward/mean"]) < 1e-4, row  # printed: 4 digits
        near = 5e-5 if row["step"] <= 2 else NEAR.get(file, 5e-5)
        assert abs(float(norm) / row["grad/norm"] - 1) < near, row


def test_nano_has_the_settings_of_the_default_job_and_needs_only_the_tiny_model():
    """At most 130 lines, which import no file of the project but examples/tiny.py."""
    code, job = (ROOT / "nano.py").read_text(), " ".join((ROOT / "run.sh").read_text().split())
    assert all(flag in job for flag in ("sorting=\"--steps 35", *re.findall(r"--\w+ \d+", JOB)))
    for constants in ("STEPS, P, G, SEED = 35, 64, 8, 0 ", "MAX_PROMPT, MAX_TOKENS = 64, 16 ",
                      "LR, WARMUP, MAX_NORM = 3e-4, 10, 1.0 "):
        assert constants in code
    named = {*re.findall(r"^ *(?:from|import) (\w+)", code, re.M)}
    ours = {path.stem for path in ROOT.glob("*.py")}
    assert not named & ours and "examples" in named and len(code.splitlines()) <= 130


def test_each_file_of_the_ladder_changes_thirty_lines_and_the_page_shows_them():
    """Docstrings count among the thirty, and as many may go. The page and the picture are today's,
    and the file with packed micro-batches has the curve of the one before."""
    for pair in zip(climb.FILES, climb.FILES[1:], strict=False):
        before, after = ((ROOT / name).read_text().splitlines() for name in pair)
        signs = [line[0] for line in [*unified_diff(before, after, n=0)][2:]]
        assert 10 < signs.count("+") <= 30 and signs.count("-") <= 30, pair
        named = {*re.findall(r"^ *(?:from|import) (\w+)", "\n".join(after), re.M)}
        assert not named & {path.stem for path in ROOT.glob("*.py")}, "it must stand alone"
    assert [f"{file.replace('.', '/')}.py" for file in LADDER] == climb.FILES[1:]
    page = climb.PAGE.read_text()
    assert page == climb.page()
    for flags in LADDER.values():
        assert f"`{flags}`" in " ".join(page.split()), flags
    curves = json.loads(climb.CURVES.read_text())
    assert [*curves] == [Path(name).stem for name in climb.FILES]
    assert {len(rewards) for rewards in curves.values()} == {35}
    near = [abs(a - b) for a, b in zip(curves["nano_kl"], curves["nano_packed"], strict=True)]
    assert max(near[:5]) < 1e-3 and max(near) < 0.05
