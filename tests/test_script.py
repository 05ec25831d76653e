"""The scripts as a user runs them: mistakes are told before anything loads, real rows train end to end, and the folder has it all."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

ROOT = Path(__file__).parent.parent
GSM8K = ROOT.parent / "shared/data/gsm8k/train.jsonl"
ENV = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}


def script(*flags: str, ranks: int = 1, name: str = "grpo.py", cwd: Path = ROOT, seconds: int = 300) -> subprocess.CompletedProcess:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else [sys.executable]
    return subprocess.run([*launch, str(ROOT / name), *flags], cwd=cwd, env=ENV, capture_output=True, text=True, timeout=seconds)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """An empty folder to run in, with the tiny model there already."""
    import tiny
    here = tmp_path_factory.mktemp("place")
    (here / "runs").mkdir()
    cached = Path(tiny.ensure(str(ROOT / "runs")))
    (here / "runs" / cached.name).symlink_to(cached)
    return here


def left(place: Path) -> set[str]:
    return {p.name for p in (place / "runs").iterdir() if not p.name.startswith("tiny-")}


# ---- mistakes -------------------------------------------------------------------------------------------------------

def test_every_mistake_is_told_at_once_and_leaves_nothing_behind(place):
    (place / "empty.jsonl").write_text("")
    done = script("--data", "nowhere.jsonl", "--eval_data", "empty.jsonl", "--reward", "exakt", "--batch", "0", "--update_tokens", "-5", "--lr", "nan", cwd=place)
    assert done.returncode == 2, done.stderr[-2000:]
    for word in ("nowhere.jsonl", "empty.jsonl", "exakt", "exact", "--batch is 0", "--update_tokens is -5", "--lr is nan"):
        assert word in done.stderr, (word, done.stderr)
    assert "Traceback" not in done.stderr and "vllm" not in done.stderr.lower()
    assert left(place) == set()


def test_a_malformed_line_a_missing_column_and_a_model_that_is_not_there(place):
    (place / "torn.jsonl").write_text('{"question": "a", "answer": "b"}\n{"question": \n')
    (place / "odd.jsonl").write_text('{"quest": "a", "reply": "b"}\n')
    done = script("--data", "torn.jsonl", "--eval_data", "odd.jsonl", "--update_tokens", "100", cwd=place)
    assert done.returncode == 2
    assert "torn.jsonl:2" in done.stderr                        # file:line
    assert "quest" in done.stderr and "reply" in done.stderr    # the columns there are
    assert "--update_tokens is 100" in done.stderr and "Would work: --update_tokens 768" in done.stderr
    done = script("--model", "no/such-model", cwd=place)
    assert done.returncode == 2 and "no/such-model" in done.stderr and "Traceback" not in done.stderr
    done = script("--model", "tiny:chess", cwd=place)
    assert done.returncode == 2 and "tiny:sort, tiny:kk" in done.stderr and "Traceback" not in done.stderr
    assert left(place) == set()


def test_prompts_that_are_all_too_long_are_an_error_with_the_number_that_works(place):
    (place / "long.jsonl").write_text(json.dumps({"question": "x" * 300, "answer": "b"}) + "\n")
    done = script("--data", "long.jsonl", "--max_prompt_tokens", "64", cwd=place)
    assert done.returncode == 2 and "no prompt is left" in done.stderr and "--max_prompt_tokens" in done.stderr


def test_a_mistake_on_several_ranks_is_said_once(place):
    done = script("--data", "nowhere.jsonl", ranks=2, cwd=place)
    assert done.returncode != 0
    assert len(re.findall(r"^error: .*nowhere\.jsonl", done.stderr, re.MULTILINE)) == 1


# ---- a real run -----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def run(place) -> dict:
    """Three steps on GSM8K rows with the tiny model (its score is 0: it cannot do them), two ranks, everything on."""
    rows = [json.loads(line) for line in GSM8K.open()][:20] if GSM8K.exists() else \
        [{"question": f"Tom has {i} apples and buys {i + 1} more. How many?", "answer": f"{i} + {i + 1}\n#### {2 * i + 1}"} for i in range(20)]
    (place / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (place / "seven.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows[:7]))
    (place / "mine.py").write_text("def length(completion, answer, **row):\n    return len(completion) / 100\n")
    done = script("--data", "train.jsonl", "--eval_data", "seven.jsonl", "--reward", "gsm8k", "mine.py:length:0.5", "--batch", "3", "--group", "4",
                  "--steps", "3", "--max_prompt_tokens", "1024", "--max_tokens", "24", "--minibatches", "2", "--lr", "3e-4", "--warmup_steps", "2",
                  "--lr_schedule", "linear", "--betas", "0.9", "0.95", "--weight_decay", "0.01", "--stop", "zq", "--wandb", "test", "--name", "gsm",
                  "--eval_samples", "3", "--eval_temperature", "0.8", "--eval_every", "2", "--samples_every", "1", "--target_reward", "0.9", "--steps", "13",
                  ranks=2, cwd=place)
    folder = place / "runs/gsm"
    assert (folder / "metrics.jsonl").exists(), done.stderr[-3000:]
    return {"done": done, "folder": folder, "rows": [json.loads(line) for line in (folder / "metrics.jsonl").open()]}


def test_it_ends_graded_with_what_a_person_wants_to_know(run):
    said = run["done"].stdout
    assert run["done"].returncode != 0 and "missed --target_reward" in said             # nobody learns GSM8K in 13 steps
    for words in ("plan for grpo.py on 2 ranks", "step  1/13", "step 13/13", "evaluation after 0 steps", "evaluation after 13 steps",
                  "reward 0.", "tokens/s", "everything is in runs/gsm/"):
        assert words in said, (words, said)
    for noise in ("Warning", "WARNING", "INFO", "Traceback"):
        assert noise not in said, said
    assert "Warning" not in run["done"].stderr.split("torch.distributed.elastic")[0]


def test_metrics_have_every_step_once_and_the_names_of_the_readme(run):
    assert [r["step"] for r in run["rows"]] == list(range(14))                          # the last line is the last evaluation's
    readme = (ROOT / "README.md").read_text()
    for name in ("reward/mean", "reward/gsm8k", "reward/length", "rollout/length_mean", "rollout/logprob_gap_max", "loss/policy", "policy/entropy",
                 "policy/clip_frac", "grad/norm", "lr", "batch/prompts", "batch/dropped", "batch/dropped_unscored", "time/step"):
        assert name in run["rows"][0], name
        assert name in readme or name.split("/")[0] + "/" in readme, name
    assert max(r["rollout/logprob_gap_max"] for r in run["rows"][:13]) < 1e-4
    assert [r["batch/prompts"] for r in run["rows"][:7]] == [3, 3, 3, 3, 3, 3, 2]       # 20 rows in threes: the last batch is whole
    evaluated = [r["step"] for r in run["rows"] if any(k.endswith("pass@1") for k in r)]
    assert evaluated == [0, 2, 4, 6, 8, 10, 12, 13]
    assert all(r[k] == 7 for r in run["rows"] for k in r if k.startswith("eval/") and k.endswith("/rows"))
    assert any(k.endswith("pass@3") for k in run["rows"][0])


def test_the_learning_rate_that_is_logged_is_the_schedule(run):
    from model import learning_rate
    assert [r["lr"] for r in run["rows"][:13]] == pytest.approx([learning_rate(i, 13, 3e-4, 2, "linear") for i in range(13)], abs=1e-9)


def test_args_are_kept_as_used(run):
    args = json.loads((run["folder"] / "args.json").read_text())
    assert args["betas"] == [0.9, 0.95] and args["weight_decay"] == 0.01 and args["lr"] == 3e-4 and args["stop"] == ["zq"] and args["ranks"] == 2
    assert args["versions"]["torch"].startswith("2.")


def test_the_folder_has_samples_a_curve_a_plan_wandb_and_a_model(run):
    folder = run["folder"]
    assert "completion" in (folder / "samples/step_00003.txt").read_text() and (folder / "samples/eval_00013.txt").exists()
    assert (folder / "curve.png").read_bytes()[:4] == b"\x89PNG" and "2 ranks" in (folder / "plan.txt").read_text()
    assert list(folder.glob("wandb/offline-run-*"))
    from transformers import AutoModelForCausalLM
    AutoModelForCausalLM.from_pretrained(folder / "model")


# ---- the README's real models ----------------------------------------------------------------------------------------

def rows_like(data: str, n: int) -> list[dict]:
    """Rows in the columns of the data set that a command of the README names."""
    if "gsm8k" in data:
        return [{"question": f"Tom has {i} apples and buys {i + 1} more. How many?", "answer": f"{i} + {i + 1} = <<{i}+{i + 1}={2 * i + 1}>>\n#### {2 * i + 1}"}
                for i in range(n)]
    if "Countdown" in data:
        return [{"target": 7 + i, "nums": [3, 4, i]} for i in range(n)]
    return [{"data_source": "kk_logic", "prompt": [{"role": "user", "content": f"<|im_start|>user\nYou meet {i}: Zoey and Ava. Zoey says Ava lies.<|im_end|>\n"
                                                    "<|im_start|>assistant\n<think>"}], "ability": "logic", "extra_info": {"index": i},
             "reward_model": {"style": "rule", "ground_truth": {"solution_text_format": "(1) Zoey is a knight\n(2) Ava is a knave"}}} for i in range(n)]


@pytest.mark.parametrize("name", [pytest.param("gsm8k", marks=pytest.mark.slow), pytest.param("countdown", marks=pytest.mark.slow), "kk"])
def test_the_commands_of_the_readme_run_with_the_tiny_model(place, name):
    """Word for word from the README, but for the model, the files (same columns), and the numbers that only make it long."""
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    command = next(line.split() for line in text.splitlines() if "grpo.py --model Qwen" in line and line.endswith(f"--name {name}"))
    flags = dict(pair.partition(" ")[::2] for pair in " ".join(command[command.index("grpo.py") + 1:]).split(" --"))
    flags = {key.removeprefix("--"): value.split() for key, value in flags.items()}
    for key in {"data", "eval_data"} & flags.keys():
        file = f"{name}-{key}." + ("parquet" if flags[key][0].endswith("parquet") else "jsonl")
        rows = rows_like(flags[key][0], 6 if key == "data" else 3)
        if file.endswith("parquet"):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), place / file)
        else:
            (place / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags[key] = [file]
    flags |= {"model": ["tiny"], "batch": ["3"], "group": ["2"], "steps": ["2"], "max_tokens": ["16"], "name": [f"readme-{name}"], "save_every": ["2"]}
    done = script(*(word for key, value in flags.items() for word in (f"--{key}", *value)), cwd=place,
                  ranks=min(2, int(command[command.index("--nproc_per_node") + 1])) if "torchrun" in command else 1)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (place / f"runs/readme-{name}/metrics.jsonl").open()]
    assert len(rows) == 2 + ("eval_data" in flags) and all(row["batch/completions"] == 6 and row["rollout/unscored"] == 0 for row in rows[:2])
    assert (place / f"runs/readme-{name}/checkpoints/step_2").is_dir() and f"reward/{flags['reward'][0]}" in rows[0]


def test_the_optimizer_uses_the_rate_it_is_given():
    """A regression of another project: the rate in the log was not the one in the optimizer."""
    import torch
    import model
    world = type("W", (), {"size": 1, "rank": 0, "device": torch.device("cpu")})()
    layer = torch.nn.Linear(3, 1, bias=False)
    trained = model.Trained(layer, world, betas=(0.0, 0.0), weight_decay=0.0, max_grad_norm=0.0)
    before = layer.weight.detach().clone()
    trained.backward(layer(torch.ones(1, 3)).sum())
    trained.step(0.25)
    assert torch.allclose(before - layer.weight, torch.full((1, 3), 0.25), atol=1e-6)     # Adam's first step is lr · sign(gradient)
