"""What a plan says and refuses, before weights load; and that what is accepted runs."""
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import fakes
import inputs
import plan
import ppo
from batch import Batch, Completion, Sample, balance
from data import Row, Stream
from errors import SettingsError
from examples import tiny
from rewards import Score
from settings import changed, values_of

ROOT = Path(__file__).parent.parent


def said(text: str, *parts: str) -> None:
    for part in parts:
        assert part in text, f"{part!r} is not in\n{text}"


def test_flags_are_flat_by_name_and_a_change_leaves_the_original_alone():
    args = ppo.Args()
    flags = values_of(args)
    assert {"batch", "tp", "eval_every", "critic_lr", "gamma", "betas"} <= set(flags)
    other = changed(args, tp=4, batch=3, critic_update_tokens=7)
    assert other.engine_args.tp == 4 and other.batch == 3
    assert other.critic_args.critic_update_tokens == 7
    assert values_of(args) == flags and other.eval_args is args.eval_args
    with pytest.raises(TypeError, match="tq"):
        changed(args, tq=4)


# ---- what is printed ----

def test_printed_plan():
    args = fakes.args(batch=8, group=8, minibatches=3, kl_loss_coef=0.1, eval_samples=2)
    text = plan.Plan(args, 4, 1001, 7).text()
    of_21 = "in at most 1 round of 21 x 768 tokens (budget 16,384)"
    said(text, "plan for grpo.py on 4 ranks: 8 prompts x 8 completions = 64 completions and 3 "
         "optimizer steps a step",
         "1,001 prompts, 126 steps an epoch, 1 prompt in the last",
         "64 completions: 4 engines of 1 rank, 16 requests each",
         f"update     22 completions, 5 or 6 a rank, {of_21}\n",
         "score      64 completions, 16 a rank, in at most 1 round of 42 x 768 tokens "
         "(budget 32,768)\n",
         "evaluation 7 rows x 2 = 14 requests, 3 or 4 an engine")
    assert [plan.Plan(changed(args, tp=tp), 4, 64, 0).requests for tp in (1, 2, 4)] == [
        16, 32, 64]
    text = plan.Plan(args, 1, 3, 0).text()
    said(text, "3 prompts x 8 completions = 24 comp", "(--batch 8, but --data has only 3)")
    assert "but --data" not in plan.Plan(args, 1, 8, 0).text()
    few = plan.Plan(fakes.args(batch=2, group=1), 4, 1001, 0).text(short=True)
    said(few, f"update     2 completions, 0 or 1 a rank, {of_21}; padding: 2 rows\n")


@pytest.mark.parametrize("script", ["grpo", "ppo"])
def test_a_plan_of_an_evaluation_trains_nothing(script, capsys):
    trains_nothing(script, capsys)


def trains_nothing(script, capsys):
    args = fakes.args(script, plan=True, eval_only=True, eval_data="tiny@test")
    assert inputs.show_plan(args) == 0
    text = capsys.readouterr().out.partition("  --eval_data")[0]  # then what is read of the rows
    said(text, "an evaluation of 1,000 rows, and no training", "saved      nothing",
         " of 80 GiB by --gpu_gb at most")  # a laptop has no such card: the plan says whose it is
    assert not re.search("update|gradients|moments|optimizer|rollout  *[0-9]|prompts",
                         text.partition("--data ")[0]), text


def test_plan_command_needs_no_torchrun_no_engine_and_no_weights(tmp_path):
    """The README's command, with vLLM made impossible to import."""
    (tmp_path / "runs").mkdir()
    made = Path(tiny.ensure(str(ROOT / "runs")))
    (tmp_path / "runs" / made.name).symlink_to(made)
    block = ("import sys; sys.modules['vllm'] = None; import runpy; sys.argv[0] = 'grpo.py'; "
             f"sys.path.insert(0, {str(ROOT)!r}); "
             f"runpy.run_path({str(ROOT / 'grpo.py')!r}, run_name='__main__')")
    done = subprocess.run(
        [sys.executable, "-c", block, *"--plan --ranks 64 --batch 512 --group 8".split()],
        cwd=tmp_path, capture_output=True, text=True, timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    said(done.stdout, "64 engines of 1 rank, 64 requests each",
         "plan for grpo.py on 64 ranks: 512 prompts x 8 completions = 4,096 completions")
    assert not [*tmp_path.glob("runs/grpo-*")]  # no run, and no model but tiny


def mistakes(**flags) -> str:
    with pytest.raises(SettingsError) as caught:
        inputs.show_plan(fakes.args(plan=True, **flags))
    return str(caught.value)


def test_all_mistakes_of_flags_come_in_one_message_and_the_first_broken_file_ends_it(
        tmp_path, monkeypatch):
    """No file is read while a flag is wrong; what the model and the rows need comes at the end."""
    monkeypatch.chdir(tmp_path)
    files = dict(data="nowhere.jsonl", eval_data="neither.jsonl")
    text = mistakes(ranks=3, batch=0, tp=2, reward=("nonsense",), **files)
    said(text, "3 problems", "--batch must be at least 1 (got 0).", "--tp must divide the 3 ranks",
         "nonsense")
    assert "jsonl" not in text
    text = mistakes(ranks=3, tp=3, **files)
    assert "nowhere.jsonl" in text and "neither" not in text and "problem" not in text
    Path("one.jsonl").write_text('{"question": "Sort 1", "answer": "1"}\n')
    said(mistakes(ranks=3, tp=3, minibatches=9, data="one.jsonl"), "2 problems",
         "--tp must divide the 4 att", "the smallest batch has 1 prompts")


# ---- the same checks for --plan as for a run ----

@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """An empty folder to work in, with good/, small/, a model of 64 positions, strange/, of no
    family that is served, and two files."""
    monkeypatch.chdir(tmp_path)
    source = Path(tiny.ensure(str(ROOT / "runs")))
    Path("good").symlink_to(source)
    shutil.copytree(source, "small")
    config = json.loads((source / "config.json").read_text()) | {"max_position_embeddings": 64}
    Path("small/config.json").write_text(json.dumps(config))
    Path("strange").mkdir()
    Path("strange/config.json").write_text('{"model_type": "mamba"}')
    Path("odd.jsonl").write_text('{"quest": "a"}')
    Path("long.jsonl").write_text(json.dumps({"question": "a" * 999, "answer": ""}))
    return tmp_path


@pytest.mark.parametrize("words, flags", [
    (r"tokens 30 \+ --max_tokens 35 must be at most the 64 positions of small. Would work: "
     r"--max_tokens 34\.", dict(model="small", max_prompt_tokens=30, max_tokens=35)),
    (r"positions of small\.$", dict(model="small", max_prompt_tokens=64)),
    ("long.jsonl: no prompt is left", dict(model="small", data="long.jsonl")),
    ("odd.jsonl, row 1.*no prompt column", dict(model="good", data="odd.jsonl")),
    ("tiny:chess is not a model", dict(model="tiny:chess"))])
@pytest.mark.parametrize("planning", [True, False])
def test_a_plan_and_a_run_refuse_the_same_before_a_model_is_made(place, words, flags, planning):
    refused("grpo", words, planning, **flags)


def refused(script, words, planning, **flags):
    """With these words, by a plan or by a run."""
    args = fakes.args(script, plan=planning, **flags)
    with pytest.raises(SettingsError, match=words):
        inputs.show_plan(args) if planning else inputs.read_inputs(args, 1, 1)
    assert not Path("runs").exists()


def test_an_engine_stays_on_a_machine(place):
    with pytest.raises(SettingsError, match="^--tp must divide the 3 ranks of a machine"):
        inputs.read_inputs(fakes.args(tp=2), 6, 3)


def test_a_runs_folder_that_is_a_file_is_told(place):
    Path("runs").write_text("")
    with pytest.raises(SettingsError, match=r"runs/ cannot be written \(File exists"):
        inputs.read_inputs(fakes.args(), 1, 1)


def prompts(script, seed: int) -> list[list[str]]:
    """Of the rows to train on, and of the held-out ones."""
    flags = dict(seed=seed, eval_data="tiny@test", lr=1e-3)
    found = inputs.read_files(fakes.args(script, **flags), 1)
    return [[row.prompt for row in rows] for rows in (found.rows, found.eval_rows)]


def test_held_out_rows_do_not_depend_on_the_seed():
    held_out_rows_stay("grpo")


def held_out_rows_stay(script):
    (data, held), (others, same) = (prompts(script, seed) for seed in (0, 1))
    assert held == same and len(held) > 0 and data != others


# ---- what is accepted runs: a property over random settings ----

def draw(rng: random.Random):
    """Args, ranks, rows of the data and of the evaluation. (test_claims.py draws nonsense.)"""

    def size(*values):
        return rng.choice(values) if rng.random() < 0.5 else rng.randint(1, 24)

    prompt, completion = rng.choice([1, 5, 16, 100]), rng.choice([1, 7, 16, 60])
    longest = prompt + completion

    def budget():
        return rng.choice(
            [longest, longest + 1, 2 * longest, 3 * longest + 2, 10 * longest, 1 << 16])

    flags = dict(
        batch=size(1, 2, 8, 64), group=rng.choice([2, 3, 4, 8, 8, 16]),
        minibatches=rng.choice([1, 1, 2, 3, 4]), epochs=rng.choice([1, 1, 2]),
        max_prompt_tokens=prompt, max_tokens=completion, update_tokens=budget(),
        score_tokens=budget(), strict=rng.random() < 0.3, dynamic_sampling=rng.random() < 0.2,
        overlong_filter=rng.random() < 0.3, eval_samples=1, seed=rng.randrange(5),
        advantage=rng.choice(["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++-baseline"]),
        kl_loss_coef=rng.choice([0.0, 0.0, 0.1]))
    ranks = rng.choice([*range(1, 9), 16, 64])
    flags["tp"] = rng.choice([1, 1, 1, 2, ranks])
    return (fakes.args(**flags), ranks,
            rng.choice([None, 1, 2, 7, 10, 33, 64, 65]), rng.choice([0, 1, 5, 7]))


def simulate(args, ranks: int, n_rows: int, n_eval: int, rng: random.Random) -> None:
    """One epoch: each completion is trained on --epochs times."""
    made = plan.Plan(args, ranks, n_rows, n_eval)
    ids = [[1] * rng.randint(1, args.data_args.max_prompt_tokens) for _ in range(n_rows)]
    stream, seen = Stream([Row(i, "", ids[i], None, {}, "") for i in range(n_rows)], args.seed), []
    while stream.position < n_rows:
        prompts = stream.next(args.batch)
        assert len(prompts) in made.batches
        seen += [p.row.index for p in prompts]
        if args.dynamic_sampling:  # some groups are left out
            prompts = prompts[:rng.randint(0, len(prompts))]
        phases = {p.rows: p for p in made.phases(len(prompts)) if p.name == "update"}
        of = [p for p in prompts for _ in range(args.group)]
        batch = Batch([Sample(p, Completion(np.ones(n, np.int32), np.zeros(n, np.float32), False),
                              "", Score(0.0, {}, None))
                       for p in of for n in [rng.choice([1, args.max_tokens])]])
        trained, minibatches = Counter(), batch.minibatches(args.minibatches, args.epochs)
        assert len(of) < args.minibatches or all(minibatches), "an optimizer step without rows"
        for part in filter(None, minibatches):
            lanes = balance([batch.sizes[r] for r in part], ranks, args.update_tokens)
            counts = {len(lane) for lane in lanes}
            empty = sum(not micro for lane in lanes for micro in lane)
            assert len(counts) == 1 and max(counts) <= phases[len(part)].micros
            assert empty <= phases[len(part)].padding, "more padding than the plan says"
            assert not args.plan_args.strict or not empty, "padding under --strict"
            trained.update(part[i] for lane in lanes for micro in lane for i in micro)
        assert trained == dict.fromkeys(range(len(of)), args.epochs)
    assert sorted(seen) == list(range(n_rows)), "a row was dropped, or came twice in an epoch"


def settle(count: int, seed: int) -> Counter:
    rng, outcomes = random.Random(seed), Counter()
    for _ in range(count):
        args, ranks, n_rows, n_eval = draw(rng)
        try:
            if found := plan.problems(args, ranks, n_rows, n_eval):
                outcomes["refused"] += 1
                assert all(re.fullmatch("--.*[.]", sentence) for sentence in found), found
            else:
                outcomes["runs"] += 1
                plan.Plan(args, ranks, n_rows, n_eval).text()
                simulate(args, ranks, n_rows or 3 * args.batch, n_eval, rng)
        except Exception as error:
            raise AssertionError(f"{args} on {ranks} ranks, {n_rows} rows") from error
    return outcomes


def test_every_setting_is_refused_or_runs():
    outcomes = settle(120, seed=0)
    assert outcomes["runs"] > 40 and outcomes["refused"] > 20, outcomes
