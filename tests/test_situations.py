"""Five situations in which popular frameworks crash, floor, drop or mis-scale. Here they all run.

Each test quotes what others do. test_engine.py has the engine's part of the same settings.
"""
import pytest

import learning
import plan
import ranks
from data import Row, Stream
from learning import Case, difference, learn_all, make_models, whole
from live import Live

TWO = Case(2, (("batch", 2), ("update_tokens", 77)))
EIGHT = [Case(1, (("batch", 1), ("group", 8), ("update_tokens", 77))),
         Case(1, (("batch", 1), ("group", 8), ("minibatches", 3)), samples="plain")]
BUDGETS = [(50, 170), (170, 50)]  # of the update, of the score passes
LEAK = [Case(8, (("update_tokens", update), ("score_tokens", score), ("minibatches", 2),
                 ("kl_loss_coef", 0.1))) for update, score in BUDGETS]
ODD = Case(7, (("batch", 7), ("minibatches", 2), ("epochs", 2), ("update_tokens", 77),
               ("score_tokens", 50)))


def everything(world, folder: str, cases: list[Case], groups: list[int]) -> tuple:
    """All of one number of ranks in one process group: to start it costs more than a case."""
    peaks = peak_of_live_tensors(world, folder, groups)
    return dict(zip(cases, learn_all(world, folder, cases), strict=True)), peaks


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> dict[int, list]:
    """{W: [what `everything` returned on each of W ranks]}"""
    folder = str(tmp_path_factory.mktemp("models"))
    make_models(None, folder)
    asked = {1: ([TWO, *EIGHT, *LEAK, ODD], [32, 64]), 3: (EIGHT, []), 4: ([TWO, *LEAK], []),
             6: ([ODD], [])}
    return {size: ranks.results(size, everything, folder, *ask, timeout=300)
            for size, ask in asked.items()}


def both(ran: dict, size: int, case: Case) -> tuple[list, list]:
    """A case's outcomes on one rank and on `size` ranks, with equal gradients and parameters."""
    one, many = ([cases[case] for cases, _ in ran[w]] for w in (1, size))

    def gap(part):
        return difference(whole([part(o) for o in many]), whole([part(o) for o in one]))

    assert len(one[0].gradients) == len(many[0].gradients) > 0
    for k in range(len(one[0].gradients)):
        assert gap(lambda o, k=k: o.gradients[k]) <= 1e-12
    assert gap(lambda o: o.after) <= 1e-12
    assert difference(whole([o.after for o in one]), whole([o.before for o in one])) > 1e-4
    return one, many


def trained_rows(outcomes) -> list[int]:
    return sorted(row for o in outcomes for name, _, micros in o.micros if name == "update"
                  for rows, _ in micros for row in rows)


def test_1_a_batch_of_2_on_4_ranks(ran):
    """Logic-RL: "only support equal chunk. Got size of DataProto 2 and chunk 4"."""
    assert not plan.problems(learning.arguments(batch=2), 4, 1000)
    _, outcomes = both(ran, 4, TWO)
    # Row 3 has no reward. Those of rows 4 to 7 are equal: no gradient, so they are in no pass.
    assert trained_rows(outcomes) == [0, 1, 2]
    assert outcomes[0].metrics[0]["batch/prompts"] == 2


def test_2_one_prompt_with_8_completions_on_3_ranks(ran):
    """Open-R1, 4 GPUs of which one generates: "(3 x 1) must be evenly divisible by the number of
    generations per prompt (8)"."""
    assert not plan.problems(learning.arguments(batch=1, group=8), 3, 1000)
    (_, outcomes), (_, three) = (both(ran, 3, case) for case in EIGHT)
    assert trained_rows(outcomes) == [0, 1, 2, 4, 5, 6, 7]  # row 3 has no reward
    assert trained_rows(three) == list(range(8))
    assert three[0].metrics[0]["update/steps"] == 3


def test_3_the_score_budget_does_not_leak_into_the_update(ran):
    """verl, Megatron backend: the update silently reused the micro-batch size of the log-prob pass
    (issues 1028, 1700, 4773). Two budgets, in both orders: each phase gets its own, and its
    micro-batches have that size."""
    pairs = [both(ran, 4, case) for case in LEAK]
    for (update, score), (one, four) in zip(BUDGETS, pairs, strict=True):
        for outcomes in (one, four):
            asked = {(phase, budget) for o in outcomes for phase, budget, _ in o.micros}
            assert asked == {("update", update), ("old logprobs", score), ("reference", score)}
        largest = {phase: max(tokens for name, _, micros in one[0].micros if name == phase
                              for _, tokens in micros) for phase, _ in asked}
        small, large = ("update", "reference")[::1 if update < score else -1]
        assert largest[small] <= 50 < largest[large] <= 170
    # The budgets do not change the result.
    assert difference(*(whole([o.after for o in one]) for one, _ in pairs)) <= 1e-12


def peak_of_live_tensors(world, folder: str, groups: list[int]) -> list[tuple[int, int]]:
    """For 4 prompts x each group: (peak of live bytes in `learn`, tokens of the largest
    micro-batch)."""
    found = []
    for group in groups[:1] + groups:  # the first time for what is allocated once and kept
        case = Case(4, (("group", group), ("update_tokens", 2048), ("score_tokens", 2048)),
                    samples="long", dtype="float32")
        with Live() as live:
            outcome, = learn_all(world, folder, [case])
        found.append((live.peak, max(
            tokens for _, _, micros in outcome.micros for _, tokens in micros)))
    return found[1:]


def test_4_memory_is_flat_from_32_to_64_completions_a_prompt(ran):
    """Logic-RL, 7B on 4 GPUs: fits at rollout.n 32, out of memory at 64: it counts prompts. The
    peak of live tensor bytes above the loaded model, per token of a micro-batch, must be the same
    within 5 %."""
    (at_32, tokens_32), (at_64, tokens_64) = ran[1][0][1]
    assert 1024 < tokens_32 <= 2048 and 1024 < tokens_64 <= 2048 and at_32 > 2**22
    assert abs((at_64 / tokens_64) / (at_32 / tokens_32) - 1) < 0.05


def test_5_six_ranks_with_a_batch_and_data_they_do_not_divide(ran):
    """EasyR1, 512 prompts on 6 GPUs: passes all checks of the start, then "Got size of DataProto
    512 and chunk 6" at the first rollout."""
    assert not plan.problems(learning.arguments(batch=7, minibatches=2, epochs=2), 6, 23, 7)
    stream = Stream([Row(i, "", [1], None, {}, "") for i in range(23)], seed=0)
    drawn = [[p.row.index for p in stream.next(7)] for _ in range(4)]
    assert [len(d) for d in drawn] == [7, 7, 7, 2] and sorted(sum(drawn, [])) == [*range(23)]
    _, six = both(ran, 6, ODD)
    assert six[0].metrics[0]["update/steps"] == 4
    assert 2 * len({*trained_rows(six)}) == len(trained_rows(six)) > 7
