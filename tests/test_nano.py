"""nano.py is short, stands alone, and does what grpo.py does on the same job."""
import json
import os
import re
import subprocess
from pathlib import Path

from examples import tiny
from families import ROOT
from forked import PYTHON

STEPS, P, WARMUP = 5, 16, 3
ENV = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
JOB = "--warmup_steps 10 --max_prompt_tokens 64 --max_tokens 16"  # what ./run.sh gives grpo.py


def test_nano_on_two_ranks_trains_like_grpo_on_one(tmp_path):
    """Rewards and norms of the gradients of five steps are the same, to the printed digits."""
    (tmp_path / "runs").mkdir()
    made = Path(tiny.ensure(str(ROOT / "runs")))
    (tmp_path / "runs" / made.name).symlink_to(made)
    (tmp_path / "short.py").write_text(
        f"import nano\nnano.STEPS, nano.P, nano.WARMUP = {STEPS}, {P}, {WARMUP}\nnano.train()\n")
    started = []
    for name, command in (
            ("grpo", f"{ROOT}/grpo.py --steps {STEPS} --batch {P} {JOB} --warmup_steps {WARMUP} "
                     "--name beside --no-export"),
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
        assert abs(float(norm) / row["grad/norm"] - 1) < 5e-5, row


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
