"""plan.py: a plan says what a step does; what is refused is refused before weights load, and all
mistakes of flags together; what is accepted runs."""
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import fakes
import plan
import preflight
from batch import balance
from data import Row, Stream
from errors import SettingsError
from examples import tiny
from families import ROOT, scored

# ---- what is printed ----

def test_printed_plan():
    """Its numbers are those of `simulate`; here are their words."""
    args = fakes.args(batch=8, group=8, minibatches=3, kl_loss_coef=0.1, eval_samples=2, tp=2)
    text = plan.Plan(args, 4, 1001, 7).text()
    few = plan.Plan(fakes.args(batch=8, group=1), 4, 3, 0).text(short=True)
    for words in (
            "plan for grpo.py on 4 ranks: 8 prompts x 8 completions = 64 completions and 3 "
            "optimizer steps a step", "1,001 prompts, 126 steps an epoch, 1 prompt in the last",
            "64 completions: 2 engines of 2 ranks, 32 requests each",
            "update     22 completions, 5 or 6 a rank, in at most 1 round of 21 x 768 tokens (bu",
            "logprobs   64 completions, 16 a rank, in at most 1 round of 42 x 768 tokens (budget ",
            "evaluation 7 rows x 2 = 14 requests, 7 an engine"):
        assert words in text
    assert "but --data" not in text
    assert "3 prompts x 1 completions = 3" in few and "(--batch 8, but --data has only 3" in few
    assert re.search("update     3 completions, 0 or 1 a rank, .*; padding: 1 row\n", few)


@pytest.mark.parametrize("script", ["grpo", "ppo"])
def test_a_plan_of_an_evaluation_trains_nothing(script, capsys):
    assert preflight.show_plan(fakes.args(script, plan=True, eval_only=True,
                                       eval_data="tiny@test")) == 0
    text = capsys.readouterr().out.partition("--data ")[0]  # then what is read of the rows
    for words in ("an evaluation of 1,000 rows, and no training", "saved      nothing",
                  " of 80 GiB by --gpu_gb at most"):  # a laptop has no such card
        assert words in text
    assert not re.search("update|gradients|moments|optimizer|rollout  *[0-9]|prompts", text), text


def test_plan_command_needs_no_torchrun_no_engine_and_no_weights(tmp_path):
    """The README's command, with vLLM made impossible to import. It makes no run."""
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
    assert "plan for grpo.py on 64 ranks: 512 prompts x 8 completions = 4,096 comp" in done.stdout
    assert not [*tmp_path.glob("runs/grpo-*")]


# ---- what is refused ----

@pytest.fixture
def place(tmp_path, monkeypatch) -> None:
    """A folder to work in, with small/, a model of 64 positions, and files of rows."""
    monkeypatch.chdir(tmp_path)
    source = Path(tiny.ensure(str(ROOT / "runs")))
    shutil.copytree(source, "small")
    config = json.loads((source / "config.json").read_text()) | {"max_position_embeddings": 64}
    Path("small/config.json").write_text(json.dumps(config))
    Path("odd.jsonl").write_text('{"quest": "a"}')
    Path("long.jsonl").write_text(json.dumps({"question": "a" * 999, "answer": ""}))
    Path("one.jsonl").write_text('{"question": "Sort 1", "answer": "1"}\n')
    Path("file").mkdir()
    Path("file/runs").write_text("")


TINY = dict(max_prompt_tokens=30, max_tokens=30)


@pytest.mark.parametrize("words, flags", [
    # All mistakes of flags come in one message, and no file is read while a flag is wrong.
    (r"(?s)^(?!.*jsonl).*3 problems.*--batch must be at least 1 \(got 0\).*--tp must divide the 3 "
     "ranks.*nonsense", dict(batch=0, tp=2, reward=("nonsense",), data="nowhere.jsonl")),
    # The first broken file ends it.
    ("^(?!.*(neither|problem)).*nowhere.jsonl",
     dict(tp=3, data="nowhere.jsonl", eval_data="neither.jsonl", model="small")),
    # What the model and the rows need comes at the end.
    ("(?s)2 problems.*the smallest batch has 1 prompts.*--tp must divide the 4 att",
     dict(tp=3, minibatches=9, data="one.jsonl", model="small", **TINY)),
    ("long.jsonl: no prompt is left", dict(model="small", data="long.jsonl", **TINY)),
    ("odd.jsonl, row 1.*no prompt column", dict(model="small", data="odd.jsonl", **TINY)),
    ("tiny:chess is not a model", dict(model="tiny:chess"))])
@pytest.mark.parametrize("planning", [True, False])
def test_a_plan_and_a_run_refuse_the_same_before_a_model_is_made(place, words, flags, planning):
    args = fakes.args(plan=planning, **flags, **dict(ranks=3) if planning else {})
    with pytest.raises(SettingsError, match=words):
        preflight.show_plan(args) if planning else preflight.read_inputs(args, 3, 3)
    assert not Path("runs").exists()


def test_what_a_run_alone_refuses(place, monkeypatch):
    with pytest.raises(SettingsError, match="^--tp must divide the 3 ranks of a machine"):
        preflight.read_inputs(fakes.args(tp=2), 6, 3)
    monkeypatch.chdir("file")
    with pytest.raises(SettingsError, match=r"runs/ cannot be written \(File exists"):
        preflight.read_inputs(fakes.args(), 1, 1)


def test_held_out_rows_do_not_depend_on_the_seed():
    (data, held), (others, same) = ([[row.prompt for row in rows] for rows in (
        found.rows, found.eval_rows)] for found in (
            preflight.read_files(fakes.args(seed=seed, eval_data="tiny@test"), 1)
            for seed in (0, 1)))
    assert held == same and len(held) > 0 and data != others


# ---- what is accepted runs: a property over random settings (test_claims.py draws nonsense) ----

def draw(rng: random.Random):
    """Args, ranks, rows of the data and of the evaluation."""
    prompt, completion = rng.choice([1, 5, 16, 100]), rng.choice([1, 7, 16, 60])
    longest = prompt + completion
    budgets = [longest, longest + 1, 2 * longest, 3 * longest + 2, 10 * longest, 1 << 16]
    ranks = rng.choice([*range(1, 9), 16, 64])
    args = fakes.args(
        batch=rng.choice([1, 2, 8, 64, rng.randint(3, 24)]), group=rng.choice([2, 3, 4, 8, 8, 16]),
        minibatches=rng.choice([1, 1, 2, 3, 4]), epochs=rng.choice([1, 1, 2]),
        max_prompt_tokens=prompt, max_tokens=completion, update_tokens=rng.choice(budgets),
        logprob_tokens=rng.choice(budgets), strict=rng.random() < 0.3,
        seed=rng.randrange(5), kl_loss_coef=rng.choice([0.0, 0.1]),
        tp=rng.choice([1, 1, 1, 2, ranks]))
    return args, ranks, rng.choice([None, 1, 2, 7, 10, 33, 64, 65]), rng.choice([0, 1, 5, 7])


def simulate(args, ranks: int, n_rows: int, n_eval: int, rng: random.Random) -> None:
    """One epoch: each completion is trained on --epochs times, in at most as many micro-batches
    and rows of padding as the plan says."""
    made = plan.Plan(args, ranks, n_rows, n_eval)
    ids = [[1] * rng.randint(1, args.max_prompt_tokens) for _ in range(n_rows)]
    stream, seen = Stream([Row(i, "", ids[i], None, {}, "") for i in range(n_rows)], args.seed), []
    while stream.position < n_rows:
        prompts = stream.next(args.batch)
        assert len(prompts) in made.batches
        seen += [p.row.index for p in prompts]
        phases = {p.rows: p for p in made.phases(len(prompts)) if p.name == "update"}
        of = [p for p in prompts for _ in range(args.group)]
        batch = scored(of, [[1] * rng.choice([1, args.max_tokens]) for _ in of])
        trained, minibatches = Counter(), batch.minibatches(args.minibatches, args.epochs)
        assert len(of) < args.minibatches or all(minibatches), "an optimizer step without rows"
        for part in filter(None, minibatches):
            lanes = balance([batch.sizes[r] for r in part], ranks, args.update_tokens)
            counts = {len(lane) for lane in lanes}
            empty = sum(not micro for lane in lanes for micro in lane)
            assert len(counts) == 1 and max(counts) <= phases[len(part)].rounds
            assert empty <= phases[len(part)].padding, "more padding than the plan says"
            assert not args.strict or not empty, "padding under --strict"
            trained.update(part[i] for lane in lanes for micro in lane for i in micro)
        assert trained == dict.fromkeys(range(len(of)), args.epochs)
    assert sorted(seen) == list(range(n_rows)), "a row was dropped, or came twice in an epoch"


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow)
                                       for i in range(1, 9))])
def test_every_setting_is_refused_or_runs(seed):
    rng, outcomes = random.Random(seed), Counter()
    for _ in range(120):
        args, ranks, n_rows, n_eval = draw(rng)
        found = plan.problems(args, ranks, n_rows, n_eval)
        outcomes[bool(found)] += 1
        assert all(re.fullmatch("--.*[.]", sentence) for sentence in found), found
        if not found:
            try:
                plan.Plan(args, ranks, n_rows, n_eval).text()
                simulate(args, ranks, n_rows or 3 * args.batch, n_eval, rng)
            except Exception as error:
                raise AssertionError(f"{args} on {ranks} ranks, {n_rows} rows") from error
    assert outcomes[False] > 40 and outcomes[True] > 20, outcomes
