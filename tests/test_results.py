"""results/ against its table, and the tools that read runs: the intervals of tools/compare.py hold
what they promise, tools/plot.py, tools/samples.py; the rewards of the controls."""
import json
import re
from pathlib import Path

import numpy as np
import pytest

from examples import instructions
from results import make
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


@pytest.mark.parametrize("kind, rule, good, bad", [
    ("words", {"sentences": 1, "need": ["cat", "moon"]}, ["The cat saw the moon.", "Moon: a Cat!!"],
     ["The cats saw the moon.", "The cat. It saw the moon.", "The cat saw the moon"]),
    ("short", {"sentences": 1, "need": ["cat"], "most": 6},
     ["The cat sat on the mat.", "A cat sleeps!"],
     ["The cat sat on the big mat.", "A cat.", "The cat weighs 8.7 kilos"]),
    ("lowercase", {"lower": ["cat", "dog"]}, ["cat and dog", "The cat, the dog"],
     ["CAT and DOG", "cat", "", "cat, dog, Cat", "cats dogs"]),
    ("letter", {"sentences": 1, "letter": "T"}, ["This is a cat.", " The cat saw it?"],
     ["this is a cat.", "", "This is a cat", "T: A cat. It saw me."]),
    ("json", {"json": {"name": "Tom", "age": 7}},
     ['{"name": "Tom", "age": 7}', '```json\n{"age": 7, "name": "Tom"}\n```'],
     ['{"name": "Tom", "age": "7"}', "{}", "{", '{"name": "Tom", "age": 7, "x": 1}',
      '{"a":' * 10**5 + "}", '{"name": "Tom", "age": %s}' % ("7" * 10**5)]),
    ("last", {"last": 9}, ["9", "4 + 5 = 9."],
     ["9 = 4 + 5", "", "99", "٩", "9" * 10**5]),
    ("first", {"first": 71}, ["71", "71 is larger than 34"], ["34, not 71", "", "711", "7 1"])])
def test_the_reward_is_1_where_the_rule_is_followed_and_0_for_hostile_completions(
        kind, rule, good, bad):
    assert [instructions.follows(text, rule) for text in good] == [1.0] * len(good)
    hostile = ["\ud83d", "\x00", "a" * 10**5, "{" * 99 + "}" * 99, "null"]
    assert not [text for text in bad + hostile if instructions.follows(text, rule)]


# ---- intervals: 95 % of 95 % intervals hold the truth

REPEATS = 400
ERROR = 4 * np.sqrt(0.95 * 0.05 / REPEATS)   # four standard errors: 4.4 %


def coverage(interval, truth: float) -> float:
    """How often an interval of new data holds the truth."""
    rng = np.random.default_rng(7)
    found = [interval(rng) for _ in range(REPEATS)]
    return float(np.mean([low <= truth <= high for low, high in found]))


@pytest.mark.parametrize("seeds", [2, 5])
def test_an_interval_of_seeds_that_are_paired(seeds):
    def interval(rng):
        a = 0.5 + 0.1 * rng.normal(size=seeds)   # what a seed's prompts do to both
        b = a + 0.03 + 0.02 * rng.normal(size=seeds)
        return compare.paired_t(b - a)
    assert abs(coverage(interval, 0.03) - 0.95) < ERROR


@pytest.mark.parametrize("n, m, wider", [(2, 2, 1), (10, 4, 3)])
def test_an_interval_of_runs_that_are_not_paired(n, m, wider):
    """Few runs make the interval too wide, and never too narrow."""
    def interval(rng):
        return compare.welch_t(0.5 + 0.02 * rng.normal(size=n),
                               0.53 + wider * 0.02 * rng.normal(size=m))
    assert 0.95 - ERROR < coverage(interval, 0.03) < 0.999


def test_an_interval_over_rows_of_one_evaluation():
    """Rows are right or wrong, and a hard one is hard for both."""
    rows, a, b = 100, 0.5, 0.6

    def interval(rng):
        hard = rng.uniform(size=rows)
        shared = rng.uniform(size=rows) < 0.5
        other = np.where(shared, hard, rng.uniform(size=rows))
        return compare.bootstrap((other < b).astype(float) - (hard < a), draws=200)
    assert abs(coverage(interval, b - a) - 0.95) < ERROR + 0.01   # a percentile of 200 draws


def test_t_is_the_published_table():
    """https://www.itl.nist.gov/div898/handbook/eda/section3/eda3672.htm"""
    assert [compare.t_quantile(n) for n in (1, 2, 4, 9)] == [12.706, 4.303, 2.776, 2.262]
    assert compare.t_quantile(2.9) == compare.t_quantile(2) > 2
    assert compare.t_quantile(0.4) == 12.706 and compare.t_quantile(500) > 1.96


# ---- tools/compare.py, of runs

def write_compared(folder: Path, seed: int, rewards: list[float], passes=None) -> str:
    (folder / "samples").mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps({"seed": seed, "eval_pass": 1.0}))
    rows = [{"step": i, "reward/mean": r, "reward/exact": r / 2}
            for i, r in enumerate(rewards, 1)]
    if passes:
        rows.insert(0, {"step": 0, "eval/pass@1": 0.0})   # before
        score = sum(p == 1 for p in passes) / len(passes)
        rows.append({"step": len(rewards), "eval/pass@1": score})
        lines = [{"prompt": f"p{i}", "rewards": {"exact": p, "coin": 1}}
                 for i, p in enumerate(passes)]
        (folder / "samples/eval_00000.jsonl").write_text("")
        (folder / f"samples/eval_{len(rewards):05d}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def printed(capsys, *words: str) -> str:
    compare.main([str(word) for word in words])
    return capsys.readouterr().out


def test_equal_seeds_are_paired_and_the_last_common_steps_count(tmp_path, capsys):
    for seed in range(3):
        write_compared(tmp_path / f"a/{seed}", seed, [0.0] * 10 + [0.5 + 0.1 * seed] * 10)
        write_compared(tmp_path / f"b/{seed}", seed,
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
    a = write_compared(tmp_path / "a", 0, [0.1] * 10, [0, None, 0, 1] * 25)
    b = write_compared(tmp_path / "b", 1, [0.9] * 10, [1, 1, 0, 1] * 25)
    runs, scores, rows = re.split("^(?=pass)", printed(capsys, a, "--", b), flags=re.M)
    for part in (runs, scores):
        assert "needs two seeds" in part and part.endswith("These runs do not tell.\n")
    # But the models differ on rows. An unscored one has not passed.
    assert "the 100 rows that all have" in rows and "A 0.250   B 0.750   B - A +0.500" in rows
    assert re.search(r"B is better by 0\.4\d\d to 0\.[56]\d\d\.", rows)
    few = [write_compared(tmp_path / f"few-{s}", s, [0.1], [s] * 5) for s in (0, 1)]
    assert "an interval needs 20 rows" in printed(capsys, few[0], "--", few[1])


def test_mistakes_are_one_sentence(tmp_path):
    a, b = (write_compared(tmp_path / x, 0, [0.5] * 3) for x in "ab")
    for words, sentence in [
            ([a], "no set B"), ([a, "--"], "no set B"), ([a, "--", "x"], "x is not a run"),
            ([a, b, "--", b], r"A has a seed twice \(\[0, 0\]\)"),
            (["--reward", "none", a, "--", b], "share no step with reward/none")]:
        with pytest.raises(SystemExit, match=f"^error: .*{sentence}.*$") as error:
            compare.main([str(word) for word in words])
        assert "\n" not in str(error.value)


# ---- tools/plot.py, tools/samples.py

def write_run(folder: Path, seed: int, rewards: list[float], **args) -> None:
    (folder / "samples").mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps({"seed": seed, "name": folder.name} | args))
    rows = [{"step": i, "reward/mean": r, "policy/entropy": None}
            for i, r in enumerate(rewards, 1)]
    rows.insert(0, {"step": 0, "eval/pass@1": 0.3})
    rows.append({"step": len(rewards), "eval/pass@1": 0.75})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def turns(r):
        return [{"role": "assistant", "content": f"c{r}"}]

    kept = [{"reward": r, "prompt": "p", "turns": turns(r)} for r in (0.5, None, 0.0)]
    (folder / "samples/step_00001.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in kept))


def test_runs_that_differ_in_the_seed_only_are_one_curve(tmp_path, monkeypatch, capsys):
    for seed, low in ((0, 0.1), (1, 0.3)):
        write_run(tmp_path / f"a-{seed}", seed, [low, low, low, *[low + 0.5] * 10], lr=1e-5)
    write_run(tmp_path / "b", 0, [0.0] * 13, lr=1e-4)
    monkeypatch.setattr("sys.argv", ["plot.py", str(tmp_path), "--out", f"{tmp_path}/out.png"])
    plot.main()
    shown = re.sub(" +", " ", capsys.readouterr().out)
    assert "a, 2 seeds\n reward, first 3 steps 0.200 (0.100 to 0.300)\n" in shown
    assert " last 10 0.700 (0.600 to 0.800)\n pass@1 before 0.300\n after 0.750\n" in shown
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    write_run(tmp_path / "c", 0, [0.0] * 13, lr=1e-4, versions={"commit": "another"})
    assert [len(runs) for runs in plot.find([tmp_path])] == [2, 1, 1]


def test_a_legend_has_seeds_or_the_names_that_differ_and_no_paths(tmp_path, monkeypatch):
    for folder, lr in (("kk/seed_0", 1), ("kk/seed_1", 1), ("kk-coin/seed_0", 2)):
        seed = int(folder[-1])
        write_run(tmp_path / "results" / folder, seed, [0.1 + seed, 0.5, 0.9], lr=lr)
    one, both = plot.find([tmp_path / "results/kk"]), plot.find(
        [tmp_path / "results/kk", tmp_path / "results/kk-coin"])
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
    write_run(tmp_path, 0, [0.0] * 13)
    for sort, expected in (("step", ["0.5", "None", "0.0"]), ("reward", ["None", "0.0", "0.5"])):
        shown = "\n".join(map(samples.text, samples.read(tmp_path, sort)))
        assert re.findall("^c(.*)", shown, re.M) == expected
    monkeypatch.setattr("sys.argv", ["samples.py", str(tmp_path), "--sort", "reward"])
    samples.main()
    assert "--- prompt\np\n--- assistant\ncNone\n" in capsys.readouterr().out


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
