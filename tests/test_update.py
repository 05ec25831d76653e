"""The shipped `learn` of each script is the papers' update, on any ranks, with any budgets.

Each setting learns for a few steps from made-up completions, on its number of real ranks, in
float64. Gradients, weights and metrics of each rank must be those of reference.py, which has no
ranks, no batch and no padding: not those of another layout, which may have the same mistake.
"""
from collections import defaultdict
from functools import cache

import pytest

import grpo
import learning
import losses
import model
import plan
import ranks
import updates
from batch import Batch
from fakes import SCRIPTS
from families import ROUNDINGS
from live import Live
from reference_settings import CHOICES, LONGEST, NAMED, REPORTED, Setting, arguments, drawn
from updates import check, every_pair, gaps, on_ranks

folder, right = updates.folder, updates.right
SAME = 1e-12  # the limit of relative differences between numbers of ranks
RANKS = 1, 2, 3, 5
SETTINGS = [*map(Setting, [*REPORTED, *NAMED]), *(
    setting for script, count in (("grpo", 22), ("ppo", 8))
    for setting in drawn(script, CHOICES[script] | {"ranks": RANKS}, count=count))]


@pytest.fixture(scope="module")
def shipped(folder):
    """The number of a setting → what each rank makes of it. All settings on one number of ranks
    share their process group, so they run when the first of them is asked for."""
    @cache
    def run(size: int):
        settings = {number: one for number, one in enumerate(SETTINGS) if one.ranks == size}
        return on_ranks(folder, settings, size)

    return lambda number: run(SETTINGS[number].ranks)[number]


@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=[one.words for one in SETTINGS])
def test_learn_is_the_papers_update(number, shipped, right):
    """Every rank has the reference's gradients, weights and metrics."""
    one = SETTINGS[number]
    check(one, shipped(number), right(one, number))


def test_ranks_and_budgets_make_one_update_to_the_last_digits(folder, shipped):
    """The settings by hand on one rank, with other knobs of memory, are the same within 1e-12."""
    by_hand = SETTINGS[:len(REPORTED) + len(NAMED)]
    many = {number: one for number, one in enumerate(by_hand) if one.ranks > 1}
    alone = on_ranks(folder, {1000 + number: Setting(one.words.replace("shard_size=2", ""))
                              for number, one in many.items()}, 1)
    for number, one in many.items():
        check(one, shipped(number), alone[1000 + number][0], SAME, of_metrics=100)


@pytest.mark.parametrize("count", [2, pytest.param(10**6, marks=pytest.mark.slow)])
def test_in_float32_ranks_differ_by_rounding(count, folder, right):
    """Three ranks differ from one by at most so many times what float32 rounds on one rank."""
    choices = {"aggregation": ("token", "sequence", "constant"), "minibatches": (1, 3),
               "prompts": (7, 8, 1), "dtype": ("float32",)}
    settings = dict(enumerate(drawn("grpo", choices, group=4, count=count)))
    alone, many = (on_ranks(folder, settings, size) for size in (1, 3))
    for number, one in settings.items():
        narrow, = alone[number]
        rounding = max(size for what, size in gaps(narrow, right(one, number)).items()
                       if not what.startswith("metric"))
        assert 1e-9 < rounding < 1e-4
        check(one, many[number], narrow, ROUNDINGS * rounding, of_metrics=100)


@pytest.mark.slow
@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_pair_of_flags_on_any_ranks(script, size, folder, right):
    """Draws go on until they hold each pair of values of two flags."""
    every_pair(drawn(script, CHOICES[script]), size, folder, right)


def test_the_settings_reach_what_they_are_for(shipped):
    """Bounds act on a part of the tokens, ratios leave 1, rows are dropped for each reason; some
    ranks have nothing to compute, and one longest row fills the smallest budget."""
    seen, cut = defaultdict(list), {*losses.LOSSES}  # the losses without a bound that acts
    for number in range(len(SETTINGS)):
        for metrics in shipped(number)[0]["metrics"]:
            for name, value in metrics.items():
                seen[name].append(value)
            if 0 < metrics.get("policy/clip_frac", 0) < 1:
                cut.discard(SETTINGS[number].flags.get("loss", "clip"))
    for name in "policy/clip_frac policy/engine_cut critic/clip_frac policy/opsm_cut".split():
        assert any(0.05 < value < 0.95 for value in seen[name]), name
    for name in "batch/dropped_unscored batch/dropped_no_baseline batch/dropped_overlong " \
                "update/skipped policy/cov_cut".split():
        assert max(seen[name]) > 0, name
    assert cut == {"reinforce"} and sum(x > 0.01 for x in seen["policy/approx_kl"]) > 10
    calls = [call for number in range(len(SETTINGS)) for one in shipped(number)
             for call in one["micros"]]
    assert any(micros == [((), 1)] for _, _, micros in calls)
    assert any(tokens == LONGEST - 1 == budget - 1 for _, budget, micros in calls
               for _, tokens in micros)


# ---- five settings in which popular frameworks crash, floor, drop or mis-scale ----


def trained_rows(outcomes: list[dict]) -> list[int]:
    """The rows of all update passes of all ranks."""
    return sorted(row for one in outcomes for phase, _, micros in one["micros"]
                  if phase == "update" for rows, _ in micros for row in rows)


def test_the_plan_refuses_no_setting():
    for number, setting in enumerate(SETTINGS):
        assert not plan.problems(arguments(setting, number), setting.ranks, 1000), setting.words


def test_report_1_a_batch_of_2_on_4_ranks(shipped):
    """Logic-RL: "only support equal chunk. Got size of DataProto 2 and chunk 4". The rewards of the
    second prompt are equal: no gradient, so its rows are in no pass."""
    assert trained_rows(shipped(0)) == [0, 1, 2, 3]
    assert shipped(0)[0]["metrics"][0]["batch/prompts"] == 2


def test_report_2_one_prompt_with_8_completions_on_3_ranks(shipped):
    """Open-R1, 4 GPUs of which one generates: "(3 x 1) must be evenly divisible by the number of
    generations per prompt (8)"."""
    for number, steps in (1, 1), (2, 3):
        assert trained_rows(shipped(number)) == [*range(8)]
        assert shipped(number)[0]["metrics"][0]["update/steps"] == steps


def test_report_3_the_score_budget_does_not_leak_into_the_update(shipped):
    """verl, Megatron backend: the update silently reused the micro-batch size of the log-prob pass
    (issues 1028, 1700, 4773). Two budgets, in both orders: each phase gets its own, and its
    micro-batches have that size."""
    for number, update, score in (3, 50, 170), (4, 170, 50):
        largest = defaultdict(int)
        for phase, budget, micros in [call for one in shipped(number) for call in one["micros"]]:
            assert budget == (update if phase == "update" else score)
            largest[phase] = max(largest[phase], *(tokens for _, tokens in micros))
        assert (largest["update"] > 50) == (update > 50)
        assert (largest["reference"] > 50) == (largest["old logprobs"] > 50) == (score > 50)


def test_report_4_memory_is_flat_from_32_to_64_completions_a_prompt(tmp_path):
    """Logic-RL, 7B on 4 GPUs: fits at rollout.n 32, out of memory at 64: it counts prompts. The
    peak of live tensor bytes above the loaded model, per token of a micro-batch, must be the same
    within 5 %."""
    learning.make_models(None, str(tmp_path))
    _, at_32, at_64 = ranks.results(1, peaks_of_live_bytes, f"{tmp_path}/tied")[0]
    assert at_32 > 2**11 and abs(at_64 / at_32 - 1) < 0.05


def peaks_of_live_bytes(world, folder: str) -> list[float]:
    """Per token of the largest micro-batch. The first time is for what is made once and kept."""
    found = []
    for group in 32, 32, 64:
        args = learning.arguments(group=group, update_tokens=2048, dtype="float32")
        module = model.build(model.LogprobModel, folder, world, args)
        policy, samples = model.Policy(module, world, args), learning.fabricate("long", 4, group)
        with Live() as live:
            grpo.learn(args, world, policy, samples, lr=args.lr)
        rows, batch = [*range(len(samples))], Batch(samples)
        found.append(live.peak / max(m.size for m in batch.micro_batches(
            world, rows, 2048, "update")))
    return found


def test_report_5_six_ranks_with_a_batch_and_data_they_do_not_divide(shipped):
    """EasyR1, 512 prompts on 6 GPUs: passes all checks of the start, then "Got size of DataProto
    512 and chunk 6" at the first rollout."""
    assert not plan.problems(arguments(SETTINGS[5], 5), 6, 23, 7)
    rows = trained_rows(shipped(5))
    assert shipped(5)[0]["metrics"][0]["update/steps"] == 4
    assert 2 * len({*rows}) == len(rows) > 7
