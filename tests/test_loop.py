"""The loop around `learn` in each script: which part is called when, and with what."""
import itertools
import math
from unittest.mock import MagicMock, call

import numpy as np
import pytest

import grpo
import learning
import model
import plan
import ppo
import probes
import reference_losses
from fakes import SCRIPTS
from reference_settings import hostile
from settings import changed


def around(script, monkeypatch, args, steps: int, start: int = 0, stop: int = -1):
    """What the shipped `train` gives to `learn` in each step, the run, and the status. There is no
    engine. stop: the step of a SIGTERM."""
    run, given = MagicMock(start=start, end=steps, evaluations=(1, 2), saves={2}, carry=None), []
    run.engine.metrics = {}
    run.log.times, run.kl_coef = {"time/rollout": 1.0}, getattr(args, "kl_reward_coef", 0.0)
    run.engine.sample.side_effect = [hostile(args.group, seed) for seed in range(20)]
    run.stop.agreed.side_effect = lambda: run.world.step == stop

    def learn(args, world, models, samples, **options):
        given.append(options | {"models": models, "samples": samples})
        return {"policy/kl": 0.01 * len(given), "batch/dropped": 1}

    for name, fake in dict(set_up=lambda *given: run, learn=learn, score_samples=run.score).items():
        monkeypatch.setattr(script, name, fake, raising=False)  # not every script has all
    status = script.train(args)
    return given, run, status


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_loop_gives_each_part_what_it_needs(script, monkeypatch):
    rate = {"critic_lr": 0.5} if script == "ppo" else {}
    given, run = four_steps(SCRIPTS[script], monkeypatch, group=3, **rate)
    sampled(given, run)


def four_steps(script, monkeypatch, **flags):
    """What its loop gives to `learn` from step 2 on, and the run: what each loop does with them."""
    args = changed(script.Args(), batch=5, steps=4, lr=0.8, temperature=0.9, samples_every=2,
                   lr_schedule="linear", **flags)
    given, run, status = around(script, monkeypatch, args, 4, start=1)
    assert [options["lr"] for options in given] == pytest.approx([0.6, 0.4, 0.2])
    assert all(options["phase"] is run.log.time for options in given)
    assert run.stream.next.call_args_list == [call(5)] * 3
    # What `learn` returned goes to metrics.jsonl, and to the watch that ends a broken run.
    logged = [one.args for one in run.log.step.call_args_list]
    assert [step for step, _ in logged] == [2, 3, 4]
    assert [m["policy/kl"] for _, m in logged] == [0.01, 0.02, 0.03]
    assert all(m["data/position"] is run.stream.position for _, m in logged)
    assert run.log.watch.call_args_list == [call(m) for _, m in logged]
    assert run.evaluate.call_args_list == [call(1), call(2)]
    assert run.save.call_args_list == [call(2)] and status is run.finish.return_value
    return given, run


def sampled(given, run):
    """A loop with an engine: what it samples is scored, recorded and learned."""
    assert all(options["reference"] is run.reference for options in given)
    assert run.engine.generating.call_args_list == [call(run.policy)] * 3
    assert run.engine.sample.call_args_list == [call(run.stream.next(), 3, 0.9)] * 3
    rollouts = [options["samples"] for options in given]
    assert run.score.call_args_list == [call(run, samples, 3) for samples in rollouts]
    assert run.record.call_args_list == [
        call(step, samples) for step, samples in enumerate(rollouts, 1)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_sigterm_saves_and_ends_after_the_step(script, monkeypatch):
    stopped(SCRIPTS[script], monkeypatch, **{"critic_lr": 0.5} if script == "ppo" else {})


def stopped(script, monkeypatch, **flags):
    args = changed(script.Args(), group=1, lr=0.8, **flags)
    given, run, status = around(script, monkeypatch, args, 4, stop=2)
    assert len(given) == 3 and run.save.call_args_list == [call(2), call(3)]
    assert status is run.stopped.return_value and run.stopped.call_args_list == [call(3)]
    assert not run.finish.called


@pytest.mark.parametrize("schedule, warmup, rates", [
    ("constant", 2, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ("linear", 2, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
    ("cosine", 2, [0.5, 1.0, 1.0, 0.85355339, 0.5, 0.14644661]),
    ("linear", 0, [1.0, 0.8, 0.6, 0.4, 0.2])])
def test_the_rates_of_a_schedule(schedule, warmup, rates):
    args = model.OptimizerArgs(warmup_steps=warmup, lr_schedule=schedule)
    found = [model.learning_rate(step, len(rates), 2.0, args) for step in range(len(rates))]
    assert found == pytest.approx([2.0 * rate for rate in rates], abs=1e-8)


def test_ppo_passes_rates_and_the_adapted_coefficient(monkeypatch):
    args = changed(
        ppo.Args(), lr=0.5, critic_lr=2.0, steps=6, warmup_steps=2, critic_warmup_steps=3,
        lr_schedule="linear", kl_reward_coef=0.3, kl_target=0.02, kl_horizon=100)
    given, run, _ = around(ppo, monkeypatch, args, 6)
    schedule = [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert [step["critic_lr"] for step in given] == [2.0 * x for x in schedule]
    assert [step["lr"] for step in given] == [0.0] * 3 + [0.5 * x for x in schedule[3:]]
    coefficients = [0.3]
    for step in range(5):
        coefficients.append(reference_losses.adaptive_kl(
            args, coefficients[-1], 0.01 * (step + 1), len(given[step]["samples"])))
    assert [step["kl_coef"] for step in given] == pytest.approx(coefficients, rel=1e-12)
    assert given[0]["models"] == (run.policy, run.critic)


def test_dynamic_sampling_trains_on_groups_whose_rewards_differ(monkeypatch):
    batch, group = 7, 3
    args = changed(grpo.Args(), batch=batch, group=group, dynamic_sampling=True, lr=0.5)
    given, run, _ = around(grpo, monkeypatch, args, 1)
    kept, samples_of_all, refills = [], [], 0
    while len(kept) < batch:
        samples, refills = hostile(group, refills), refills + 1
        samples_of_all += samples
        for start in range(0, len(samples), group):
            members = samples[start:start + group]
            if len({s.score.total for s in members} - {None}) > 1:
                kept.append(members)
    assert run.engine.sample.call_count == refills == 2 and len(kept) > batch
    theirs = [s.completion.ids.tolist() for s in given[0]["samples"]]
    assert theirs == [s.completion.ids.tolist() for members in kept[:batch] for s in members]
    (_, metrics), _ = run.log.step.call_args
    scores = [s.score.total for s in samples_of_all if s.score.total is not None]
    assert metrics["reward/mean"] == pytest.approx(np.mean(scores))  # not of the kept ones
    assert metrics["batch/dropped_surplus"] == (len(kept) - batch) * group
    assert metrics["batch/dropped_equal"] == 12 * group - len(kept) * group
    assert metrics["batch/dropped"] == 1 + 12 * group - batch * group
    assert given[0]["lr"] == 0.5


# Every flag that `learn` of grpo.py reads, and of those with names each name.
FLAGS = [
    *(("advantage", name) for name in (
        "dr_grpo", "grpo", "rloo", "reinforce++", "reinforce++-baseline",
        *(f"variants/{name}.py:{name}" for name in ("gdpo", "lite_ppo", "maxrl")))),
    *(("loss", name) for name in ("clip", "gspo", "cispo", "reinforce", *(
        f"variants/{name}.py:{name}" for name in (
            "clip_cov", "dppo", "geometric", "gmpo", "ipo", "opsm", "sapo")))),
    *(("aggregation", name) for name in ("token", "sequence", "constant", "prompt")),
    *(("engine_correction", name) for name in (
        "truncate", "mask", "sequence_truncate", "sequence_mask", "sequence_mean")),
    *(("kl_estimator", name) for name in ("k1", "k2", "k3", "k3_ratio")),
    ("kl_loss_coef", 0.1), ("kl_reward_coef", 0.1), ("entropy_coef", 0.1), ("dual_clip", 2.0),
    ("overlong_filter", True), ("overlong_buffer", 8), ("minibatches", 2), ("epochs", 2),
    ("group", 1), ("temperature", 0.7)]


LARGE = "advantage", "loss", "aggregation", "engine_correction"


@pytest.mark.parametrize("flag", [*LARGE, "others"])
def test_any_two_flags_of_an_update_work_or_are_refused(flag):
    """--advantage reinforce++ with --kl_loss_coef ended in an AttributeError."""
    assert worked([dict([first, second]) for first, second in itertools.combinations(FLAGS, 2)
                   if first[0] != second[0] and flag == (
                       first[0] if first[0] in LARGE else "others")]) > 20


def worked(settings: list[dict], completion=lambda done: done) -> int:
    """How many of them are not refused: each of these learns. completion: what it makes of each."""
    policy, reference, tried = probes.Spy(layers=1), probes.Spy(0.05, layers=1), 0
    for flags in settings:
        if "kl_estimator" in flags:
            flags.setdefault("kl_loss_coef", 0.1)
        args = learning.arguments(**flags)
        if plan.problems(args, 1):
            continue
        samples = learning.fabricate("mixed", 3, args.group)
        for sample in samples:
            sample.score.parts = dict.fromkeys(
                [reward.partition(":")[0] for reward in args.reward], sample.score.total)
            sample.completion = completion(sample.completion)
        metrics = grpo.learn(args, probes.World(), policy, samples, lr=0.0, reference=reference)
        tried += 1
        assert all(math.isfinite(value) for value in metrics.values()), flags
    return tried
