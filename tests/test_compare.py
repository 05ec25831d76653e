"""The tools that read runs: the intervals of tools/compare.py hold what they promise; tools/plot.py
draws runs that differ in the seed alone as one curve; tools/samples.py and tools/score.py show
completions; results/collect.py makes a file that reads as its runs do."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from errors import SettingsError
from fakes import write_run
from results import collect
from tools import compare, plot, samples, score

ROOT = Path(__file__).parent.parent


def made(folder: Path, seed: int, rewards: list[float], passes=None, **args) -> str:
    """A run. passes: the reward of each row in its last evaluation; the first one has 0.3. The rows
    have one text before all pictures, as those of `./run.sh vision`."""
    metrics = [{"step": i, "reward/mean": r, "reward/exact": r / 2, "policy/entropy": None,
                "grad/norm": 1.5}
               for i, r in enumerate(rewards, 1)]
    kept = {}
    if passes:
        score = sum(p == 1 for p in passes) / len(passes)
        metrics = [{"step": 0, "eval/pass@1": 0.3}, *metrics,
                   {"step": len(rewards), "eval/pass@1": score}]
        kept = {"eval_99999": [], "eval_100000": [
            {"prompt": "How many?", "images": [f"{i}.png"], "answer": f"{i}",
             "rewards": {"exact": p, "coin": 1}} for i, p in enumerate(passes)]}
    return str(write_run(folder, metrics, kept, seed=seed, eval_pass=1.0, **args))


def printed(capsys, *words: str) -> str:
    compare.main([str(word) for word in words])
    return capsys.readouterr().out


def test_equal_seeds_are_paired_and_the_last_common_steps_count(tmp_path, capsys):
    for seed in range(3):
        made(tmp_path / f"a/{seed}", seed, [0.0] * 10 + [0.5 + 0.1 * seed] * 10)
        made(tmp_path / f"b/{seed}", seed,
             [0.0] * 10 + [0.6 + 0.101 * seed] * 10 + [0.0] * 5)
        made(tmp_path / f"c/{seed + 3}", seed + 3, [0.6 + 0.101 * seed] * 20)
    text = printed(capsys, tmp_path / "a", "--", tmp_path / "b")
    assert text.startswith("The intervals are over 3 and 3 seeds of A and B: they tell what other "
                           "seeds would give.\nA and B differ in no known flag.\n")
    assert "reward/mean, steps 11 to 20\n  A 0.600   B 0.701   B - A +0.101" in text
    assert "paired, 3 seeds" in text and "B is better by 0.099 to 0.103." in text
    # Seeds that differ are not paired, and hide so small a difference.
    text = printed(capsys, tmp_path / "a", "--", tmp_path / "c")
    assert "Welch, 3 and 3 seeds" in text and "These runs do not tell." in text
    text = printed(capsys, "--reward", "exact", tmp_path / "b", "--", tmp_path / "a")
    assert "reward/exact" in text and "A is better by 0.049 to 0.052." in text


def test_a_change_is_kept_if_it_is_better_twice_on_other_seeds(tmp_path, capsys):
    for name, seeds, gain in ("a", range(5), 0), ("b", range(5), 0.2), ("c", range(5, 10), 0), (
            "d", range(5, 10), 0.2), ("e", range(5, 10), 0.0):
        for seed in seeds:
            made(tmp_path / name / str(seed), seed, [
                0.4 + gain * (1 + 0.1 * (seed % 3)) + 0.01 * (seed * 7 % 5)
                + 0.01 * (name == "e") * (-1) ** seed] * 10)
    a, b, c, d, e = (tmp_path / name for name in "abcde")
    assert "\nKeep B: " in printed(capsys, a, "--", b, "--again", c, "--", d)
    assert "Do not keep B: comparison 2" in printed(capsys, a, "--", b, "--again", c, "--", e)
    text = printed(capsys, "--reward", "exact", a, "--", a, "--again", c, "--", d)
    assert "Do not keep B: comparison 1" in text and "comparison 2\n" not in text
    with pytest.raises(SettingsError, match=r"has the seeds \[0, 1, 2, 3, 4\] of the first"):
        compare.main([str(x) for x in (a, "--", b, "--again", a, "--", b)])


VERDICT = re.compile(r" is better by ")


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_equal_methods_whose_seeds_differ_are_seldom_ranked(count, monkeypatch):
    """A seed's pass@1 is 0.9, give or take .03, on 300 rows that one model finds harder than the
    other by chance: 100 comparisons, and an interval of 95 % may be wrong in 5 of them."""
    rng, ranked, found = np.random.default_rng(count), 0, {}
    monkeypatch.setattr(samples, "passed", lambda run: found[run.path])

    def side(name: str) -> dict:
        runs = {}
        for seed in range(count):
            rows = rng.random(300) < np.clip(rng.normal(0.9, 0.03), 0, 1)
            path = Path(f"{name}/{seed}")
            found[path] = {str(i): float(ok) for i, ok in enumerate(rows)}
            score = {10: rows.mean()}
            runs[seed] = plot.Run(path, {"seed": seed}, {"eval/pass@1": score})
        return runs

    for _ in range(100):
        text = "\n".join(compare.compare([side("a"), side("b")], "reward/mean"))
        ranked += bool(VERDICT.search(text))
        assert text.startswith("These runs do not tell" if count < 3 else "The intervals are over")
    assert ranked <= (0 if count < 3 else 11), f"{ranked} of 100"


@pytest.mark.parametrize("a, b", [
    ([0.4, 0.4], [0.5, 0.5]), ([0.1, 0.2], [0.2, 0.3]), ([0.9], [0.1]),  # too few
    ([0.1, 0.2, 0.3], [0.2, 0.3, 0.4]), ([0.1, 0.2, 0.7], [0.1, 0.2, 0.7]),  # equal differences
    ([0.5] * 3, [0.5] * 3), ([0.0] * 5, [1.0] * 5),
    ([0.3333, 0.6667, 0.1], [0.4333, 0.7666, 0.2])])  # equal but for four digits
def test_without_a_variance_there_is_no_verdict(a, b):
    """Neither where seeds are paired, nor where they differ; nor does a width of 1e-17 give one."""
    for start in (0, 10):
        if a != [0.1, 0.2, 0.7] and (start == 0 or len({*a}) == len({*b}) == 1):
            text = compare.report("x", dict(enumerate(a)), dict(enumerate(b, start)), "seeds")
            assert "These runs do not tell" in text and not VERDICT.search(text), text
            assert "95 %" not in text, text
    rows = dict(enumerate([0.5] * 30))
    text = compare.report("x", rows, {row: 1.0 for row in rows}, "rows")
    assert "no variance" in text and not VERDICT.search(text)


@pytest.mark.parametrize("flags, name, why", [
    (dict(reward=["exact", "math:0.5"]), "reward/mean", "Would work: --reward exact."),
    (dict(reward=["exact:0.5", "math"]), "reward/mean", "other rewards"),
    (dict(reward=["mine.py:exact"]), "eval/pass@1", "other rewards"),
    (dict(reward=["math", "exact"]), "eval/pass@1", "other rewards"),
    (dict(eval_samples=4), "eval/pass@1", "--eval_samples is 1 or 4"),
    (dict(eval_temperature=0.7), "eval/pass@1", "--eval_temperature is 0.0 or 0.7"),
    (dict(eval_pass=0.5), "eval/pass@1", "--eval_pass is 0.5 or 1.0"),
    (dict(max_tokens=32), "reward/mean", "--max_tokens is 16 or 32"),
    (dict(data="other.jsonl"), "reward/mean", "--data is other.jsonl or tiny"),
    (dict(temperature=0.5), "reward/mean", "--temperature is 0.5 or 1.0")])
def test_numbers_that_are_measured_differently_are_not_ranked(tmp_path, capsys, flags, name, why):
    """The other side, or one run of it, has another of these flags. It is said, and no verdict of
    this metric is given."""
    base = dict(reward=["exact"], eval_samples=1, eval_temperature=0.0, eval_pass=1.0,
                max_tokens=16, data="tiny", temperature=1.0, eval_data="t@test")
    for who, odd in ("a", ()), ("b", (0, 1, 2)), ("c", (1,)):
        for seed in range(3):
            reward = 0.1 * (who != "a") + 0.01 * seed**2
            passes = [1.0] * 25 if who != "a" else [1.0] * (5 + seed) + [0.0] * (20 - seed)
            path = Path(made(tmp_path / f"{who}/{seed}", seed, [reward] * 10, passes))
            own = base | (flags if seed in odd else {}) | {"seed": seed}
            (path / "args.json").write_text(json.dumps(own))
    for other in "bc":
        try:
            text = printed(capsys, tmp_path / "a", "--", tmp_path / other)
        except SettingsError as error:  # nothing else can be compared
            text = str(error)
        assert f"{name} is not compared: " in text and why in text, text
        assert f"{name}, steps" not in text
        assert other == "b" or not VERDICT.search(text)


def test_other_held_out_rows_are_not_compared(tmp_path, capsys):
    """By their digest, the rows themselves, their number, or the flag, whichever is known."""
    def two(name: str, a: dict, b: dict, rows=(None, None), digests=()) -> str:
        for who, more, kept in zip("ab", (a, b), rows, strict=True):
            for seed in range(3):
                path = made(tmp_path / f"{name}/{who}/{seed}", seed, [0.1], None, **more)
                evaluation = {"step": 1, "eval/pass@1": 0.1 * seed, "eval/rows": kept or 8}
                with open(f"{path}/metrics.jsonl", "a") as file:
                    file.write(json.dumps(evaluation) + "\n")
                for step, digest in enumerate(digests["ab".index(who)] if digests else ()):
                    saved = Path(path, f"checkpoints/step_{step + 9}")
                    saved.mkdir(parents=True)
                    (saved / "state.json").write_text(json.dumps(
                        {"settings": {"rows of --eval_data": digest}}))
        return printed(capsys, tmp_path / name / "a", "--", tmp_path / name / "b")

    no = "eval/pass@1 is not compared: other "
    flag = [dict(eval_data="one.jsonl"), dict(eval_data="two.jsonl")]
    assert no + "--eval_data" in two("flag", *flag)
    assert no + "number of held-out rows" in two("number", flag[0], flag[0], (8, 9))
    assert no + "rows of --eval_data" in two("digest", flag[0], flag[0], digests=["xy", "xz"])
    assert no not in two("same", *flag, digests=["xy", "zy"])  # the newest checkpoint's
    assert no not in two("unknown", {}, {})


def test_how_the_runs_differ_is_said_and_a_mixed_side_is_not_ranked(tmp_path, capsys):
    for seed in range(3):
        made(tmp_path / f"a/{seed}", seed, [0.1 + 0.01 * seed] * 9, loss="clip", stop=[], name="x",
             versions={"commit": "one"}, keep=1)
        made(tmp_path / f"b/{seed}", seed, [0.5 + 0.02 * seed] * 9, loss="gspo", stop=[], name="y",
             versions={"commit": "two"}, keep=2, lr=1e-4)
        made(tmp_path / f"c/{seed}", seed, [0.5 + 0.02 * seed] * 9, stop=[],
             loss=("clip", "gspo")[seed % 2])
    text = printed(capsys, tmp_path / "a", "--", tmp_path / "b")
    assert text.splitlines()[1] == (
        "A and B differ in --loss (A clip; B gspo), commit (A one; B two).")
    assert "B is better by" in text
    text = printed(capsys, tmp_path / "a", "--", tmp_path / "c")
    assert "These runs do not tell: runs of B differ in --loss (clip and gspo)." in text
    assert not VERDICT.search(text)


def test_files_of_results_tell_their_command(tmp_path, capsys):
    """The flags of a command, and its job, are compared as those of args.json are."""
    def file(name: str, command: str, *reward: str) -> Path:
        path = tmp_path / f"{name}.json"
        seeds = {seed: {"steps": {"step": [1, 2], "reward/exact": [0.1, 0.2 + seed / 50]},
                        "evaluations": {"step": [0, 2], "eval/pass@1": [0.1, 0.2 + seed / 10]}}
                 for seed in range(3)}
        path.write_text(json.dumps({"command": command, "reward": reward, "seeds": seeds}))
        return path

    job = file("job", "./run.sh --lr 1e-4", "exact")
    coin = file("coin", "./run.sh --reward exact:0 examples/coin.py:coin --lr 1e-4", "exact:0",
                "examples/coin.py:coin")
    text = printed(capsys, "--reward", "exact", job, "--", coin)
    assert "reward/exact, steps 1 to 2\n" in text and "is not compared" not in text
    assert "--reward (A exact; B exact:0 examples/coin.py:coin). Of files of results/ only" in text
    longer = file("longer", "./run.sh --lr 1e-4 --eval_samples 4 --max_tokens 99", "exact")
    with pytest.raises(SettingsError, match="--eval_samples is 4 or default"):
        compare.main(["--reward", "exact", str(job), "--", str(longer)])
    with pytest.raises(SettingsError, match="other jobs: ./run.sh or ./run.sh kk"):
        compare.main(["--reward", "exact", str(job), "--",
                      str(file("kk", "./run.sh kk --lr 1e-4", "exact"))])


def test_one_run_a_side_claims_nothing_about_seeds(tmp_path, capsys):
    a = made(tmp_path / "a", 0, [0.1] * 10, [0, None, 0, 1] * 25)
    b = made(tmp_path / "b", 1, [0.9] * 10, [1, 1, 0, 1] * 25)
    head, runs, scores, rows = re.split("^(?=rew|eval|pass)", printed(capsys, a, "--", b),
                                        flags=re.M)
    assert head.startswith("These runs do not tell which of A and B is better: 1 and 1 seeds are")
    for part in (runs, scores):
        assert "needs 3 seeds a side" in part and part.endswith("These runs do not tell.\n")
    # The interval over rows is of these models. An unscored row has not passed.
    assert "paired, 100 rows" in rows and "A 0.250   B 0.750   B - A +0.500, 95 %: +0.4" in rows
    assert rows.endswith("These runs do not tell which method is better: other seeds may differ "
                         "otherwise.\n")
    few = [made(tmp_path / f"few-{s}", s, [0.1], [s] * 5) for s in (0, 1)]
    assert "an interval needs 20 rows" in printed(capsys, few[0], "--", few[1])


def test_a_row_with_another_answer_is_another_row(tmp_path):
    """The control of `./run.sh vision` has the same texts and pictures."""
    for name in "ab":
        row = {"prompt": "?", "images": ["0.png"], "answer": name, "rewards": {"exact": 1.0}}
        write_run(tmp_path / name, [], {"eval_00001": [row]}, eval_pass=1.0)
    with pytest.raises(SettingsError, match="share no step with reward/mean, and no evaluation"):
        compare.main([str(tmp_path / "a"), "--", str(tmp_path / "b")])


def test_mistakes_are_one_sentence(tmp_path):
    a, b = (made(tmp_path / x, 0, [0.5] * 3, [1] * 20) for x in "ab")
    for words, sentence in [
            ([a, "--"], r"set B has the seeds \[\]"), ([a, "--", "x"], "x is not a run"),
            ([a, b, "--", b], r"set A has the seeds \[0, 0\]; give one run of each"),
            ([ROOT / "which/which.json", "--", b], "which.json is no job's file"),
            ([a, b], "two sets of runs need -- between them"),
            (["--reward", "none", a, "--", b], "share no step with reward/none. Would work: ")]:
        with pytest.raises(SettingsError, match=f"^.*{sentence}.*$"):
            compare.main([str(word) for word in words])


def drawn(monkeypatch, capsys, *words) -> str:
    """What plot.py prints, with single spaces."""
    monkeypatch.setattr("sys.argv", ["plot.py", *map(str, words)])
    plot.main()
    return re.sub(" +", " ", capsys.readouterr().out)


def test_runs_that_differ_in_the_seed_only_are_one_curve(tmp_path, monkeypatch, capsys):
    for seed, low in ((10, 0.1), (2, 0.3)):
        made(tmp_path / f"a-{seed}", seed, [low] * 3 + [low + 0.5] * 10, [1, 1, 1, 0], lr=1e-5)
    made(tmp_path / "b", 0, [0.0] * 13, lr=1e-4)
    shown = drawn(monkeypatch, capsys, tmp_path, "--out", f"{tmp_path}/out.png")
    assert "a, 2 seeds\n reward, first 3 steps 0.200 (0.100 to 0.300)\n" in shown
    assert " last 10 0.700 (0.600 to 0.800)\n pass@1 before 0.300\n after 0.750\n" in shown
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    made(tmp_path / "c", 0, [0.0] * 13, lr=1e-4, versions={"commit": "another"})
    assert [[run.args["seed"] for run in runs] for runs in plot.find([tmp_path])] == [
        [2, 10], [0], [0]]  # by their numbers
    # A control trains on a coin, and its page promises the task's reward.
    found = []
    monkeypatch.setattr(plot, "draw", lambda groups, path, rewards: found.append(rewards))
    shown = drawn(monkeypatch, capsys, tmp_path, "--reward", "exact")
    assert found == [("reward/exact",)] and " last 10 0.350 (0.300 to 0.400)\n" in shown
    with pytest.raises(SystemExit, match="has no reward/won. Would work: --reward mean or exact"):
        drawn(monkeypatch, capsys, tmp_path, "--reward", "won")


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


@pytest.mark.parametrize("backend", ["module://matplotlib_inline.backend_inline", "nonsense",
                                     "QtAgg", "", "Agg"])
def test_a_picture_is_drawn_whatever_backend_the_environment_names(tmp_path, backend):
    """A notebook's kernel sets it for `!python`; matplotlib reads it when it is imported."""
    made(tmp_path / "run", 0, [0.1, 0.5, 0.9])
    code = ("from pathlib import Path; from tools import plot; "
            "plot.draw(plot.find([Path('run')]), 'x.png')")
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True,
                   env=os.environ | {"MPLBACKEND": backend, "PYTHONPATH": str(ROOT)})
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_completions_are_shown_and_a_reward_is_tried_on_them(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        "def near(completion, answer, **row):\n    return float(completion[:1] == answer[:1])\n"
        "def needy(completion, level, **row):\n    return 1.0\n")
    said = ["13", "12", "21", "22"]  # of two prompts
    rows = [{"position": i // 2, "prompt": "p", "completion": text, "answer": "12", "tokens": 2,
             "truncated": False, "turns": [{"role": "assistant", "content": text}],
             "reward": None if text == "22" else float(text == "12")}
            for i, text in enumerate(said)]
    folder = str(write_run(tmp_path / "run", [], {"step_00001": rows}))

    def run(tool, *words: str) -> str:
        monkeypatch.setattr("sys.argv", ["", folder, *words])
        tool.main()
        return capsys.readouterr().out

    for sort, expected in ("step", said), ("reward", ["22", "13", "21", "12"]):
        shown = run(samples, "--sort", sort)
        assert re.findall(r"^(\d\d)$", shown, re.M) == expected
        assert "--- prompt\np\n--- assistant\n22" in shown
    first, kept, new, _, shown = run(score, f"{tmp_path}/mine.py:near", "--show", "1").splitlines()
    assert first == "4 completions in 2 groups"
    assert re.search(r"run's reward +mean +0.333 +groups that differ +50.0%   unscored 1", kept)
    assert re.search(r"near +mean +0.500 +groups that differ +0.0%   unscored 0", new)
    assert shown == "  0 -> 1 [0] p -> 13"
    with pytest.raises(SettingsError, match="needy needs 'level', which samples/ does not keep"):
        run(score, f"{tmp_path}/mine.py:needy")


def test_finished_runs_become_a_file_that_reads_as_they_do(tmp_path):
    """With 4 digits, and without the metrics whose curve nobody reads. What is made of such files
    is tried with those of results/, in test_pages.py."""
    folders = [Path(made(tmp_path / f"a-{seed}", seed, [0.123456789, seed], [1, 0, 0],
                         versions={"commit": f"c{seed}", "torch": "2"}, began=f"day {seed}"))
               for seed in (0, 1)]
    for folder in folders:
        (folder / "plan.txt").write_text("")
        (folder / "done.json").write_text('{"steps": 2}')
    job = collect.job_of(folders, "./run.sh", "loaded")
    (tmp_path / "job.json").write_text(collect.as_text(job))
    assert job["versions"] == {"torch": "2"} and job["seeds"]["1"]["commit"] == "c1"
    own, (read,) = plot.runs_in(tmp_path), plot.find([tmp_path / "job.json"])
    assert [run.args["seed"] for run in read] == [0, 1]
    del own[1].metrics["grad/norm"]
    assert read[1].metrics == own[1].metrics | {
        "reward/mean": {1: 0.1235, 2: 1}, "reward/exact": {1: 0.06173, 2: 0.5},
        "eval/pass@1": {0: 0.3, 2: 0.3333}, "policy/entropy": {}}
    with pytest.raises(SettingsError, match="a-0 has not finished, or its flags are not those of"):
        collect.job_of([folders[0], folders[0]], "./run.sh", "")
