"""The instructions and their reward, the controls, tools/, and results/ against its table."""
import json
import re
import subprocess
from pathlib import Path

import pytest

from examples import coin, instructions
from forked import PYTHON
from results import make
from tools import plot, samples

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
     ["The cats saw the moon.", "The cat. It saw the moon.", "The cat saw the moon", "cat moon."]),
    ("short", {"sentences": 1, "need": ["cat"], "most": 6},
     ["The cat sat on the mat.", "A cat sleeps!"],
     ["The cat sat on the big mat.", "The cat sat down. It slept.", "The cats sat on it.",
      "The cat sat on the mat", "A cat.", "The cat weighs 8.7 kilos"]),
    ("lowercase", {"lower": ["cat", "dog"]}, ["cat and dog", "The cat, the dog"],
     ["CAT and DOG", "cat and Dog", "cat", "", "cat, dog, Cat", "cats dogs"]),
    ("letter", {"sentences": 1, "letter": "T"}, ["This is a cat.", " The cat saw it?"],
     ["this is a cat.", "A cat saw it.", "This", "", "This is a cat", "T: A cat. It saw me."]),
    ("json", {"json": {"name": "Tom", "age": 7}},
     ['{"name": "Tom", "age": 7}', '```json\n{"age": 7, "name": "Tom"}\n```'],
     ['{"name": "Tom", "age": "7"}', "{}", "{", '{"name": "Tom", "age": 7, "x": 1}', "[" * 10**5,
      "{" * 10**5, '{"a":' * 10**5 + "}",
      '{"name": "Tom", "age": %s}' % ("7" * 10**5), "{'name': 'Tom', 'age': 7}"]),
    ("last", {"last": 9}, ["9", "4 + 5 = 9."],
     ["9 = 4 + 5", "", "99", "٩", "nine", "9" * 10**5]),
    ("first", {"first": 71}, ["71", "71 is larger than 34"], ["34, not 71", "", "711", "7 1"])])
def test_the_reward_is_1_where_the_rule_is_followed_and_0_for_hostile_completions(
        kind, rule, good, bad):
    assert [instructions.follows(text, rule) for text in good] == [1.0] * len(good)
    hostile = ["\ud83d", "\x00", "." * 10**5, "a" * 10**5, "{" * 99 + "}" * 99, "null", "NaN"]
    assert not [text for text in bad + hostile if instructions.follows(text, rule)]


def test_coins_are_fair_and_do_not_depend_on_the_completion():
    same = ["x"] * 8
    thrown = [coin.coin([f"p{i}"] * 8, same) for i in range(500)]
    assert thrown == [coin.coin([f"p{i}"] * 8, same) for i in range(500)]
    assert coin.coin(["p"] * 8, same) != coin.coin(["p"] * 8, ["y"] * 8)
    assert sum(map(sum, thrown)) / 4000 == pytest.approx(0.25, abs=0.03)
    assert sum(len({*row}) == 2 for row in thrown) > 400   # equal completions differ


# ---- tools/

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


def test_runs_that_differ_in_the_seed_only_are_one_curve(tmp_path):
    for seed, low in ((0, 0.1), (1, 0.3)):
        write_run(tmp_path / f"a-{seed}", seed, [low, low, low, *[low + 0.5] * 10], lr=1e-5)
    write_run(tmp_path / "b", 0, [0.0] * 13, lr=1e-4)
    done = subprocess.run([PYTHON, ROOT / "tools/plot.py", tmp_path, "--out", "out.png"],
                          cwd=tmp_path, capture_output=True, text=True, check=True)
    shown = re.sub(" +", " ", done.stdout)
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
    for figure in figures:
        assert all(axis.get_xlabel() and axis.get_ylabel() for axis in figure.axes)
        assert figure.axes[1].get_ylim() == (-0.03, 1.03)  # pass@1


def test_completions_are_shown_in_order_or_the_worst_first(tmp_path):
    write_run(tmp_path, 0, [0.0] * 13)
    for sort, expected in (("step", ["0.5", "None", "0.0"]), ("reward", ["None", "0.0", "0.5"])):
        shown = "\n".join(map(samples.text, samples.read(tmp_path, sort)))
        assert re.findall("^c(.*)", shown, re.M) == expected
    command = [PYTHON, ROOT / "tools/samples.py", tmp_path, "--sort", "reward"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "--- prompt\np\n--- assistant\ncNone\n" in done.stdout


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


# ---- the real model, where it is

@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "runs/smollm2").is_dir(), reason="examples/smollm2.py makes it")
def test_the_real_model_trains_for_two_steps(tmp_path):
    name = f"test-real-{tmp_path.name}"
    done = subprocess.run(["./run.sh", "real", "--steps", "2", "--batch", "2", "--group", "2",
                           "--name", name, "--no-export"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = [json.loads(line) for line in (ROOT / f"runs/{name}/metrics.jsonl").open()]
    assert len(rows) == 3 and rows[0]["eval/json/rows"] == 20
    assert rows[1]["rollout/logprob_gap_max"] < 1e-3
