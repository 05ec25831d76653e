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

import distill
import grpo
import ppo
import sft
from data import Row, Stream
from dist import balance
from errors import SettingsError
from examples import tiny
from preflight import inputs, plan
from preflight.shape import shape_of
from rewards import Score
from trainer.batch import Batch, Completion, Sample

ROOT = Path(__file__).parent.parent
NAN, INF = float("nan"), float("inf")


def Args(script=grpo, **flags):
    """The script's Args with these flags, wherever they live."""
    return plan.changed(script.Args(), **flags)


def problems(ranks: int = 1, n_rows: int | None = 1000, **flags):
    return plan.problems(Args(**flags), ranks, n_rows)


def said(text: str, *parts: str) -> None:
    for part in parts:
        assert part in text, f"{part!r} is not in\n{text}"


def test_flags_are_flat_by_name_and_a_change_leaves_the_original_alone():
    args = ppo.Args()
    flags = plan.flags(args)
    assert {"batch", "tp", "eval_every", "critic_lr", "gamma", "betas"} <= set(flags)
    other = plan.changed(args, tp=4, batch=3, critic_update_tokens=7)
    assert other.engine_args.tp == 4 and other.batch == 3
    assert other.critic_args.critic_update_tokens == 7
    assert plan.flags(args) == flags and other.eval_args is args.eval_args
    with pytest.raises(TypeError, match="tq"):
        plan.changed(args, tq=4)


# ---- what is printed ----

def test_printed_plan():
    args = Args(batch=8, group=8, minibatches=3, kl_loss_coef=0.1, eval_samples=2)
    text = plan.Plan(args, 4, 1001, 7).text()
    of_21 = "in at most 1 round of 21 x 768 tokens (budget 16,384); padding:"
    said(text, "plan for grpo.py on 4 ranks: 8 prompts x 8 completions = 64 completions and 3 "
         "optimizer steps a step",
         "1,001 prompts, 126 steps an epoch, 1 prompt in the last",
         "64 completions: 4 engines of 1 rank, 16 requests each; 16 a rank for its 2 reward",
         f"update     22 completions, 5 or 6 a rank, {of_21} 0 rows (0%)",
         "score      64 completions, 16 a rank, in at most 1 round of 42 x 768 tokens "
         "(budget 32,768); padding: 0 rows (0%)",
         "evaluation 7 rows x 2 = 14 requests, 3 or 4 an engine")
    few = plan.Plan(Args(batch=2, group=1), 4, 1001, 0).text(short=True)
    said(few, f"update     2 completions, 0 or 1 a rank, {of_21} 2 rows (50%)")


def test_plan_command_needs_no_torchrun_no_engine_and_no_weights(tmp_path):
    """The README's command, with vLLM made impossible to import."""
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
    assert not any(tmp_path.iterdir())


def mistakes(**flags) -> str:
    with pytest.raises(SettingsError) as caught:
        inputs.show_plan(Args(plan=True, **flags))
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


# ---- what is refused ----

# One row for each kind of rule: (flags, the sentence, a change that ends it).
REFUSED = [
    (dict(lr=NAN), "--lr must be more than 0 (got nan).", dict(lr=1e-6)),
    (dict(lr=INF), "--lr must be more than 0 (got inf).", dict(lr=1e-6)),
    (dict(keep=0), "--keep must be at least 1 (got 0).", dict(keep=1)),
    (dict(temperature=0.0), "--temperature must be at least 0.01 and at most 2 (got 0.0).",
     dict(temperature=0.01)),
    (dict(weight_decay=-0.1), "--weight_decay must be at least 0 (got -0.1).",
     dict(weight_decay=0.0)),
    (dict(eval_temperature=0.005, eval_data="x"), "--eval_temperature must be 0, or from 0.01 to 2 "
     "(got 0.005).", dict(eval_temperature=0.0)),
    (dict(betas=(0.9, 1.0)), "--betas must be below 1 (got (0.9, 1.0)). Usual: --betas 0.9 0.999.",
     dict(betas=(0.9, 0.999))),
    (dict(betas=(-0.1, 0.9)), "--betas must be at least 0 (got (-0.1, 0.9)).",
     dict(betas=(0.0, 0.9))),
    (dict(dual_clip=1.0), "--dual_clip must be more than 1 (got 1.0).", dict(dual_clip=1.5)),
    (dict(tp=3), "--tp must divide the 4 ranks (got 3). Would work: --tp 2.", dict(tp=2)),
    (dict(shard_size=3), "--shard_size must divide the 4 ranks (got 3). Would work: --shard_size "
     "2, or 0.", dict(shard_size=2)),
    (dict(update_tokens=149, max_prompt_tokens=100, max_tokens=50), "--update_tokens must be at "
     "least 150 (got 149): --max_prompt_tokens 100 + --max_tokens 50.", dict(update_tokens=150)),
    (dict(critic_score_tokens=99), "--critic_score_tokens must be at least 768 (got 99): "
     "--max_prompt_tokens 512 + --max_tokens 256.", dict(critic_score_tokens=768)),
    (dict(batch=64, minibatches=400), "--minibatches must be at most 320 (got 400): the smallest "
     "batch has 40 prompts x --group 8.", dict(minibatches=320)),
    (dict(engine_correction="mask", correction_low=3.0), "--correction_low must be at most "
     "--correction_high 2.0 (got 3.0).", dict(correction_low=2.0)),
    (dict(overlong_buffer=300), "--overlong_buffer must be at most --max_tokens 256 (got 300).",
     dict(overlong_buffer=256)),
    (dict(eval_samples=4, eval_data="x"), "--eval_samples must be 1 where --eval_temperature is 0 "
     "(got 4): all samples of a row would be equal.", dict(eval_temperature=1.0)),
    (dict(eval_every=4), "--eval_every needs --eval_data.", dict(eval_data="x")),
    (dict(target_eval=(0.0, 0.5)), "--target_eval needs --eval_data.", dict(eval_data="x")),
    (dict(target_reward=(0.2, 0.9), steps=5), "--target_reward compares the first 3 and the last "
     "10 steps: --steps must be at least 13 (got 5).", dict(steps=13)),
    (dict(strict=True, plan=True, batch=1, group=2), "--strict: --batch x --group is 2 and ranks x "
     "--minibatches is 4: 2 is not a multiple of 4. Would work: --batch x --group 4, or ranks x "
     "--minibatches 2.", dict(batch=2)),
    (dict(strict=True, dynamic_sampling=True), "--strict cannot hold with --dynamic_sampling, "
     "where any number of groups may stay: give one of them.", dict(strict=False)),
    (dict(ranks=3), "--ranks needs --plan.", dict(plan=True)),
    (dict(lora_alpha=4.0), "--lora_alpha needs --lora_rank.", dict(lora_rank=8)),
    (dict(max_turns=3), "--max_turns needs --reply.", dict(reply="x.py:f")),
    (dict(carry_tokens=4), "--carry_tokens needs --carry.",
     dict(carry=1, engine_correction="truncate")),
    (dict(eval_only=True, eval_data="x", target_eval=(0.0, 0.5)), "--target_reward and "
     "--target_eval grade a training, and --eval_only has none.", dict(eval_only=False)),
    (dict(refills=1), "--refills needs --dynamic_sampling.", dict(dynamic_sampling=True)),
    (dict(kl_estimator="k1"), "--kl_estimator needs --kl_loss_coef.", dict(kl_loss_coef=0.1)),
    (dict(correction_high=4.0), "--correction_high needs --engine_correction.",
     dict(engine_correction="mask")),
    (dict(kl_horizon=1000), "--kl_horizon needs --kl_target.",
     dict(kl_target=0.1, kl_reward_coef=0.1)),
    (dict(advantage_eps=1e-4), "--advantage_eps does nothing with --advantage dr_grpo. Would work: "
     "without it.", dict(advantage="grpo")),
    (dict(clip_high=0.28, loss="reinforce"), "--clip_high does nothing with --loss reinforce. "
     "Would work: without it.", dict(loss="clip")),
    (dict(stop=("a", "")), "--stop must not have an empty string: every completion would end at "
     "once.", dict(stop=("a",))),
    (dict(data=""), "--data must not be empty.", dict(data="x")),
    (dict(group=1), "--advantage dr_grpo compares the completions of a prompt, so --group must be "
     "at least 2 (got 1). With one completion: --advantage reinforce++.", dict(group=2)),
    (dict(minibatches=2, loss="reinforce"), "--loss reinforce has no ratio: --minibatches x "
     "--epochs must be 1 (got 2). For several updates: --loss clip.", dict(loss="clip")),
    (dict(kl_loss_coef=0.1, kl_reward_coef=0.1), "--kl_loss_coef and --kl_reward_coef must not "
     "both be on: set one of them to 0.", dict(kl_loss_coef=0.0)),
    (dict(kl_target=0.1), "--kl_target 0.1 adapts --kl_reward_coef, which must not be 0. Would "
     "work: --kl_reward_coef 0.05.", dict(kl_reward_coef=0.05)),
    (dict(kl_target=0.1, kl_reward_coef=0.1, kl_horizon=102), "--kl_horizon must be more than a "
     "fifth of --batch x --group (got 102): else one step may turn the coefficient negative. Would "
     "work: --kl_horizon 103.", dict(kl_horizon=103)),
    (dict(reward=("environment",)), "--reward environment or turns needs --reply FILE.py:NAME.",
     dict(reply="x.py:C")),
    (dict(carry=1.0), "--carry needs --engine_correction: older policies sampled some of a step's "
     "tokens. Would work: --engine_correction truncate.", dict(engine_correction="truncate")),
    (dict(critic_warmup_steps=60), "--critic_warmup_steps must be below --steps 60 (got 60): else "
     "the policy never learns.", dict(critic_warmup_steps=59))]


@pytest.mark.parametrize("flags, sentence, change", REFUSED)
def test_a_rule_and_a_change_that_ends_it(flags, sentence, change):
    args = Args(grpo if set(flags) <= set(plan.flags(grpo.Args())) else ppo, **flags)
    args.lr = args.lr or 1e-6
    n_rows = None if "strict" in flags else 1000
    assert plan.problems(args, 4, n_rows) == [sentence]
    assert not plan.problems(plan.changed(args, **change), 4, n_rows)


@pytest.mark.parametrize("name", [
    "..", "a/b", "-x", "é" * 101, "\ud800", "tiny-kk-12ab34cd"])
def test_a_name_that_is_no_folder_of_its_own(name):
    problem, = problems(name=name)
    assert problem.startswith("--name must be at most 200 bytes")


QWEN_05B, TINY = map(shape_of, ("Qwen2.5-0.5B", "tiny"))


@pytest.mark.parametrize("shape, machine, ranks, tp, words, works", [
    (QWEN_05B, None, 8, 4, "--tp must divide the 14 attention heads (got 4).", 2),
    (None, 2, 8, 8, "--tp must divide the 2 ranks of a machine (got 8)", 2)])
def test_an_engine_the_model_or_machines_do_not_allow(shape, machine, ranks, tp, words, works):
    """vLLM says so after minutes; an engine over two machines it starts. It says itself what else
    of a model it cannot divide."""
    problem, = plan.problems(Args(tp=tp), ranks, 1000, shape=shape, local_size=machine)
    said(problem, words, f"Would work: --tp {works}.")
    assert not plan.problems(Args(tp=works), ranks, 1000, shape=shape, local_size=machine)


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
    ("must be at most the 64 positions of small", dict(model="small")),
    (r"positions of small\.$", dict(model="small", max_prompt_tokens=64)),
    ("long.jsonl: no prompt is left", dict(model="small", data="long.jsonl")),
    ("odd.jsonl, row 0 .*no prompt column", dict(model="good", data="odd.jsonl")),
    ("tiny:chess is not a model", dict(model="tiny:chess")),
    ("^--teacher tiny:chess", dict(model="good", teacher="tiny:chess")),
    ("^--teacher strange has model_type mamba", dict(model="good", teacher="strange")),
    ("^--teacher some/where", dict(model="good", teacher="some/where"))])
@pytest.mark.parametrize("planning", [True, False])
def test_a_plan_and_a_run_refuse_the_same_before_a_model_is_made(place, words, flags, planning):
    args = Args(distill if "teacher" in flags else grpo, plan=planning, **flags)
    with pytest.raises(SettingsError, match=words):
        inputs.show_plan(args) if planning else inputs.read_inputs(args, 1, 1)
    assert not Path("runs").exists()


def test_a_plan_makes_no_model_and_a_runs_folder_that_is_a_file_is_told(place, capsys):
    with pytest.raises(SettingsError, match="odd.jsonl, row 0 .*no prompt column"):
        inputs.show_plan(Args(plan=True, model="Qwen/Qwen2.5-7B", data="odd.jsonl"))
    inputs.show_plan(Args(plan=True, gpu_gb=80.0))
    assert "plan for grpo.py on 1 rank" in capsys.readouterr().out and not Path("runs").exists()
    Path("runs").write_text("")
    with pytest.raises(SettingsError, match=r"runs/ cannot be written \(File exists"):
        inputs.read_inputs(Args(), 1, 1)


def prompts(script, seed: int) -> list[list[str]]:
    """Of the rows to train on, and of the held-out ones."""
    flags = dict(seed=seed, eval_data="tiny@test", lr=1e-3)
    found = inputs.read_files(Args(script, **flags), 1)
    return [[row.prompt for row in rows] for rows in (found.rows, found.eval_rows)]


@pytest.mark.parametrize("script", [grpo, sft])
def test_held_out_rows_do_not_depend_on_the_seed(script):
    (data, held), (others, same) = (prompts(script, seed) for seed in (0, 1))
    assert held == same and len(held) > 0 and data != others


# ---- what is accepted runs: a property over random settings ----

def draw(rng: random.Random):
    """Args, ranks, rows of the data and of the evaluation. One in four has nonsense in it."""

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
    if rng.random() < 0.25:
        for _ in range(rng.choice([1, 1, 2, 5])):
            name = rng.choice((
                "batch group minibatches epochs max_prompt_tokens max_tokens update_tokens "
                "score_tokens tp shard_size temperature steps eval_samples overlong_buffer "
                "eval_every lr seed").split())
            numbers = [0, -1, 1, 3, 5, 7, 1000]
            if name in ("temperature", "lr"):
                numbers = [0.0, -1.0, 0.5, float("nan"), float("inf")]
            flags[name] = rng.choice(numbers)
    return (Args(**flags), ranks,
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
        if args.dynamic_sampling:                            # some groups are left out
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
