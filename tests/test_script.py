"""The scripts as a user runs them: mistakes end them before anything loads; a run trains."""
import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from examples import tiny
from forked import PYTHON

ROOT = Path(__file__).parent.parent
ENV = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}


def script(*flags: str, ranks: int = 1, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """grpo.py to its end."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command = [PYTHON, *(torchrun if ranks > 1 else []), ROOT / "grpo.py", *flags]
    return subprocess.run(command, cwd=cwd, env=ENV, capture_output=True, text=True, timeout=900)


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.open()]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """An empty folder to run in, with the tiny model there already."""
    here = tmp_path_factory.mktemp("place")
    (here / "runs").mkdir()
    cached = Path(tiny.ensure(str(ROOT / "runs")))
    (here / "runs" / cached.name).symlink_to(cached)
    return here


# ---- mistakes

def test_a_mistake_on_several_ranks_is_printed_once_and_in_the_summary_of_torchrun(place):
    done = script("--bach", "3", ranks=2, cwd=place)
    assert done.returncode != 0 and len(re.findall("^error: ", done.stderr, re.MULTILINE)) == 1
    printed, summary = done.stderr.split("Root Cause")
    words = "Unrecognized options: --bach, 3"
    assert words in printed and words in summary and "exitcode  : 2" in summary
    assert "traceback : errors.SettingsError: " in summary and ', line ' not in summary


# ---- a real run

def numbers(n: int) -> list[dict]:
    """Rows in the columns of GSM8K."""
    return [{"question": row["question"], "answer": f"Well:\n#### {row['answer']}"}
            for row in tiny.rows(n, 0)]


MINE = """
def length(completion, answer, **row):
    return None if sum(map(ord, completion)) % 5 == 0 else len(completion) / 100
"""


@pytest.fixture(scope="module")
def run(place) -> dict:
    return made(place, MINE)


def made(place: Path, mine: str, *flags: str) -> dict:
    """13 steps with the tiny model, two ranks, some completions without a reward, everything on."""
    rows = numbers(20)
    write(place / "train.jsonl", rows)
    write(place / "seven.jsonl", rows[:7])
    (place / "mine.py").write_text(mine)
    words = """--data train.jsonl --eval_data seven.jsonl --reward gsm8k mine.py:length:0.5
        --batch 3 --group 4 --steps 13 --max_prompt_tokens 1024 --max_tokens 48 --minibatches 1
        --lr 3e-4 --warmup_steps 2 --lr_schedule linear --betas 0.9 0.95 --weight_decay 0.01
        --stop zq --wandb test --name gsm --eval_samples 3 --eval_temperature 0.8 --eval_every 6
        --samples_every 1 --target_reward 0.2 0.9 --seed 4294967296"""
    done = script(*words.split(), *flags, ranks=2, cwd=place)
    folder = place / "runs/gsm"
    assert (folder / "metrics.jsonl").exists(), done.stderr[-3000:]
    return {"done": done, "folder": folder, "rows": read(folder / "metrics.jsonl")}


def test_it_ends_graded_and_prints_what_a_person_wants_to_know(run):
    done, printed = run["done"], run["done"].stdout
    assert done.returncode != 0  # nobody learns this in 13 steps
    assert done.stderr.count("missed --target_reward: at most 0.2 before and at least 0.9") == 1
    for words in ("plan for grpo.py on 2 ranks", "step  1/13",
                  "  trains     tiny, --lr 0.0003, reward: gsm8k mine.py:length:0.5\n",
                  "step 13/13", "evaluation after 0 steps", "evaluation after 13 steps",
                  "reward, first 3 and last 10 of 13 steps: 0.", "tokens in",
                  "the run is in runs/gsm/"):
        assert words in printed, (words, printed)
    assert not re.search("Warning|WARNING|INFO|Traceback", printed), printed
    assert "Warning" not in done.stderr.split("torch.distributed.elastic")[0]


def test_metrics_have_every_step_once_and_the_names_of_the_docs(run):
    rows = [r for r in run["rows"] if "eval/rows" not in r]
    evaluated = [r for r in run["rows"] if "eval/rows" in r]
    assert [r["step"] for r in rows] == list(range(1, 14))
    names = """reward/mean reward/gsm8k reward/length rollout/length_mean lr grad/norm loss/policy
        policy/entropy policy/clip_frac batch/dropped batch/dropped_unscored time/step"""
    assert not {*names.split()} - rows[0].keys()
    docs = (ROOT / "docs/reference/metrics_and_files.md").read_text()
    cells = re.findall(r"^\| (`.*?`) \|", docs, re.MULTILINE)
    named = "|".join(re.sub("[A-Z]+|(?<=@)k", ".+", name)
                     for cell in cells for name in re.findall("`(.+?)`", cell))
    assert not [name for row in run["rows"] for name in row if not re.fullmatch(named, name)]
    assert max(r["rollout/logprob_gap_max"] for r in rows[:13]) < 1e-4
    assert [r["batch/prompts"] for r in rows[:7]] == [3, 3, 3, 3, 3, 3, 2]  # 20 rows in threes
    assert [r["step"] for r in evaluated] == [0, 6, 12, 13]
    assert {r["eval/rows"] for r in evaluated} == {7} and "eval/pass@3_low" in evaluated[0]


def test_the_learning_rate_and_the_args_are_logged_as_used(run):
    expected = [1.5e-4, 3e-4] + [3e-4 * (11 - step) / 11 for step in range(11)]
    assert [r["lr"] for r in run["rows"] if "lr" in r] == pytest.approx(expected, abs=1e-9)
    args = json.loads((run["folder"] / "args.json").read_text())
    expected = {"betas": [0.9, 0.95], "weight_decay": 0.01, "lr": 3e-4, "stop": ["zq"], "ranks": 2}
    assert expected.items() <= args.items() and args["versions"]["torch"].startswith("2.")


def test_the_folder_has_samples_a_curve_a_plan_wandb_and_a_model(run):
    from transformers import AutoModelForCausalLM
    folder = run["folder"]
    rows = [row for path in sorted(folder.glob("samples/step_*.jsonl")) for row in read(path)]
    groups = [[row["reward"] for row in rows[i:i + 4]] for i in range(0, len(rows), 4)]
    assert len(rows) == 13 * 12 - 4 and any(None in group for group in groups)
    expected = []  # dr_grpo's; a lone one has none
    for group in groups:
        scored = [reward for reward in group if reward is not None]
        expected += [None if reward is None or len(scored) == 1 else reward - np.mean(scored)
                     for reward in group]
    assert [row["advantage"] for row in rows] == pytest.approx(expected, abs=1e-9)
    assert max(advantage or 0 for advantage in expected) > 0
    assert (folder / "samples/eval_00013.jsonl").exists() and [*folder.glob("wandb/offline-run-*")]
    assert (folder / "curve.png").read_bytes()[:4] == b"\x89PNG"
    assert "2 ranks" in (folder / "plan.txt").read_text()
    AutoModelForCausalLM.from_pretrained(folder / "model")
