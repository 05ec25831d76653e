"""results/ against its table, and the tools that read runs: the intervals of tools/compare.py hold
what they promise, tools/plot.py, tools/samples.py; the rewards of the controls."""
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from examples import instructions
from keeping import log
from results import make
from test_report import write_run
from tools import compare, plot, samples

ROOT = Path(__file__).parent.parent


# ---- examples/instructions.py

def test_rows_come_from_the_seed_and_no_held_out_prompt_is_trained_on():
    train, test = (instructions.rows(20, 0, split) for split in ("train", "test"))
    assert train == instructions.rows(20, 0, "train") != instructions.rows(20, 1, "train")
    everything = [instructions.rows(20, seed, "train") for seed in range(5)]
    assert not {r["prompt"] for r in test} & {r["prompt"] for rows in everything for r in rows}
    assert len({row["prompt"] for row in train}) == 140
    assert [row["data_source"] for row in train[:7]] == [*instructions.KINDS]


@pytest.mark.parametrize("rule, good, bad", [
    ({"sentences": 1, "need": ["cat", "moon"]}, "Moon: a Cat!!",
     ["The cats saw the moon.", "The cat. It saw the moon.", "The cat saw the moon"]),
    ({"sentences": 1, "need": ["cat"], "most": 6}, "The cat sat on the mat.",
     ["The cat sat on the big mat.", "A cat.", "The cat weighs 8.7 kilos"]),
    ({"lower": ["cat", "dog"]}, "The cat, the dog", ["CAT and DOG", "cat", "cat, dog, Cat"]),
    ({"sentences": 1, "letter": "T"}, " The cat saw it?",
     ["this is a cat.", "", "This is a cat", "T: A cat. It saw me."]),
    ({"json": {"name": "Tom", "age": 7}}, '```json\n{"age": 7, "name": "Tom"}\n```',
     ['{"name": "Tom", "age": "7"}', "{", '{"name": "Tom", "age": 7, "x": 1}',
      '{"a":' * 10**5 + "}", '{"name": "Tom", "age": %s}' % ("7" * 10**5)]),
    ({"last": 9}, "4 + 5 = 9.", ["9 = 4 + 5", "99", "٩", "9" * 10**5]),
    ({"first": 71}, "71 is larger than 34", ["34, not 71", "711", "7 1"])])
def test_the_reward_is_1_where_the_rule_is_followed_and_0_for_hostile_completions(rule, good, bad):
    assert instructions.follows(good, rule) == 1.0
    hostile = ["", "\ud83d", "a" * 10**5, "{" * 99 + "}" * 99, "null"]
    assert not [text for text in bad + hostile if instructions.follows(text, rule)]


# ---- intervals: 95 % of 95 % intervals hold the truth

def paired(rng):
    a = 0.5 + 0.1 * rng.normal(size=3)       # what a seed's prompts do to both
    b = a + 0.03 + 0.02 * rng.normal(size=3)
    return compare.paired_t(b - a)


def unpaired(rng):
    return compare.welch_t(0.5 + 0.02 * rng.normal(size=10), 0.53 + 0.06 * rng.normal(size=4))


def of_rows(rng):
    """100 rows are right or wrong, and a hard one is often hard for both."""
    hard = rng.uniform(size=100)
    other = np.where(rng.uniform(size=100) < 0.5, hard, rng.uniform(size=100))
    return compare.bootstrap((other < 0.53).astype(float) - (hard < 0.5), draws=200)


@pytest.mark.parametrize("interval, more", [
    (paired, 0.0), (unpaired, 0.0), (of_rows, 0.01)])  # more: a percentile of 200 draws
def test_an_interval_holds_the_truth_as_often_as_it_promises(interval, more):
    rng, repeats = np.random.default_rng(7), 400
    found = [interval(rng) for _ in range(repeats)]
    share = np.mean([low <= 0.03 <= high for low, high in found])
    error = 4 * np.sqrt(0.95 * 0.05 / repeats)   # four standard errors: 4.4 %
    assert abs(share - 0.95) < error + more


def test_t_is_the_published_table():
    """https://www.itl.nist.gov/div898/handbook/eda/section3/eda3672.htm"""
    assert [compare.t_quantile(n) for n in (1, 2, 4, 9)] == [12.706, 4.303, 2.776, 2.262]
    assert compare.t_quantile(2.9) == compare.t_quantile(2)
    assert compare.t_quantile(0.4) == 12.706 and compare.t_quantile(500) > 1.96


# ---- tools/compare.py

def made(folder: Path, seed: int, rewards: list[float], passes=None, **args) -> str:
    """A run. passes: the reward of each row in its last evaluation; the first one has 0.3."""
    metrics = [{"step": i, "reward/mean": r, "reward/exact": r / 2, "policy/entropy": None}
               for i, r in enumerate(rewards, 1)]
    kept = {}
    if passes:
        score = sum(p == 1 for p in passes) / len(passes)
        metrics = [{"step": 0, "eval/pass@1": 0.3}, *metrics,
                   {"step": len(rewards), "eval/pass@1": score}]
        kept["eval_00000"] = []
        kept[f"eval_{len(rewards):05d}"] = [
            {"prompt": f"p{i}", "rewards": {"exact": p, "coin": 1}} for i, p in enumerate(passes)]
    return str(write_run(folder, metrics, kept, seed=seed, eval_pass=1.0, **args))


def printed(capsys, *words: str) -> str:
    compare.main([str(word) for word in words])
    return capsys.readouterr().out


def test_equal_seeds_are_paired_and_the_last_common_steps_count(tmp_path, capsys):
    for seed in range(3):
        made(tmp_path / f"a/{seed}", seed, [0.0] * 10 + [0.5 + 0.1 * seed] * 10)
        made(tmp_path / f"b/{seed}", seed,
             [0.0] * 10 + [0.6 + 0.101 * seed] * 10 + [0.0] * 5)
    text = printed(capsys, tmp_path / "a", "--", tmp_path / "b")
    assert "reward/mean, steps 11 to 20\n  A 0.600   B 0.701   B - A +0.101" in text
    assert "paired t, 3 seeds" in text and "B is better by 0.099 to 0.103." in text
    # Seeds that differ are not paired, and hide so small a difference.
    text = printed(capsys, tmp_path / "a", "--", tmp_path / "b/0", tmp_path / "b/1")
    assert "Welch's t, 3 and 2 runs" in text and "These runs do not tell." in text
    text = printed(capsys, "--reward", "exact", tmp_path / "b", "--", tmp_path / "a")
    assert "reward/exact" in text and "A is better by 0.049 to 0.052." in text


def test_one_run_a_side_claims_nothing_about_seeds(tmp_path, capsys):
    a = made(tmp_path / "a", 0, [0.1] * 10, [0, None, 0, 1] * 25)
    b = made(tmp_path / "b", 1, [0.9] * 10, [1, 1, 0, 1] * 25)
    runs, scores, rows = re.split("^(?=pass)", printed(capsys, a, "--", b), flags=re.M)
    for part in (runs, scores):
        assert "needs two seeds" in part and part.endswith("These runs do not tell.\n")
    # But the models differ on rows. An unscored one has not passed.
    assert "the 100 rows that all have" in rows and "A 0.250   B 0.750   B - A +0.500" in rows
    assert re.search(r"B is better by 0\.4\d\d to 0\.[56]\d\d\.", rows)
    few = [made(tmp_path / f"few-{s}", s, [0.1], [s] * 5) for s in (0, 1)]
    assert "an interval needs 20 rows" in printed(capsys, few[0], "--", few[1])


def test_mistakes_are_one_sentence(tmp_path):
    a, b = (made(tmp_path / x, 0, [0.5] * 3) for x in "ab")
    for words, sentence in [
            ([a, "--"], "no set B"), ([a, "--", "x"], "x is not a run"),
            ([a, b, "--", b], r"A has a seed twice \(\[0, 0\]\)"),
            (["--reward", "none", a, "--", b], "share no step with reward/none")]:
        with pytest.raises(SystemExit, match=f"^error: .*{sentence}.*$") as error:
            compare.main(words)
        assert "\n" not in str(error.value)


# ---- tools/plot.py, tools/samples.py

def test_runs_that_differ_in_the_seed_only_are_one_curve(tmp_path, monkeypatch, capsys):
    for seed, low in ((0, 0.1), (1, 0.3)):
        made(tmp_path / f"a-{seed}", seed, [low] * 3 + [low + 0.5] * 10, [1, 1, 1, 0], lr=1e-5)
    made(tmp_path / "b", 0, [0.0] * 13, lr=1e-4)
    monkeypatch.setattr("sys.argv", ["plot.py", str(tmp_path), "--out", f"{tmp_path}/out.png"])
    plot.main()
    shown = re.sub(" +", " ", capsys.readouterr().out)
    assert "a, 2 seeds\n reward, first 3 steps 0.200 (0.100 to 0.300)\n" in shown
    assert " last 10 0.700 (0.600 to 0.800)\n pass@1 before 0.300\n after 0.750\n" in shown
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    made(tmp_path / "c", 0, [0.0] * 13, lr=1e-4, versions={"commit": "another"})
    assert [len(runs) for runs in plot.find([tmp_path])] == [2, 1, 1]


def test_a_legend_has_seeds_or_the_names_that_differ_and_no_paths(tmp_path, monkeypatch):
    for folder, lr in (("kk/seed_0", 1), ("kk/seed_1", 1), ("kk-coin/seed_0", 2)):
        made(tmp_path / "results" / folder, int(folder[-1]), [0.1, 0.5, 0.9], lr=lr)
    one = plot.find([tmp_path / "results/kk"])
    both = plot.find([tmp_path / "results/kk", tmp_path / "results/kk-coin"])
    assert plot.titles(one) == ["kk, 2 seeds"]
    assert plot.titles(both) == ["kk, 2 seeds", "kk-coin/seed_0"]
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, _: figures.append(self))
    for groups in one, both, both[1:]:
        plot.draw(groups, "x.png")
    legends = [[text.get_text() for text in legend.get_texts()]
               for figure in figures for legend in figure.legends]
    assert legends == [["seed 0", "seed 1"], plot.titles(both)]  # one run needs none


def test_completions_are_shown_in_order_or_the_worst_first(tmp_path, monkeypatch, capsys):
    write_run(tmp_path, [], {"step_00001": [
        {"reward": r, "prompt": "p", "turns": [{"role": "assistant", "content": f"c{r}"}]}
        for r in (0.5, None, 0.0)]})
    for sort, expected in (("step", ["0.5", "None", "0.0"]), ("reward", ["None", "0.0", "0.5"])):
        monkeypatch.setattr("sys.argv", ["samples.py", str(tmp_path), "--sort", sort])
        samples.main()
        shown = capsys.readouterr().out
        assert re.findall("^c(.*)", shown, re.M) == expected
        assert "--- prompt\np\n--- assistant\ncNone\n" in shown


# ---- results/

def test_the_table_is_what_the_files_say():
    page = (make.HERE / "README.md").read_text()
    assert page.partition(make.BEGIN)[2] == make.table() + make.by_kind()
    folders = {path.name for path in make.HERE.iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders <= make.COMMANDS.keys()
    for folder in folders:
        files = {path.name for path in (make.HERE / folder).iterdir()}
        assert {"result.json", "before.jsonl", "after.jsonl", "curve.png", "seed_0"} <= files
        result = json.loads((make.HERE / folder / "result.json").read_text())
        assert result["command"] == make.COMMANDS[folder]
        for seed in make.seeds(make.HERE / folder):
            args = json.loads((seed / "args.json").read_text())
            assert str(args["seed"]) in result["seeds"] and args["versions"]["torch"]
            assert seed.name == f"seed_{args['seed']}"
            lines = [json.loads(line) for line in (seed / "metrics.jsonl").open()]
            steps = [line["step"] for line in lines if "eval/rows" not in line]
            assert steps == list(range(1, args["steps"] + 1))


def test_the_readme_quotes_the_results_of_the_real_model():
    ends = [plot.ends(run) for run in make.seeds(make.HERE / "instructions")]
    low, high, before, after = (
        f"{sum(end[key] for end in ends) / len(ends):.2f}" for key in [*ends[0]][:4])
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"grows from {low} to {high}, and the accuracy on held-out rows from {before} to " \
           f"{after}" in readme


def test_the_readme_quotes_the_first_command():
    """By the functions that print these lines, from the published run."""
    rows = log.read_metrics(make.HERE / "sort-grpo/seed_0/metrics.jsonl")
    steps = [row for row in rows if not log.is_evaluation(row)]
    rewards = [row["reward/mean"] for row in steps]
    it = log.Log(ROOT, SimpleNamespace(rank=0), len(steps))
    printed = [log.evaluation_line(rows[0]), it.step_line(steps[0]), it.step_line(steps[-1]),
               f"reward, first 3 and last 10 of {len(steps)} steps: {sum(rewards[:3]) / 3:.3f} -> "
               f"{sum(rewards[-10:]) / 10:.3f}"]
    readme = (ROOT / "README.md").read_text()
    block = readme.partition("plan for grpo.py")[2].partition("```")[0].splitlines()[1:]
    for line, quoted in zip(printed, block, strict=True):
        assert line.startswith(quoted.removesuffix("...").rstrip()), (line, quoted)
    assert f"`step 1  reward {rewards[0]:.4f} ...`" in readme
