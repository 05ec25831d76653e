"""A run does what its flags say, and shows what it did: one recorded run of each script, with
numbers that are all unlike (4 prompts, 3 completions, 10 rows, seed 7), held against its own
samples and formulas; how a run is named, graded and shown; run.sh and the tools that read a run."""
import os
import re
import subprocess
import sys
from datetime import datetime
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

import checkpoint
import evaluate
import fakes
import faults
import files
import flags
import grpo
import log
import metrics
import part
import ranks
import tables
from data import Stream
from dist import share
from errors import SettingsError
from examples import tiny
from fakes import SCRIPTS
from faults import ROOT
from files import is_evaluation, read
from rollout import hash_seed

P, G, ROWS, STEPS, SEED = 4, 3, 10, 13, 7

# ---- the recorded runs

MINE = """
def near(completion, answer, **row):
    if sum(map(ord, completion)) % 5 == 0:
        return None
    return sum(a == b for a, b in zip(completion, answer)) / 6
"""
FLAGS = f"""--data train.jsonl --eval_data test.jsonl --reward exact mine.py:near:0.5 --batch {P}
    --group {G} --steps {STEPS} --seed {SEED} --temperature 0.9 --max_tokens 12 --update_tokens 200
    --max_prompt_tokens 64 --lr 1e-3 --warmup_steps 2 --lr_schedule linear --eval_samples 3
    --eval_temperature 0.8 --eval_every 6 --samples_every 1 --timeout 77
    --minibatches 1"""
OF_SCRIPT = {
    "grpo": "--dynamic_sampling --refills 2 --kl_loss_coef 0.01 --target_reward 1 0 --save_every 5",
    "ppo": """--tp 2 --kl_reward_coef 0.05 --kl_target 0.02 --kl_horizon 20 --critic_lr 2e-3
        --critic_warmup_steps 3 --target_reward 0 1 --save_every 2"""}


@pytest.fixture(scope="module", params=SCRIPTS)
def made(request, tmp_path_factory):
    """The recorded run of a script on two ranks: its folder, rows and calls of each rank. That of
    grpo.py is two engines and a reached grade; that of ppo.py one engine and a missed grade."""
    place, script = tmp_path_factory.mktemp(request.param), request.param
    (place / "mine.py").write_text(MINE)
    for name, number, split in ("train", ROWS, "train"), ("test", 7, "test"):
        rows = [row | {"data_source": "ab"[i % 2]}
                for i, row in enumerate(tiny.rows(number, 0, split=split))]
        (place / f"{name}.jsonl").write_text(files.as_lines(rows))
    status, text = faults.Attempt(
        place, "--model", faults.model(), "--name", "x", *FLAGS.split(), *OF_SCRIPT[script].split(),
        script=script, RECORD=str(place), STARTED_AS="./run.sh job").end()
    folder = place / "runs/x"
    assert (folder / "done.json").exists(), text
    rows = read(folder / "metrics.jsonl")
    return SimpleNamespace(
        script=script, place=place, folder=folder, status=status, text=text, rows=rows,
        steps=[row for row in rows if not is_evaluation(row)], data=read(place / "train.jsonl"),
        samples={path.stem: read(path) for path in sorted(folder.glob("samples/*"))},
        calls=[read(place / f"{rank}.jsonl") for rank in (0, 1)])


def called(made, name: str, rank: int = 0) -> list:
    """The arguments of each recorded call."""
    return [what for kind, step, what in made.calls[rank] if kind == name]


def mean(values) -> float:
    values = [value for value in values if value is not None]
    return float(np.mean(values)) if values else 0.0


def of_samples(rows: list[dict]) -> dict[str, float]:
    """The metrics of all completions of a step, by their formulas, from its file of samples/."""
    totals, tokens = [row["reward"] for row in rows], sum(row["tokens"] for row in rows)
    found = {"rollout/completions": len(rows), "rollout/unscored": totals.count(None),
             "rollout/tokens": tokens, "rollout/length_mean": tokens / len(rows),
             "rollout/truncated_frac": mean([row["truncated"] for row in rows]),
             "reward/mean": mean(totals), "reward/exact": mean(r["rewards"]["exact"] for r in rows),
             "reward/near": mean(row["rewards"]["near"] for row in rows),
             "reward/std": float(np.std([total for total in totals if total is not None]))}
    if all("engine_logprobs" in row for row in rows):
        found["policy/entropy"] = -sum(sum(row["engine_logprobs"]) for row in rows) / tokens
    return found


def groups_of(rows: list[dict]) -> list[list[dict]]:
    return [rows[i:i + G] for i in range(0, len(rows), G)]


def kept_of(rows: list[dict]) -> list[list[dict]]:
    """The groups whose scored rewards differ."""
    return [group for group in groups_of(rows)
            if len({row["reward"] for row in group} - {None}) > 1]


def rollouts(made) -> list[list[range]]:
    """The places in the data that each step draws, by rollout: fewer at the end of an epoch; with
    --dynamic_sampling at most two rollouts more, until the rewards of P groups differ."""
    steps, place = [], 0
    for step in range(1, STEPS + 1):
        rows, drawn, seen = made.samples[f"step_{step:05d}"], [], 0
        while not drawn or (made.script == "grpo" and len(drawn) < 3
                            and len(kept_of(rows[:seen])) < P):
            drawn.append(range(place, place + min(P, ROWS - place % ROWS)))
            place, seen = drawn[-1].stop, seen + G * len(drawn[-1])
        assert seen == len(rows)
        steps.append(drawn)
    return steps


def test_a_step_trains_on_the_rows_that_the_seed_orders_and_its_metrics_are_their_formulas(made):
    """Of every step: rows, rewards, lengths, entropy, which groups are trained on and what is
    dropped, the advantages, and the engine's log-probs near the trainer's."""
    assert [row["step"] for row in made.steps] == [*range(1, STEPS + 1)]
    for row, drawn in zip(made.steps, rollouts(made), strict=True):
        rows = made.samples[f"step_{row['step']:05d}"]
        places = [place for one in drawn for place in one for _ in range(G)]
        assert [sample["position"] for sample in rows] == places
        assert row["data/position"] == drawn[-1].stop
        for sample in rows:
            asked, = Stream(made.data, SEED, sample["position"]).next(1)
            assert asked.row["question"] in sample["prompt"]
        expected = of_samples(rows)
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        assert row.get("rollout/logprob_gap_max", 0) < 1e-4
        kept = groups_of(rows) if made.script == "ppo" else kept_of(rows)[:P]
        trained = [s for group in kept for s in group if s["reward"] is not None]
        dropped = {"batch/dropped_unscored": G * len(kept) - len(trained)}
        if made.script == "grpo":
            surplus = G * (len(kept_of(rows)) - len(kept))
            dropped |= {"batch/dropped_surplus": surplus,
                        "batch/dropped_equal": len(rows) - surplus - G * len(kept)}
            for group in kept:
                baseline = mean(one["reward"] for one in group)
                A = [None if s["reward"] is None else s["reward"] - baseline for s in group]
                assert [s["advantage"] for s in group] == pytest.approx(A)
        expected = dropped | {"batch/dropped": sum(dropped.values()), "batch/prompts": len(kept),
                              "batch/trained": len(trained)}
        assert {name: row[name] for name in expected} == expected
        assert [s for s in rows if s["advantage"] is not None] == trained


def test_each_epoch_and_each_seed_has_an_order_of_its_own():
    """And none is the order of the file."""
    streams = [Stream([*range(30)], seed) for seed in (3, 3, 4)]
    first, again, other = ([[prompt.row for prompt in stream.next(30)] for epoch in range(3)]
                           for stream in streams)
    assert first == again
    orders = [[*range(30)], *first, *other]
    assert all(sorted(order) == orders[0] for order in orders)
    assert not any(one == two for one, two in combinations(orders, 2))


def test_rates_and_coefficients_follow_their_flags(made):
    """The KL is that to the starting model: 0 before the first update. ppo.py's policy waits for
    the critic, its own warm-up begins then, and its coefficient is adapted from the KL of each
    step."""
    schedule = [0.5, 1.0, *(1 - i / 11 for i in range(11))]
    if made.script == "grpo":
        assert abs(made.steps[0]["loss/kl"]) < 1e-9 < made.steps[-1]["loss/kl"]
        assert len({len(drawn) for drawn in rollouts(made)}) > 1  # there were refills
    else:
        rates = [row["critic/lr"] for row in made.steps]
        assert rates == pytest.approx([2e-3 * rate for rate in schedule])
        schedule = [0, 0, 0, 0.5, 1.0, *(1 - i / 8 for i in range(8))]
        coefficient = 0.05
        for row, used in zip(made.steps, called(made, "losses/token_rewards"), strict=True):
            assert used == pytest.approx(coefficient) and used == pytest.approx(
                row["policy/kl_coef"])
            error = np.clip(row["policy/kl"] / 0.02 - 1, -0.2, 0.2)
            coefficient *= 1 + error * min(row["rollout/completions"] / 20, 1)
        assert abs(made.steps[0]["policy/kl"]) < 1e-9 and coefficient != 0.05
    assert [row["lr"] for row in made.steps] == pytest.approx(
        [1e-3 * rate for rate in schedule], abs=1e-9)


def test_each_completion_is_a_request_with_its_own_seed_on_the_rank_that_has_it(made):
    """Of the run's seed, the purpose, the place in the data and its number in the group. Each phase
    is announced with the number of its parts, alike on both ranks."""
    tp = 2 if made.script == "ppo" else 1
    sampled = [("train", one) for drawn in rollouts(made) for one in drawn]
    for rank in range(2):
        # An evaluation has as many requests at once as a step.
        for heat, asked in (0.9, sampled), (0.8, [("eval", range(4)), ("eval", range(4, 7))] * 4):
            seeds = [[hash_seed(SEED, purpose, place, i) for place in one for i in range(G)]
                     for purpose, one in asked]
            found = [call for name, step, call in made.calls[rank] if step >= 0
                     and name == "vllm/LLM/generate" and call[0]["temperature"] == heat]
            assert [[request["seed"] for request in call] for call in found] == [
                one[share(len(one), 2 // tp, rank // tp)] for one in seeds]
            same = {"max_tokens": 12, "ignore_eos": True, "top_p": 1.0}
            compared = [call for name, step, call in made.calls[rank]
                        if step < 0 and name == "vllm/LLM/generate"]
            assert compared and all(same.items() <= request.items()
                                    for call in found + compared for request in call)
            lengths = [request["prompt"] for call in compared for request in call]
            assert max(lengths) == 64  # --max_prompt_tokens: the longest sequence is compared too
        options, = called(made, "vllm/LLM/__init__", rank)
        assert options["tensor_parallel_size"] == tp and options["max_model_len"] >= 64 + 12
        assert options["kv_cache_memory_bytes"] == int(0.1 * 2**30)
        assert called(made, "dist/join", rank) == [77.0]
        built = [["LogprobModel", True], ["ValueModel", True], ["LogprobModel", False]]
        assert called(made, "model/build", rank) == built[:: 3 - tp]
    phases = called(made, "dist/World/same_phase")
    assert phases == called(made, "dist/World/same_phase", 1)
    for phase in "rollout", "reward":
        sizes = [G * len(one) for _, one in sampled] + [4 * G, 3 * G] * 4
        assert sorted(n for name, n in phases if name == phase) == sorted(sizes)
    assert "update" in {name for name, n in phases if n > 0}


def test_an_evaluation_is_of_all_rows_and_of_each_source(made):
    """Before the first step, after every sixth and after the last. pass@k is the mean over all
    choices of k of a row's completions."""
    evaluations = [row for row in made.rows if is_evaluation(row)]
    assert [row["step"] for row in evaluations] == [0, 6, 12, 13]
    for row in evaluations:
        groups = groups_of(made.samples[f"eval_{row['step']:05d}"])
        for prefix, some in ("eval/", groups), ("eval/a/", groups[::2]), ("eval/b/", groups[1::2]):
            passed = [[s["reward"] is not None and s["rewards"]["exact"] == 1 for s in group]
                      for group in some]
            every = [sample for group in some for sample in group]
            expected = {f"pass@{k}": mean(any(chosen) for group in passed
                                          for chosen in combinations(group, k)) for k in (1, 2, 3)}
            expected |= dict(
                rows=len(some), unscored=[s["reward"] for s in every].count(None),
                length_mean=mean(s["tokens"] for s in every),
                reward=mean(s["reward"] for s in every),
                groups_equal=1 - len(kept_of(every)) / len(some))
            assert {name: row[prefix + name] for name in expected} == pytest.approx(expected)
            low, high = row[f"{prefix}pass@1_low"], row[f"{prefix}pass@1_high"]
            assert low <= expected["pass@1"] <= high and low < high


def test_it_ends_graded_and_leaves_what_the_pages_list(made):
    """The exit status, the lines of the screen, the files, a definition of each metric, and the
    model of the last step, which tools/export.py makes of the last checkpoint too."""
    folder, text, reached = made.folder, made.text, made.script == "grpo"
    assert (made.status == 0) == reached
    grade = "reached --target_reward: at most 1.0 before and at least 0.0" if reached else (
        "missed --target_reward: at most 0.0 before and at least 1.0")
    for words in (grade, "a new run. After a kill: ./run.sh job --name x", "step  1/13",
                  "step 13/13", f"plan for {made.script}.py on 2 ranks",
                  "evaluation after 0 steps: pass@1 ",
                  "reward, first 3 and last 10 of 13 steps: 0.", "the run is in runs/x/"):
        assert text.count(words) == 1, (words, text)
    assert len(re.findall(r"^    \[(?:unscored|[\d.]+)\] ", text, re.M)) == 3 * STEPS, text
    assert not (reached and re.search("Warning|WARNING|INFO", text)), text
    defined = {name for table in metrics.METRICS.values() for name in table}
    for name in {re.sub("eval/[ab]/", "eval/", name) for row in made.rows for name in row}:
        general = re.sub(r"(?<=pass@)\d", "K", re.sub("(?<=^reward/)(exact|near)", "NAME", name))
        assert general in defined, name
    expected = {"seed": SEED, "lr": 1e-3, "ranks": 2, "name": "x", "script": f"{made.script}.py"}
    assert expected.items() <= read(folder / "args.json").items()
    assert read(folder / "args.json")["versions"]["torch"].startswith("2.")
    assert read(folder / "done.json") == {"steps": STEPS}
    assert "2 ranks" in (folder / "plan.txt").read_text()
    assert {path.name for path in folder.glob("checkpoints/*")} == {
        "step_10" if reached else "step_12", "step_13"}
    AutoModelForCausalLM.from_pretrained(folder / "model")
    ranks.script(ROOT / "tools/export.py", folder, cwd=made.place)
    ours, theirs = (folder / f"{name}/model.safetensors" for name in ("step_13", "model"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_the_definitions_of_all_metrics_are_printed():
    """--metrics prints each name with its definition, those of the core and of the parts that are
    there, and ends with status 0."""
    shown = " ".join(ranks.script("grpo.py", "--metrics").stdout.split())
    for table in [*metrics.METRICS.values(), *part.asked("METRICS").values()]:
        assert all(f" {name} {definition}" in shown for name, definition in table.items())


# ---- what a run is called, when it saves, how it is graded

@pytest.mark.parametrize("rank", range(4))
def test_the_ranks_of_one_engine_share_its_completions(rank):
    engine = fakes.engine_of(rank, 4, tp=2)
    samples, given = [fakes.sample(n=0, seed=i) for i in range(7)], []
    engine.generate = lambda samples, *_: [s.seed for s in samples]
    engine.world.gather = lambda mine: given.append(mine) or [
        dict(ids=[i], logprobs=[-i]) for i in range(7)]
    engine.complete(samples, 1.0)
    assert given == [[[0, 1], [2, 3], [4, 5], [6]][rank]]
    assert [(s.ids.tolist(), s.logprobs.tolist()) for s in samples] == [
        ([i], [-i]) for i in range(7)]


def test_a_run_that_is_there_goes_on_or_is_refused(tmp_path, monkeypatch):
    """A finished one goes on if more steps are asked for; a value of args.json that its flag does
    not take today is a sentence."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/x").mkdir(parents=True)
    (tmp_path / "runs/x/done.json").write_text('{"steps": 60}')
    (tmp_path / "runs/x/args.json").write_text('{"script": "grpo.py", "aggregation": "all"}')
    now, more = datetime(2024, 2, 3, 4, 5, 6), fakes.args(name="x", steps=90)
    assert files.choose_folder(fakes.args(), now) == Path("runs/grpo-20240203-040506")
    assert files.choose_folder(more, now) == Path("runs/x")
    monkeypatch.setattr(sys, "argv", "grpo.py --name x".split())
    monkeypatch.setattr(flags.dist, "run", lambda main: main())  # it would end this process
    monkeypatch.setattr(sys.stdout, "reconfigure", lambda **options: None, raising=False)
    for call, words in (
            (lambda: files.choose_folder(fakes.args(name="x", steps=60), now), "with 60 steps"),
            (lambda: files.choose_folder(fakes.args(name="x", steps=90, resume=False), now),
             "runs/x exists; choose another, or --resume"),
            (lambda: checkpoint.newest(more, fakes.World(), Path("runs/x"), {}),
             "is finished and has no checkpoint"),
            (lambda: grpo.parse(grpo.Args, ""), "runs/x/args.json, .*--aggregation")):
        with pytest.raises(SettingsError, match=words):
            call()


@pytest.mark.parametrize("reward, passed, missed", [
    ((0.11, 0.9), (0.05, 0.97), []), ((0.05, 0.9), (0.05, 0.99), ["reward", "eval"]),
    ((0.2, 0.99), (0.01, 0.97), ["reward", "eval"])])
def test_a_run_is_graded_by_both_ends_of_both_numbers(capsys, reward, passed, missed):
    it = log.Log(Path(), fakes.World(), 13)
    steps = [{"reward/mean": value, "time/step": 1.0, "rollout/tokens": 7}
             for value in [0.0, 0.1, 0.2] + [0.95] * 10]
    before, after = ({"eval/rows": 9, "eval/pass@1": value} for value in (0.05, 0.97))
    it.rows = [before, *steps, after]
    assert log.grade(it, SimpleNamespace(
        target_reward=reward, target_eval=passed, keep_best=False)) == bool(missed)
    assert re.findall(r"^missed --target_(\w+)", capsys.readouterr().err, re.M) == missed


@pytest.mark.parametrize("rate, n", [(0.02, 1), (0.5, 4)])
def test_the_interval_covers_the_true_rate(rate, n):
    """20 rows with their own rates, `n` samples each. 95 % is promised: at least 90 % is held."""
    rng, covered = np.random.default_rng(0), 0
    for _ in range(200):
        rates = rng.beta(2 * rate, 2 * (1 - rate), 20)
        low, high = evaluate.interval(rng.binomial(n, rates) / n, draws=200)
        covered += low <= rate <= high
    assert covered >= 180


# ---- lines

@pytest.mark.parametrize("steps, skipped, bad, norm, told", [
    (1, 0, 0, 0.0, True), (0, 1, 0, 0.0, True),  # equal rewards in every group; nothing scored
    (0, 0, 1, 0.0, False), (0, 0, 0, 0.0, False),  # not finite; the critic's warm-up
    (1, 0, 0, 1e-13, True)])  # a rounding error is no gradient
def test_a_step_says_what_is_left_and_whether_it_learned(steps, skipped, bad, norm, told):
    it = log.Log(Path(), fakes.World(), 100)
    it.rows = [{"time/step": 900.0}, {"time/step": 3.0}, {"time/step": 3.0}]  # the first compiles
    line = it.step_line({"step": 3, "grad/norm": norm, "update/steps": steps, "time/step": 3.0,
                         "update/skipped": skipped, "grad/norm_not_finite": bad})
    assert ("nothing to learn from" in line) == told and line.endswith("5 min left")


# The updates without a finite gradient in each step, of the policy and of a critic; the count that
# is printed of each step ("": nothing), and "ends" if the run ends there.
BAD = """
0 0 0 0 | | ,,,
1 0 1 0 1 0 1 | | 1,,1,,1,,1
1 1 0 1 1 0 1 1 | | 1,2,,1,2,,1,2
1 1 1 | | 1,2,3 ends
4 1 2 | | 1,2,3 ends
0 1 1 0 1 1 1 | | ,1,2,,1,2,3 ends
0 0 0 | 1 1 1 | 1,2,3 ends
1 0 1 | 0 1 0 | 1,2,3 ends
1 0 0 1 | 0 1 0 1 | 1,2,,1
"""


@pytest.mark.parametrize("policy, critic, printed", tables.table(BAD))
def test_steps_without_a_finite_gradient_are_counted_in_a_row(policy, critic, printed):
    """After a good step the count begins again. Three in a row end the run."""
    it, said, ended = log.Log(Path(), fakes.World(), 100), [], False
    critics = critic.split() or ["0"] * len(policy.split())
    for bad, of_critic in zip(policy.split(), critics, strict=True):
        lines = []
        it.say = lines.append
        metrics = {"grad/norm_not_finite": int(bad), "grad/norm": 1.0, "update/skipped": 5}
        metrics |= {"critic/grad_norm_not_finite": int(of_critic)} if critic else {}
        try:
            it.watch(metrics)
        except RuntimeError as error:
            ended = "3 steps in a row had no finite gradient" in str(error)
        said.append(lines[0].rpartition(" ")[2] if lines else "")
        assert not lines or lines[0].startswith(f"{int(bad) + int(of_critic)} updates had")
    assert ",".join(said) + " ends" * ended == printed


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_ends_after_three_steps_without_a_finite_gradient(monkeypatch, tmp_path, script):
    """`train` watches each step after its row is written. What follows the step, such as a
    checkpoint, is not reached by the third."""
    module, run = SCRIPTS[script], mock.MagicMock(start=0, end=9, evaluations=())
    run.log = log.Log(tmp_path, fakes.World(), 9)
    run.log.times["time/rollout"] = 1.0
    args = fakes.args(script, **{"critic_lr": 1e-3} if script == "ppo" else {})
    monkeypatch.setattr(module, "set_up", lambda args: run)
    monkeypatch.setattr(module, "sample_metrics", lambda *_: {"time/step": 1.0})
    monkeypatch.setattr(module, "score_samples", lambda *_: None)
    run.engine.metrics, run.stream.position = {}, 0
    steps = iter([1, 0, 1, 1, 1, 1])
    monkeypatch.setattr(module, "learn", lambda *_, **__: {
        "grad/norm_not_finite": next(steps), "grad/norm": 0.0, "batch/dropped": 0,
        "update/steps": 1, "update/skipped": 0})
    with pytest.raises(RuntimeError, match="3 steps in a row had no finite gradient"):
        module.train(args)
    assert [call.args[0] for call in run.after_step.call_args_list] == [1, 2, 3, 4]
    rows = files.read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]


def test_a_terminal_that_closed_ends_no_run():
    code = ("import sys; sys.path.insert(0, '.'); from errors import tell\n"
            "for i in range(9999): tell('x' * 99); tell('y', sys.stderr)\nprint('z'); sys.exit(7)")
    done = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, cwd=ROOT)
    done.stdout.read(9)
    done.stdout.close()
    assert done.wait(60) == 7


# ---- run.sh

@pytest.mark.parametrize("line, count, words, graded", [
    ("", "", "grpo.py --warmup_steps 10 --steps 35 --eval_data tiny@test", True),
    ("ppo --lr 1e-5", "1", "ppo.py --warmup_steps 10 --steps 35 --lr 1e-5", True),
    ("--steps 3", "3", "grpo.py --warmup_steps 10 --steps 35 --steps 3", False),
    ("kk --reward own.py:one", "", "grpo.py --model tiny:kk --reward own.py:one", False),
    ("--data mine.jsonl", "", "grpo.py --data mine.jsonl kept", False),
    ("kk --data=mine.jsonl", "", "grpo.py --model tiny:kk --lr 1e-4 --data=mine.jsonl", False),
    ("--name there", "", "grpo.py --name there kept", False)])
def test_run_sh_gives_a_job_its_flags_its_grade_and_ranks(tmp_path, line, count, words, graded):
    """Nothing of a job's own rows is left with --data, no grade with a change of the task, and
    nothing at all if the run goes on. Here set-up is done, and there is no GPU."""
    text = (ROOT / "run.sh").read_text().replace("nvidia-smi", "false")
    (tmp_path / "run.sh").write_text(text.replace("setup() {\n", "setup() {\n  return\n"))
    python = tmp_path / ".venv/bin/python"
    for name in python, tmp_path / "runs/there/args.json":
        name.parent.mkdir(parents=True)
    name.touch()
    python.write_text('#!/bin/sh\necho "$@" "kept ${PYTHONDONTWRITEBYTECODE-kept}"\n')
    python.chmod(0o755)
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "RANKS": count}
    if not count:
        del env["RANKS"]
    done = subprocess.run(["bash", "run.sh", *line.split()], cwd=tmp_path, env=env, text=True,
                          capture_output=True)
    assert done.stdout.endswith(" kept kept\n"), done.stderr
    given = iter(done.stdout.split())
    launch = f"tools/launch.py --local_addr 127.0.0.1 --nproc_per_node {count or 2}"
    words = f"{launch * (count != '1')} {words}"  # one rank needs none
    assert all(word in given for word in words.split()), done.stdout  # in this order
    own = "mine" in line or "there" in line
    flags = {"--warmup_steps": not own, "--eval_data": not own, "--target_reward": graded,
             "--target_eval": graded}
    assert {flag: flag in done.stdout for flag in flags} == flags


# ---- rates that are not given

@pytest.mark.parametrize("size, rates", [(370_000, [3e-4, 1e-3]), (135_000_000, [1e-6, 1e-5])])
def test_a_rate_that_is_not_given_depends_on_the_models_size(size, rates):
    """That of the policy and of the critic. What is given stays."""
    args = SCRIPTS["ppo"].Args()
    for parameters in size, 1:
        args.choose_rates(parameters)
        assert [args.lr, args.critic_lr] == rates
