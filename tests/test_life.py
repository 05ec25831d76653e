"""The life of a run: whatever comes between two commands, nothing is lost, and nothing is silently
another run. First sequences that were once wrong, then drawn ones."""
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

import faults
from forked import PYTHON
from life import ADVANTAGE, LOSS, REWARD, ROOT, Life, lines


@pytest.fixture
def life(tmp_path) -> Life:
    return Life(tmp_path)


# ---- what a run is made of

EDITS = [  # a file, its new content, words that are said; None: it acts on nothing
    ("rew.py", REWARD.format(-9), "another rew.py"),
    ("loss.py", LOSS.format(2), "another loss.py"),
    ("adv.py", "def own(rewards, group, **others):\n    return 2 * rewards\n", "another adv.py"),
    ("helper.py", "K = 7\n", "another helper.py"),
    ("ev.jsonl", lines(700100, 3), "another rows of --eval_data"),
    ("rew.py", "# a comment\n\n" + REWARD.format(1) + "\n", None),
    ("rows.jsonl", lines(500100, 12).replace(": ", ":"), None),
    ("model/README.md", "a page", None),
    ("model/generation_config.json", '{"eos_token_id": 0, "temperature": 0.6}', None)]


@pytest.mark.parametrize("file, content, said", EDITS)
def test_what_acts_on_a_number_is_said_and_nothing_else(life, file, content, said):
    """It was silent: rewards .0625, .125, -593, -600."""
    if file == "helper.py":
        (life.place / file).write_text("K = 1\n")
        (life.place / "rew.py").write_text("import helper\n" + REWARD.format("helper.K"))
    if file.startswith("model/gen"):
        content = json.dumps(json.loads((life.place / file).read_text()) | {"temperature": 0.6})
    if file == "helper.py":
        assert life.go(steps=2) == 0, life.text
    else:
        life.begin(2)
    (life.place / file).write_text(content)
    (life.acts if said else life.idle).append(said or "resumed with another")
    assert life.go(steps=3) == 0, life.text
    assert "resumed from" in life.text


@pytest.mark.parametrize("file, change, said", [
    ("rows.jsonl", lambda text: text.replace(b"500103", b"500193"), "row 4 of --data differs"),
    ("rows.jsonl", lambda text: text + lines(1, 1).encode(), "rows was 12 and is now 13"),
    ("rows.jsonl", lambda text: b"".join(text.splitlines(True)[::-1]), "row 1 of --data differs"),
    ("model/model.safetensors", lambda text: text[:-4] + b"abcd", "model_files was"),
    ("model/config.json", lambda text: text.replace(b'_eps": 1e-0', b'_eps": 2e-0'),
     "config was")])
def test_another_run_is_refused(life, file, change, said):
    life.begin(1)
    path = life.place / file
    before = path.read_bytes()
    path.write_bytes(change(before))
    assert path.read_bytes() != before and life.go() == 2 and said in life.text, life.text
    path.write_bytes(before)
    assert life.go() == 0, life.text
    life.same_as(life.alone(4))


def test_a_models_folder_may_move(life):
    """Its path was a part of its config: another cache of the hub, and a tiny model of other code,
    were refused."""
    life.begin(2)
    (life.place / "model").rename(life.place / "moved")
    assert life.go("--model", "moved") == 0, life.text
    assert "resumed with --model moved (was model)" in life.text
    life.same_as(life.alone(4))


# ---- more steps, evaluations, exports

def test_more_steps_keep_what_was_made(life):
    """The last evaluation and its samples were deleted, and never made again."""
    life.begin(3)
    assert life.go(steps=5) == 0 and "model, from an earlier end" in life.text, life.text
    evaluated = [row["step"] for row in life.rows() if "eval/rows" in row]
    assert evaluated == [0, 2, 3, 4, 5] and (life.run / "samples/eval_00003.jsonl").exists()
    life.same_as(life.alone(5))


def test_an_evaluation_changes_nothing_of_the_run(life):
    """Of a killed run without checkpoints it moved the folder aside, and evaluated the model of the
    start under its name."""
    life.begin(2)
    before = {path: path.read_bytes() for path in life.run.rglob("*") if path.is_file()}
    for number in 1, 2:
        assert life.command("--name", "x", "--eval_only", "--eval_samples", "1") == 0, life.text
        row, = life.rows(life.run / f"eval_only_{number}")
        assert row == [row for row in life.rows() if "eval/rows" in row][-1]
    assert {path: path.read_bytes() for path in before} == before
    shutil.rmtree(life.run / "checkpoints")
    (life.run / "done.json").unlink()
    assert life.command("--name", "x", "--eval_only") == 2 and "no checkpoint" in life.text
    assert {p.name for p in life.place.glob("runs/*")} == {"x"}


def test_a_run_is_asked_before_and_after_and_stays_as_it_is(life):
    """tools/ask.py, with the engine itself: of an ended run, of a checkpoint, of a model."""
    life.begin(2)

    def asked(*words: str) -> tuple[int, str]:
        done = subprocess.run([PYTHON, ROOT / "tools/ask.py", *words], cwd=life.place, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600)
        return done.returncode, done.stdout

    before = {path: path.read_bytes() for path in life.run.rglob("*") if path.is_file()}
    status, text = asked("runs/x", "--row", "2", "-k", "2")
    assert status == 0 and "Sort 600101" in text, text
    sides = re.findall(r"^--- (\w+): (.+)", text, re.M)
    assert [side for side, _ in sides] == ["before", "after"] and sides[1][1].endswith("x/model")
    assert len(re.findall(r"^\[\d+\] ", text, re.M)) == 4
    assert {p: p.read_bytes() for p in life.run.rglob("*") if p.is_file()} == before
    (life.run / "done.json").unlink()
    status, text = asked("runs/x", "Sort 12", "-k", "1")
    assert status == 0 and "Sort 12" in text and "after: " in text and "[0]" not in text, text
    assert {p for p in life.run.rglob("*") if p.is_file()} == before.keys() - {
        life.run / "done.json"}
    for words, said in (["nowhere", "hi"], "nowhere"), (["runs/x"], "nothing is asked"), (
            ["runs/x", "--row", "4"], "1 to 3"), (["runs/x", "{"], "no object in JSON"):
        status, text = asked(*words)
        assert status and said in text and "Traceback" not in text, text


def test_a_plan_changes_nothing_and_plans_the_ranks_of_torchrun(life):
    life.begin(1)
    before = {path: path.read_bytes() for path in life.run.rglob("*") if path.is_file()}
    assert life.command("--name", "x", "--plan", ranks=2) == 0, life.text
    assert life.text.count("plan for grpo.py") == 1 and "on 2 ranks" in life.text
    assert {path: path.read_bytes() for path in life.run.rglob("*") if path.is_file()} == before


def test_the_best_checkpoint_is_kept_and_a_goal_ends_the_run(life):
    """Ties: the earlier. With the reward as it is the evaluation before the first step is enough
    for a small goal."""
    assert life.go("--keep", "1", "--keep_best", "--eval_pass", "0.5", steps=6) == 0, life.text
    found = {row["step"]: row["eval/pass@1"] for row in life.rows() if "eval/rows" in row}
    best = max(found, key=found.get)
    assert {path.name for path in life.run.glob("checkpoints/*")} == {f"step_{best}", "step_6"}
    assert "biased upwards" in life.text
    rows = life.rows()
    shutil.rmtree(life.run)
    for fault in "evaluate:0:2:SIGKILL", "saved:0:3:SIGKILL", "":
        life.go("--keep", "1", "--keep_best", "--eval_pass", "0.5", steps=6, FAULTS=fault)
    assert life.rows() == rows
    assert {path.name for path in life.run.glob("checkpoints/*")} == {f"step_{best}", "step_6"}
    goal = min(found.values())
    shutil.rmtree(life.run)
    if goal:
        assert life.go("--stop_at", str(goal), "--eval_pass", "0.5", steps=6) == 0, life.text
        assert json.loads((life.run / "done.json").read_text())["stop_at"] == goal
        assert life.go(steps=None) == 2 and "reached --stop_at" in life.text


# ---- columns that no resume could know

@pytest.mark.parametrize("value, refused", [
    ("{1, 'b', 2}", False), ("numpy.arange(5000)", False), ("datetime.date(2026, 1, 2)", False),
    ("numpy.int64(3)", False), ("float('nan')", False), ("(1, 2)", False),
    ("Own()", True), ("lambda: 1", True), ("[Own()]", True)])
def test_a_column_of_any_type_is_resumed_on_two_ranks_or_refused(life, value, refused):
    """A set was another row in each process, and an object at each address."""
    (life.place / "rows.py").write_text(
        "import datetime, json, numpy\nclass Own:\n    pass\ndef rows(seed):\n    return [row | "
        f"{{'x': {value}}} for row in map(json.loads, open('rows.jsonl'))]\n")
    status = life.go("--data", "rows.py:rows", steps=1, ranks=2)
    assert status == (2 if refused else 0), life.text
    if refused:
        assert "row 1: its column x holds a " in life.text, life.text
    else:
        assert life.go("--data", "rows.py:rows", steps=2) == 0, life.text


def test_words_that_look_like_others_are_resumed(life):
    """A reward called e2e, a weight of 1_000, a --stop that looks like a flag."""
    (life.place / "mine.py").write_text(REWARD.format(1).replace("def mine", "def e2e"))
    words = ["--reward", "mine.py:e2e:1_000", "--stop=--"]
    assert life.go(*words, steps=1) == 0, life.text
    assert life.go("--steps", "2", steps=None) == 0, life.text


# ---- signals

@pytest.mark.parametrize("place, step, steps", [
    ("rollout", 1, 2), ("reward", 1, 2), ("backward", 1, 2), ("evaluate", 2, 2), ("save", 1, 2)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_to_the_whole_job_saves_the_same_step(life, place, step, steps, ranks):
    """Slurm signals each process of a job. The reward's workers died first, and the step that was
    saved had learned from fewer completions. In an evaluation nothing was learned since."""
    status = life.go(ranks=ranks, FAULTS=f"{place}:*:{step}:JOB")
    assert status == 75, life.text
    assert f"ended after {steps} of 4" in life.text, life.text
    assert faults.last(life.run) == steps
    again = re.search(r"To resume: .*--name (\S+)", life.text)[1]
    assert life.go("--name", again, steps=None, ranks=ranks) == 0, life.text
    life.same_as(life.alone(4, ranks))


def test_a_reward_whose_process_is_ended_by_the_signal_is_asked_again(life):
    """Its child dies, and what it then says is no reward."""
    (life.place / "rew.py").write_text(
        "import subprocess, os\ndef mine(completion, answer, **row):\n"
        "    end = subprocess.run(['sleep', '0.3']).returncode\n"
        "    return len({*completion} & {*answer}) if end == 0 else -7.0\n")
    assert life.go(steps=2, FAULTS="reward:0:1:JOB-0.1") == 75, life.text
    assert life.go(steps=None) == 0, life.text
    life.same_as(life.alone(2))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_kill_is_no_kill(life, number):
    life.go(FAULTS=f"backward:0:2:{number.name}")
    assert life.go(steps=None) == 0, life.text
    life.same_as(life.alone(4))


def test_a_run_that_another_process_writes_is_refused_first(life):
    """Before its rows are read, which took 12 s."""
    process = life.start(*life.flags(), "--name", "x", "--steps", "4", FAULTS="rollout:0:1:hang")
    while not (life.run / "checkpoints/step_1").exists():
        time.sleep(0.05)
    assert life.command(*life.flags(), "--name", "x") == 2, life.text
    assert "another run is writing runs/x" in life.text and "prompts kept" not in life.text
    assert life.command("--name", "x", "--eval_only") == 0, life.text  # it only reads
    process.kill()
    process.wait()
    assert life.go() == 0, life.text
    assert life.go() == 2 and "is finished" in life.text and "prompts kept" not in life.text


def test_work_of_rank_0_alone_has_no_limit_of_time(life):
    """An export of more than --timeout seconds ended the other ranks, and so itself."""
    assert life.go("--timeout", "2", steps=1, ranks=2, FAULTS="written:0:0:slow") == 0, life.text
    assert (life.run / "model/model.safetensors").exists() and (life.run / "done.json").exists()


# ---- a checkpoint that is damaged

def zeroed(path):
    with open(next(path.glob("*.distcp")), "r+b") as file:
        file.seek(os.path.getsize(file.name) // 2)
        file.write(bytes(4096))


DAMAGES = [
    lambda path: (path / "state.json").unlink(),
    lambda path: os.truncate(path / "state.json", 9),
    lambda path: next(path.glob("*.distcp")).unlink(),
    lambda path: os.truncate(next(path.glob("*.distcp")), 999),
    lambda path: (path / ".metadata").unlink(),
    lambda path: (path / ".metadata").write_bytes(bytes(100)), zeroed]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_with_the_way_out_and_that_works(life, damage):
    """4 kB of zeros inside a tensor were loaded without a word."""
    life.begin(4)
    (life.run / "done.json").unlink()
    damage(life.run / "checkpoints/step_4")
    assert life.go() == 2, life.text
    way = re.search(r"Would work: `(rm -r \S+)`, to resume after step 3\.", life.text)[1]
    os.system(f"cd {life.place} && {way}")
    assert life.go() == 0, life.text
    life.same_as(life.alone(4))


def test_a_disk_without_locks_is_said(life):
    assert life.go(steps=1, NO_LOCKS="ENOLCK") == 0, life.text
    assert "has no locks" in life.text


# ---- drawn sequences

SAID = {"rew.py": "another rew.py", "loss.py": "another loss.py", "adv.py": "another adv.py",
        "ev.jsonl": "another rows of --eval_data"}
REFUSED = {"rows.jsonl": lambda text: text.replace(b"500105", b"500195"),
           "model/model.safetensors": lambda text: text[:-4] + b"abcd"}
PLACES = "setup rollout reward backward save saved evaluate export".split()
TOOLS = ["report.py runs/x --out page.html", "samples.py runs/x", "score.py runs/x rew.py:mine",
         "plot.py runs/x --out plot.png"]


class AnyLife(RuleBasedStateMachine):
    """What may happen to the folder of a run, in any order. `Life.go` holds what must hold."""

    kind = Life

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="life-")
        self.life, self.edits = self.kind(Path(self.folder.name)), 1

    @rule(steps=st.integers(1, 6), full=st.booleans())
    def start(self, steps, full):
        """The same command again, more steps, fewer, or the name alone."""
        there = (self.life.run / "args.json").exists()
        status = self.life.go(*[] if full else ["--steps", str(steps)],
                              steps=steps if full or not there else None)
        assert status in (0, 2), self.life.text

    @rule(place=st.sampled_from(PLACES), step=st.integers(0, 4),
          how=st.sampled_from(["SIGKILL", "SIGTERM", "SIGINT", "JOB", "full", "raise"]))
    def end_early(self, place, step, how):
        """A kill, a signal, a full disk or a failure at some moment, and what is said of it."""
        status = self.life.go(steps=6, FAULTS=f"{place}:0:{-1 if place == 'setup' else step}:{how}")
        text = self.life.text
        assert status in (0, 1, 2, 75, 130, -9, 143, -15, 128 + 9), (status, text)
        if status == 75:
            assert "To resume: " in text and self.life.go(steps=None) == 0, self.life.text

    @rule(file=st.sampled_from([*SAID]))
    def edit_what_is_said(self, file):
        self.edits += 1
        text = {"rew.py": REWARD.format(self.edits), "loss.py": LOSS.format(self.edits),
                "adv.py": ADVANTAGE.format(self.edits), "ev.jsonl": lines(600100 + self.edits, 3)}
        self.life.edit(file, lambda _: text[file].encode(), True, SAID[file])

    @rule(file=st.sampled_from(["rew.py", "loss.py", "model/generation_config.json", "rows.jsonl"]))
    def edit_what_acts_on_nothing(self, file):
        """A comment, a line's end, the time of a file."""
        def change(text):
            return text + b"\n" + (b"# a comment\n" if file.endswith(".py") else b"")
        self.life.edit(file, change, False, "another " + file)

    @precondition(lambda self: faults.last(self.life.run))
    @rule(file=st.sampled_from([*REFUSED]))
    def edit_what_is_refused(self, file):
        path = self.life.place / file
        before = path.read_bytes()
        path.write_bytes(REFUSED[file](before))
        assert self.life.go(steps=6) == 2, self.life.text
        path.write_bytes(before)

    @precondition(lambda self: faults.last(self.life.run) > 1)
    @rule(damage=st.sampled_from(DAMAGES))
    def damage_the_newest_checkpoint(self, damage):
        """The way out that is printed is gone."""
        damage(self.life.run / f"checkpoints/step_{faults.last(self.life.run)}")
        (self.life.run / "done.json").unlink(missing_ok=True)
        assert self.life.go(steps=6) == 2, self.life.text
        os.system(f"cd {self.life.place} && {re.search('`(rm -r .*?)`', self.life.text)[1]}")

    @precondition(lambda self: (self.life.run / "args.json").exists())
    @rule(words=st.sampled_from(["--plan", "--eval_only", *TOOLS]))
    def read_it(self, words):
        before = self.life.seen()
        if words.startswith("--"):
            assert self.life.command("--name", "x", words) in (0, 2), self.life.text
        elif faults.progress(self.life.run):
            done = subprocess.run(f"{PYTHON} {ROOT}/tools/{words}", shell=True, text=True,
                                  cwd=self.life.place, capture_output=True)
            assert done.returncode == 0, done.stderr
        after = self.life.seen()
        assert {thing: after.get(thing) for thing in before} == before

    @precondition(lambda self: faults.last(self.life.run))
    @rule()
    def copy_it(self):
        """A copy is resumed as the run would be."""
        shutil.copytree(self.life.run, copy := self.life.place / "runs/y", dirs_exist_ok=True)
        status = self.life.command(*self.life.flags(), "--name", "y", "--steps", "6")
        assert status in (0, 2), self.life.text
        shutil.rmtree(copy)

    def teardown(self):
        """Where nothing that acts was changed, the run ends as one that was left alone."""
        if self.life.exact and not self.life.acts and (self.life.run / "args.json").exists():
            assert self.life.go(steps=6) in (0, 2), self.life.text
            if self.life.exact:
                self.life.same_as(self.life.alone(6))
        self.folder.cleanup()


SIZE = dict(stateful_step_count=6, deadline=None, suppress_health_check=[*HealthCheck],
            phases=[Phase.explicit, Phase.generate], database=None)
AnyLife.TestCase.settings = settings(max_examples=20, derandomize=True, **SIZE)
TestAnyLife = AnyLife.TestCase


@pytest.mark.slow
def test_two_hundred_drawn_sequences():
    """Drawn anew in each run."""
    run_state_machine_as_test(AnyLife, settings=settings(max_examples=200, **SIZE))
