"""plan.py: what is refused before anything loads and with which words, what is printed, and that what is accepted really runs.

The last is a property over random settings, nonsense included: a pass over the data is simulated with the shipped pieces
(Stream, share, minibatches, balance), which are all a step consists of as far as sizes go.
"""
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import plan
from batch import Batch, Completion
from data import Row, Stream
from dist import balance, share
from grpo import Args
from shapes import SHAPES

ROOT = Path(__file__).parent.parent


def problems(ranks: int = 1, n_rows: int | None = 1000, n_eval: int = 0, **flags) -> list[plan.Problem]:
    return plan.problems(Args(**flags), ranks, n_rows, n_eval)


def one(ranks: int = 1, n_rows: int | None = 1000, **flags) -> plan.Problem:
    found = problems(ranks, n_rows, **flags)
    assert len(found) == 1, [str(p) for p in found]
    return found[0]


def command(*flags: str, seconds: float = 60) -> subprocess.CompletedProcess:
    """The script as it is shipped, with vLLM made impossible to import."""
    block = "import sys; sys.modules['vllm'] = None; import runpy; sys.argv[0] = 'grpo.py'; runpy.run_path('grpo.py', run_name='__main__')"
    return subprocess.run([sys.executable, "-c", block, *flags], cwd=ROOT, capture_output=True, text=True, timeout=seconds,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})


# ---- what is printed ------------------------------------------------------------------------------------------------

def test_printed_plan():
    text = plan.Plan(Args(batch=8, group=8, minibatches=3, kl_loss_coef=0.1, eval_samples=2), "grpo.py", 4, 1001, 7).text()
    for line in ("plan for grpo.py on 4 ranks: 8 prompts x 8 completions = 64 completions and 3 optimizer steps a step",
                 "1,001 prompts: 126 steps an epoch, the last with the 1 that are left",
                 "4 engines of 1 rank: 16 requests each; no padding",
                 "16 completions a rank, 2 worker processes each",
                 "update     22 completions, about 5 or 6 a rank, in at most 1 micro-batch of 21 x 768 tokens (budget 16,384); no padding rows",
                 "score      64 completions, about 16 a rank, in at most 1 micro-batch of 42 x 768 tokens (budget 32,768); no padding rows",
                 "last batch 1 prompts = 8 completions, 2 an engine",
                 "update   2 completions, about 0 or 1 a rank, in at most 1 micro-batch of 21 x 768 tokens (budget 16,384); padding: 2 rows of 2 tokens, 50%",
                 "evaluation 7 rows x 2 = 14 requests, 3 or 4 an engine; no padding"):
        assert line in text, f"{line!r} is not in\n{text}"
    assert "last batch" in plan.Plan(Args(batch=8), "grpo.py", 4, 1001, 0).text(short=True)


def test_printed_plan_of_a_small_data_set_and_of_an_unknown_one():
    assert "5 prompts: 1 steps an epoch, each with all 5 (fewer than --batch 8)" in plan.Plan(Args(batch=8), "grpo.py", 2, 5, 0).text()
    assert "not read here" in plan.Plan(Args(batch=8), "grpo.py", 2, None, 0).text()


def test_plan_command_needs_no_torchrun_no_engine_and_no_weights(tmp_path):
    """The README's command. It must not even make the tiny model: a plan writes nothing."""
    before = set((ROOT / "runs").glob("tiny-*")) if (ROOT / "runs").exists() else set()
    done = command("--plan", "--ranks", "64", "--batch", "512", "--group", "8")
    assert done.returncode == 0, done.stderr
    assert "plan for grpo.py on 64 ranks: 512 prompts x 8 completions = 4,096 completions" in done.stdout
    assert "64 engines of 1 rank: 64 requests each" in done.stdout
    assert (set((ROOT / "runs").glob("tiny-*")) if (ROOT / "runs").exists() else set()) == before


def test_plan_command_tells_all_problems_in_one_message():
    done = command("--plan", "--ranks", "3", "--batch", "0", "--tp", "3", "--top_p", "0.9", "--data", "nowhere.jsonl", "--reward", "nonsense")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    for said in ("--batch is 0", "Would work: --batch 1", "--top_p is 0.9", "--tp is 3; an engine's ranks", "nowhere.jsonl", "nonsense", "5 problems"):
        assert said in done.stderr, f"{said!r} is not in\n{done.stderr}"


def test_512_prompts_on_6_ranks():
    """EasyR1 passes every check, then dies at the first training rollout. Here: 4,096 requests fall 682 or 683 to an engine."""
    assert not problems(6, n_rows=7473, batch=512, group=8)
    text = plan.Plan(Args(batch=512, group=8), "grpo.py", 6, 7473, 7).text()
    assert "6 engines of 1 rank: 682 or 683 requests each; no padding" in text and "last batch 305 prompts" in text
    assert "evaluation 7 rows x 1 = 7 requests, 1 or 2 an engine; no padding" in text


# ---- what is refused ------------------------------------------------------------------------------------------------

def test_a_budget_below_the_longest_sequence():
    for name in ("update_tokens", "score_tokens"):
        assert not problems(max_prompt_tokens=100, max_tokens=50, **{name: 150})
        problem = one(max_prompt_tokens=100, max_tokens=50, **{name: 149})
        assert problem.fixes == ((name, 150),)
        assert str(problem) == (f"--{name} is 149, but one sequence may have max_prompt_tokens 100 + max_tokens 50 = 150 tokens and must fit in one "
                                f"micro-batch. Would work: --{name} 150.")


def test_strict_names_the_nearest_batch_group_and_ranks():
    problem = one(4, strict=True, batch=1, group=2, n_rows=None)
    assert "--strict: update has 2 completions in a pass, for 4 ranks x 1 micro-batches: 2 would be padding alone." in problem.text
    assert dict(problem.fixes[::-1]) == {"batch": 2, "group": 4, "ranks": 2} and str(problem).endswith(
        "Would work: --batch 2 or --group 4 or ranks 2 or ranks 1." if len(problem.fixes) == 4 else "Would work: --batch 2 or --group 4 or ranks 2.")
    assert not problems(4, strict=True, batch=64, n_rows=None)
    assert "last" not in str(one(8, strict=True, batch=64, group=4, n_rows=65)), "the last batch of an epoch counts"


def test_more_minibatches_than_completions_in_the_last_batch():
    problem = one(n_rows=65, batch=64, minibatches=16)
    assert "--minibatches is 16, but the last batch of an epoch has 1 prompts x group 8 = 8 completions" in problem.text
    assert ("minibatches", 8) in problem.fixes and ("batch", 63) in problem.fixes and ("group", 16) in problem.fixes


@pytest.mark.parametrize("flags, said", [
    (dict(tp=3), "--tp is 3 and there are 4 ranks"), (dict(shard_size=3), "--shard_size is 3"), (dict(lr=float("nan")), "--lr is nan"),
    (dict(group=1), "--advantage dr_grpo compares"), (dict(kl_loss_coef=0.1, kl_reward_coef=0.1), "are both on"),
    (dict(loss="reinforce", epochs=2), "--loss reinforce has no ratio"), (dict(overlong_buffer=300), "--overlong_buffer is 300"),
    (dict(target_reward=0.9, steps=5), "--target_reward compares"), (dict(stop=("a", "")), "--stop has an empty string"),
    (dict(gpu_memory_utilization=1.2), "--gpu_memory_utilization is 1.2"), (dict(betas=(0.9, 1.0)), "--betas is"), (dict(seed=2**63), "--seed is"),
    (dict(eval_every=5), "there is no --eval_data"), (dict(eval_samples=4), "greedy samples are all the same"), (dict(dual_clip=1.0), "--dual_clip is 1.0"),
    (dict(engine_correction="mask", correction_low=3.0), "all would be masked"), (dict(seed=-1), "--seed is -1"), (dict(warmup_steps=-2), "--warmup_steps is -2")])
def test_each_combination_that_makes_no_sense(flags, said):
    problem = one(4, **flags)
    assert said in problem.text
    assert problem.fixes, "names no value that works"
    check_fixes(Args(**flags), 4, 1000, [problem])


QWEN_05B, QWEN_15B, TINY = (SHAPES[name] for name in ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "tiny"))


@pytest.mark.parametrize("shape, machine, ranks, tp, said, fixes", [
    (QWEN_05B, None, 8, 4, "--tp is 4; an engine's ranks share the model evenly, which its 14 attention heads would not allow.", [2]),
    (QWEN_05B, None, 7, 7, "its 2 key-value heads, MLP of width 4,864, vocabulary of 151,936 would", [1]),
    (QWEN_15B, 6, 6, 6, "its MLP of width 8,960, vocabulary of 151,936 would", [2]),
    (QWEN_05B, 4, 4, 3, "--tp is 3 and there are 4 ranks", [2]),                        # not 4, which divides the ranks but not the heads
    (TINY, 3, 6, 2, "--tp is 2 and a machine has 3 ranks; they must divide into engines", [1]),
    (TINY, 2, 8, 4, "--tp is 4 and a machine has 2 ranks", [2]),
    (None, 2, 8, 8, "--tp is 8 and a machine has 2 ranks", [2])])
def test_an_engine_that_the_model_or_the_machines_do_not_allow(shape, machine, ranks, tp, said, fixes):
    """vLLM would say so on every rank, after minutes, in an assertion; an engine over two machines it would start."""
    found = plan.problems(Args(tp=tp), ranks, 1000, shape=shape, machine=machine)
    assert any(said in p.text for p in found), [str(p) for p in found]
    assert {p.kind for p in found} == {"--tp"} and all([v for f, v in p.fixes if f == "tp"] == fixes for p in found), found
    for value in fixes:
        assert not plan.problems(Args(tp=value), ranks, 1000, shape=shape, machine=machine)


def test_engines_that_are_allowed():
    for tp, shape in ((2, QWEN_05B), (4, TINY), (4, SHAPES["Qwen2.5-7B"]), (8, SHAPES["Qwen2.5-3B"])):      # 2 key-value heads for 8 ranks: copies
        assert not plan.problems(Args(tp=tp), 8, 1000, shape=shape, machine=8)
    text = str(plan.problems(Args(tp=2), 3, 1000, shape=TINY, machine=3)[0])
    assert text.endswith("Would work: --tp 1 or ranks 2 or ranks 4.") and "a machine has" not in text


def test_all_problems_come_together_and_no_suggestion_trades_one_for_another():
    found = problems(6, n_rows=100, batch=64, group=4, minibatches=200, update_tokens=10, tp=4, top_p=0.5, strict=True, shard_size=4)
    assert {p.kind for p in found} == {"--minibatches", "--update_tokens", "--tp", "--top_p", "--strict", "--shard_size"}
    check_fixes(Args(batch=64, group=4, minibatches=200, update_tokens=10, tp=4, top_p=0.5, strict=True, shard_size=4), 6, 100, found)
    text = plan.together([str(p) for p in found])
    assert text.startswith("6 problems:") and "\n  6. " in text


def check_fixes(args: Args, ranks: int, n_rows: int | None, found: list[plan.Problem]) -> None:
    """Each suggested change ends its problem, makes no new one, and is accepted where there was no other."""
    for problem in found:
        for flag, value in problem.fixes:
            changed, w = (args, value) if flag == "ranks" else (replace(args, **{flag: value}), ranks)
            left = {p.kind for p in plan.problems(changed, w, n_rows, suggest=False)}
            assert left <= {p.kind for p in found} - {problem.kind}, f"{flag} {value} for {problem.text}: {left}"
            if len(found) == 1:
                assert not left


# ---- what is accepted runs: a property over random settings ---------------------------------------------------------

def draw(rng: random.Random) -> tuple[Args, int, int | None, int]:
    """Settings, ranks, prompts in the data and in the evaluation set. One time in four there is nonsense among them."""
    size = lambda *values: rng.choice(values) if rng.random() < 0.5 else rng.randint(1, 24)
    prompt, completion = rng.choice([1, 5, 16, 100]), rng.choice([1, 7, 16, 60])
    longest = prompt + completion
    budget = lambda: rng.choice([longest, longest + 1, 2 * longest, 3 * longest + 2, 10 * longest, 1 << 16])
    flags = dict(batch=size(1, 2, 8, 64), group=rng.choice([2, 3, 4, 8, 8, 16]), minibatches=rng.choice([1, 1, 2, 3, 4]), epochs=rng.choice([1, 1, 2]),
                 max_prompt_tokens=prompt, max_tokens=completion, update_tokens=budget(), score_tokens=budget(), strict=rng.random() < 0.3,
                 dynamic_sampling=rng.random() < 0.2, overlong_filter=rng.random() < 0.3, eval_samples=1, seed=rng.randrange(5),
                 advantage=rng.choice(["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++-baseline"]), kl_loss_coef=rng.choice([0.0, 0.0, 0.1]))
    ranks = rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 16, 64])
    flags["tp"] = rng.choice([1, 1, 1, 2, ranks])
    if rng.random() < 0.25:
        for _ in range(rng.choice([1, 1, 2, 5])):
            name = rng.choice(["batch", "group", "minibatches", "epochs", "max_prompt_tokens", "max_tokens", "update_tokens", "score_tokens", "tp",
                               "shard_size", "top_p", "temperature", "steps", "eval_samples", "overlong_buffer", "eval_every", "lr", "seed"])
            number = rng.choice([0, -1, 1, 3, 5, 7, 1000])
            flags[name] = rng.choice([0.0, -1.0, 0.5, float("nan"), float("inf")]) if name in ("top_p", "temperature", "lr") else number
    return Args(**flags), rng.choice([ranks] * 9 + [0]), rng.choice([None, 1, 2, 7, 10, 33, 64, 65]), rng.choice([0, 1, 5, 7])


def simulate(args: Args, ranks: int, n_rows: int, n_eval: int, rng: random.Random) -> None:
    """One epoch, as the loop would: every completion is trained on --epochs times or counted once, every evaluation row is seen once."""
    made = plan.Plan(args, "", ranks, n_rows, n_eval)
    stream = Stream([Row(i, "", [1] * rng.randint(1, args.max_prompt_tokens), None, {}, "") for i in range(n_rows)], args.seed)
    seen, engines = Counter(), ranks // args.tp
    while stream.position < n_rows:
        prompts = stream.take(args.batch)
        assert len(prompts) in made.batches
        seen.update(p.row.index for p in prompts)
        requests = [(p.position, g) for p in prompts for g in range(args.group)]
        assert [r for e in range(engines) for r in requests[share(len(requests), engines, e)]] == requests
        rows, counted = len(requests), Counter()
        if args.dynamic_sampling:                            # some groups are left out before the update
            kept = rng.randint(0, len(prompts))
            counted["equal"], prompts, rows = (len(prompts) - kept) * args.group, prompts[:kept], kept * args.group
        lengths = [rng.choice([1, args.max_tokens, rng.randint(1, args.max_tokens)]) for _ in range(rows)]
        batch = Batch([p.row.prompt_ids for p in prompts for _ in range(args.group)],
                      [Completion(np.ones(n, np.int32), np.zeros(n, np.float32), n == args.max_tokens) for n in lengths])
        trained, phases = Counter(), {p.rows: p for p in made.phases(len(prompts)) if p.name == "update"}
        minibatches = batch.minibatches(args.minibatches)
        assert rows < args.minibatches or all(minibatches), "an optimizer step without rows"
        for part in minibatches * args.epochs:
            if not part:                                     # fewer completions were kept than there are minibatches: skipped, and counted
                assert args.dynamic_sampling
                continue
            lanes = balance([batch.totals[r] for r in part], ranks, args.update_tokens)
            counts = {len(lane) for lane in lanes}
            assert len(counts) == 1 and max(counts) <= phases[len(part)].micros
            assert sum(not micro for lane in lanes for micro in lane) <= phases[len(part)].padding, "more padding than the plan says"
            assert not args.strict or all(micro for lane in lanes for micro in lane), "padding under --strict"
            trained.update(part[i] for lane in lanes for micro in lane for i in micro)
        assert trained == dict.fromkeys(range(rows), args.epochs)
        assert rows + sum(counted.values()) == len(requests)
        score = balance(batch.totals, ranks, args.score_tokens)
        assert sorted(i for lane in score for micro in lane for i in micro) == list(range(rows))
    assert seen == dict.fromkeys(range(n_rows), 1), "a row was dropped, or came twice in an epoch"
    evaluated = [r for e in range(engines) for r in list(range(n_eval))[share(n_eval, engines, e)]]
    assert evaluated == list(range(n_eval))


def every_setting_is_refused_or_runs(count: int, seed: int) -> Counter:
    rng, outcomes = random.Random(seed), Counter()
    for _ in range(count):
        args, ranks, n_rows, n_eval = draw(rng)
        try:
            found = plan.problems(args, ranks, n_rows, n_eval)
            if found:
                outcomes["refused"] += 1
                outcomes["suggestions"] += sum(len(p.fixes) for p in found)
                check_fixes(args, ranks, n_rows, found)
                assert all(p.fixes for p in found) or len(found) > 1 or found[0].kind in ("--strict", "ranks"), f"no way out: {found[0]}"
            else:
                outcomes["runs"] += 1
                plan.Plan(args, "", ranks, n_rows, n_eval).text()
                simulate(args, ranks, n_rows or 3 * args.batch, n_eval, rng)      # where the plan was made without the data: whole batches
        except Exception as error:
            raise AssertionError(f"{args} on {ranks} ranks, {n_rows} rows") from error
    return outcomes


def test_every_setting_is_refused_or_runs():
    outcomes = every_setting_is_refused_or_runs(2000, seed=0)
    assert outcomes["runs"] > 700 and outcomes["refused"] > 400 and outcomes["suggestions"] > 500, outcomes


@pytest.mark.slow
def test_every_setting_is_refused_or_runs_at_length():
    outcomes = every_setting_is_refused_or_runs(20_000, seed=1)
    print(dict(outcomes))
    assert outcomes["runs"] > 7000
