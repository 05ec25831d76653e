"""Which rows are drawn next: the function's results, what it is told, and exact resume."""
import json
import re

import numpy as np
import pytest
from hypothesis import settings

import data
import fakes
import faults
import plan
import test_life
from batch import Sample
from errors import SettingsError
from life import Life
from parts.order import order

ONES = "def own(rows, known, **others):\n    return [1] * len(rows)\n"
OWN = """def own(rows, known, *, seed, epoch):
    if epoch % 3 == 2:
        return sorted(rows, key=lambda row: row.prompt[::-1])[:5]
    return [(2 + one.scored) / (1 + one.drawn + (one.reward or 0)) for one in known]
"""


def stream(tmp_path, code: str, n: int = 6, **flags) -> order.Ordered:
    """The stream of a run of n rows with this file."""
    (tmp_path / "own.py").write_text(code)
    args = fakes.args(order=f"{tmp_path}/own.py:own", **flags)
    return order.Ordered(fakes.rows(n), args, fakes.World())


def drawn(it, n: int = 4, steps: int = 5) -> list[list[tuple[int, int]]]:
    return [[(p.position, p.row.index) for p in it.next(n)] for _ in range(steps)]


# ---- weights

@pytest.mark.parametrize("weight", [1, 0.1, 1e300, 5e-324])
@pytest.mark.parametrize("n, seed", [(1, 0), (7, 3), (200, -5)])
def test_equal_weights_are_the_order_of_a_run_without_it(tmp_path, n, seed, weight):
    own = f"def own(rows, known, **others):\n    return [{weight}] * len(rows)\n"
    it = stream(tmp_path, own, n, seed=seed)
    assert drawn(it, 3, 9) == drawn(data.Stream(fakes.rows(n), seed), 3, 9)


def test_a_row_is_drawn_by_its_weight_and_its_copies_are_spread():
    weights = np.array([0, 1, 2, 3, 4.5, 0.5])
    right, epochs = 6 * weights / weights.sum(), 3000
    found = [order.epoch_of(weights, 1, epoch) for epoch in range(epochs)]
    counts = np.array([np.bincount(one, minlength=6) for one in found])
    assert (np.abs(counts - right) < 1).all()  # rounded up or down
    assert np.abs(counts.mean(0) - right).max() < 4 * np.sqrt(0.25 / epochs)
    two = order.epoch_of(np.array([1e-9] * 20 + [1, 1]), 0, 0)
    assert two[::2] == [two[0]] * 11 and two[1::2] == [two[1]] * 11 and two[0] != two[1]


# ---- what the function returns

@pytest.mark.parametrize("returned, said", [
    ("None", "it returned a NoneType"), ("(row for row in rows)", "it returned a generator"),
    ("{row.index: 1 for row in rows}", "it returned a dict"), ("'abc'", "it returned a str"),
    ("[]", "no row"), ("[1.0]", "1 weights for 6 rows"), ("[1] * 7", "7 weights for 6 rows"),
    ("[float('nan')] * 6", "the weight nan"), ("[1, 1, 1, 1, 1, float('inf')]", "the weight inf"),
    ("[1, 1, -2, 1, 1, 1]", "the weight -2"), ("[0] * 6", "weights that are all 0"),
    ("[10 ** 400] * 6", "too large"), ("[1, 1, 1, 1, 1, None]", "a NoneType among 6 values"),
    ("[5, 3, 1, 0, 2, 4]", "the places of rows"), ("numpy.arange(6)[::-1]", "the places of rows"),
    ("[*rows, 1]", "a Row among 7 values"), ("['a'] * 6", "a str among"),
    ("[__import__('copy').copy(rows[0])]", "none of those that it got"),
    ("1 / 0", "ZeroDivisionError: division by zero"), ("rows[99]", "IndexError"),
    ("exit(3)", "SystemExit: 3"), ("__import__('random').sample(rows, 6)", "two calls")])
def test_another_result_is_one_sentence(tmp_path, returned, said):
    own = f"import numpy\ndef own(rows, known, **others):\n    return {returned}\n"
    it = stream(tmp_path, own)
    with pytest.raises(SettingsError) as error:
        it.next(2)
    text = str(error.value)
    assert said in text and "epoch 0: " in text and "Would work: " in text, text
    assert "\n" not in text and it.position == 0


@pytest.mark.parametrize("returned, right", [
    ("rows[2:4]", [2, 3]), ("(rows[5], rows[0], rows[5])", [5, 0, 5]), ("rows[::-1]", [5, 4, 3])])
def test_rows_are_drawn_in_their_order_and_a_batch_ends_with_them(tmp_path, returned, right):
    it = stream(tmp_path, f"def own(rows, known, **others):\n    return {returned}\n")
    assert [index for _, index in drawn(it, 3, 1)[0]] == right


@pytest.mark.parametrize("returned", [
    "numpy.ones(6)", "torch.ones(6)", "[True] * 6", "(numpy.float32(2),) * 6"])
def test_weights_of_any_kind(tmp_path, returned):
    own = f"import numpy, torch\ndef own(rows, known, **others):\n    return {returned}\n"
    it = stream(tmp_path, own)
    assert drawn(it) == drawn(data.Stream(fakes.rows(6), 0))


def test_what_the_function_writes_reaches_no_prompt(tmp_path):
    it = stream(tmp_path, "def own(rows, known, **others):\n    rows[0].columns['x'] = 1\n"
                "    rows[1].prompt_ids.append(7)\n    known.clear()\n    rows.pop()\n"
                "    return rows[:2]\n")
    found = it.next(2)
    assert [p.row.columns for p in found] == [{}, {}] and found[1].row.prompt_ids == [1]


@pytest.mark.parametrize("words, sentences", [
    ("order='parts/order/unsolved.py:unsolved'", "fine"),
    ("order='nowhere.py:x'", "no such file here"),
    ("order='sapo'", "Would work: a function of a file: --order FILE.py:NAME"),
    ("order='parts/order/unsolved.py:nothing'", "needs a function nothing(rows, known, *, seed"),
    ("order='parts/order/order.py:epoch_of'", "needs a function epoch_of(rows, known"),
    ("order_every=3", "--order_every needs --order"),
    ("order='parts/order/unsolved.py:unsolved' minibatches=9", "--minibatches must be at most 8"),
    ("order='parts/order/unsolved.py:unsolved' reward=()", "--order needs completions")])
def test_the_flags(refused, words, sentences):
    assert refused("grpo", words, sentences)


# ---- what it is told

def test_the_plan_says_what_is_left_for_the_last_batch():
    """A batch of one prompt may come, and is planned; it is not said to be the last."""
    for rows, batch, last in (20, 6, "2 prompts"), (16, 8, "8 prompts"), (3, 8, "3 prompts"):
        args = fakes.args(order="parts/order/unsolved.py:unsolved", batch=batch)
        text = plan.Plan(args, 1, rows, 0).text()
        assert f"{last} in the last" in text and f"{rows} prompts" in text, text


def test_it_is_told_what_was_drawn_and_what_passed(tmp_path):
    it = stream(tmp_path, "def own(rows, known, **others):\n    own.known = known\n"
                "    return rows[:2]\n", eval_pass=0.5)
    for rewards in [(1, 0, 0, None), (None, None, 1, 0.5)]:
        prompts = it.next(2)
        samples = [Sample(prompts[i // 2], reward=reward, rewards={"exact": reward})
                   for i, reward in enumerate(rewards)]
        it.unread.append(samples)
    it.next(1)
    none = order.Known()
    assert it.function.known == [
        order.Known(2, 2, 0.5, 0.5, 0.5), order.Known(2, 3, 2 / 3, 1.0, 0.5)] + [none] * 4


# ---- the life of a run

class OrderedLife(Life):
    """A run whose rows are drawn by what is known of them."""
    files = Life.files | {"own.py": OWN}
    more = ["--order", "own.py:own", "--order_every", "5"]


class AnyOrderedLife(test_life.AnyLife):
    kind = OrderedLife


AnyOrderedLife.TestCase.settings = settings(max_examples=2, derandomize=True, **test_life.SIZE)
TestAnyOrderedLife = AnyOrderedLife.TestCase


def prompts(life) -> list[str]:
    """The prompts of each step."""
    return [json.loads(line)["prompt"] for path in sorted(life.run.glob("samples/step_*"))
            for line in path.read_text().splitlines()]


def test_weights_of_1_are_todays_run_digit_for_digit(tmp_path):
    life = Life(tmp_path)
    (tmp_path / "own.py").write_text(ONES)
    assert life.go("--order", "own.py:own", steps=8) == 0, life.text
    life.same_as(life.alone(8))


@pytest.mark.parametrize("faulty, ranks", [
    (["rollout:0:1:SIGKILL", "saved:0:3:SIGKILL"], [1, 1]), (["backward:0:2:SIGTERM"], [2, 2]),
    (["reward:*:4:JOB"], [1, 1])])
def test_a_killed_run_draws_the_same(tmp_path, faulty, ranks):
    life = OrderedLife(tmp_path)
    for fault, n in zip([*faulty, ""], [ranks[0]] * len(faulty) + [ranks[1]], strict=True):
        life.go(steps=8, ranks=n, FAULTS=fault)
    life.same_as(life.alone(8, ranks[1]))
    assert len({*prompts(life)[:4]}) > 1
    assert prompts(life) != prompts(plain := begun(tmp_path / "plain", 8)), plain.text


def begun(place, steps: int) -> Life:
    place.mkdir()
    life = Life(place)
    life.begin(steps)
    return life


def test_the_counts_of_a_checkpoint_are_those_of_the_samples(tmp_path):
    life = OrderedLife(tmp_path)
    life.begin(4)
    state = json.loads((life.run / "checkpoints/step_4/state.json").read_text())["stream"]
    samples = [json.loads(line) for path in life.run.glob("samples/step_*")
               for line in path.read_text().splitlines()]
    times = {}
    for one in samples:
        row = int(re.search(r"\d+", one["prompt"])[0]) - 500100
        times.setdefault(row, []).append(one)
    assert {int(i): (drawn, scored, total) for i, (drawn, scored, _, _, total) in
            state["counts"].items()} == {
        i: (len({s["position"] for s in some}), len(some), sum(s["reward"] for s in some))
        for i, some in times.items()}


def test_another_file_is_said_and_another_flag_refused(tmp_path):
    life = OrderedLife(tmp_path)
    life.begin(2)
    life.edit("own.py", lambda text: text.replace(b"2 +", b"3 +"), True, "another own.py")
    assert life.go(steps=3) == 0, life.text
    assert life.go("--order_every", "6", steps=4) == 2 and "order_every was 5" in life.text
    (tmp_path / "other.py").write_text(OWN)
    assert life.go("--order", "other.py:own", steps=4) == 2 and "order was own.py" in life.text


def test_ranks_that_draw_other_rows_are_refused(tmp_path):
    life = OrderedLife(tmp_path)
    (tmp_path / "own.py").write_text(
        "import os\ndef own(rows, known, **others):\n    return rows[int(os.environ['RANK']):]\n")
    assert life.command(*life.flags(), "--name", "x", "--steps", "2", ranks=2) == 2, life.text
    assert "the order of --order is " in life.text and "on rank 1" in life.text
    (tmp_path / "own.py").write_text(
        "import os\ndef own(rows, known, **others):\n    return 1 // int(os.environ['RANK'])\n")
    assert life.command(*life.flags(), "--name", "z", "--steps", "2", ranks=2) == 2, life.text
    assert life.text.count("ZeroDivisionError") == 1 and faults.last(life.run) == 0


@pytest.mark.parametrize("spec", ["unsolved.py:unsolved", "learnability.py:learnability",
                                  "easy_first.py:easy_first"])
def test_the_examples_of_the_page_run(tmp_path, spec):
    life = Life(tmp_path)
    assert life.go("--order", f"parts/order/{spec}", "--eval_pass", "2", steps=8) == 0, life.text
    assert life.go("--order", f"parts/order/{spec}", "--eval_pass", "2", steps=9) == 0, life.text
