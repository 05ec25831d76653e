"""Each logger gets each row once, and none of them ends a run that has begun."""
import json

import pytest

from life import Life
from parts.loggers import plug

OWN = """import json
def own(folder, *, settings):
    def write(step, metrics):
        assert folder.name == "x" and settings["batch"] == 2
        with open("got.jsonl", "a") as file:
            file.write(json.dumps([step, metrics]) + "\\n")
    return write
class Other:
    def __init__(self, folder, settings, **others):
        self.write = own(folder, settings=settings)
    def __call__(self, step, metrics):
        {}
        self.write(step, metrics)
        metrics.clear()
    def close(self):
        open("closed", "a").write("x")
"""
FLAGS = ["--logger", "own.py:own"]


@pytest.fixture
def life(tmp_path) -> Life:
    it = Life(tmp_path)
    (tmp_path / "own.py").write_text(OWN.format("pass"))
    return it


def got(life) -> list:
    """What a logger was given, without what a clock decides."""
    path = life.place / "got.jsonl"
    return [[step, without_times(metrics)] for step, metrics in map(
        json.loads, path.read_text().splitlines() if path.exists() else [])]


def without_times(metrics: dict) -> dict:
    return {name: x for name, x in metrics.items() if "time/" not in name and "per_s" not in name
            and "memory/" not in name}


def sent(life) -> list:
    """What metrics.jsonl says that a logger should have been given."""
    found = []
    for row in life.rows():
        step = row.pop("step")
        prefix = "eval/" if "eval/rows" in row else ""
        found.append([step, {name: x for name, x in row.items()
                             if name.startswith(prefix) and x is not None}])
    return found


def test_rows_are_given_once_each_as_they_are_written(life):
    assert life.go(*FLAGS, steps=4) == 0, life.text
    assert got(life) == sent(life) and len(got(life)) == 7


@pytest.mark.parametrize("faults, again", [
    (["backward:0:3:SIGKILL"], 0), (["save:0:2:SIGKILL", "rollout:0:3:SIGTERM"], 0),
    (["saved:0:3:SIGKILL"], 0), (["save:0:3:SIGKILL"], 1)])
def test_a_killed_run_gives_no_row_twice(life, faults, again):
    for fault in [*faults, ""]:
        life.go(*FLAGS, "--save_every", "2", steps=4, FAULTS=fault)
    assert got(life) == sent(life), life.text
    life.go("--steps", "6", steps=None)
    assert got(life) == sent(life) and got(life)[-1][0] == 6


def test_it_says_which_rows_a_logger_has_already(life):
    life.go(*FLAGS, "--save_every", "2", steps=4, FAULTS="backward:0:3:SIGKILL")
    life.go(steps=None)
    assert "--logger own.py:own has the rows up to step 3: it gets those after it" in life.text


def test_several_loggers_on_rank_0_only(life):
    assert life.go("--logger", "own.py:own", "own.py:Other", steps=1, ranks=2) == 0, life.text
    assert got(life) == [row for row in sent(life) for _ in range(2)]
    assert (life.place / "closed").read_text() == "x"


@pytest.mark.parametrize("fails", ["1 / 0 if step == 2 else 0", "exit(4) if step == 2 else 0"])
def test_a_logger_that_raises_is_off_and_the_run_goes_on(life, fails):
    (life.place / "own.py").write_text(OWN.format(fails))
    assert life.go("--logger", "own.py:own", "own.py:Other", steps=4) == 0, life.text
    assert life.text.count("--logger own.py:Other is off from here: ") == 1
    few = [row for row in sent(life) if row[0] < 2]
    assert sorted(map(str, got(life))) == sorted(map(str, sent(life) + few))
    life.same_as(life.alone(4))


@pytest.mark.parametrize("code, said", [
    ("def own(folder, *, settings):\n    raise OSError('no server')\n",
     "--logger own.py:own cannot start: OSError: no server"),
    ("def own(folder, settings):\n    exit(5)\n", "cannot start: SystemExit: 5"),
    ("import nowhere_at_all\n", "No module named 'nowhere_at_all'"),
    ("def own(folder, *, settings):\n    pass\n", "cannot start: TypeError: None is not a call"),
    ("def own(folder, *, settings):\n    return lambda row: None\n", "cannot start: TypeError: "),
    ("def own(row):\n    pass\n", "needs a function own(folder, *, settings)"),
    ("other = 1\n", "there is none")])
def test_one_that_cannot_start_ends_the_run_with_a_sentence(life, code, said):
    (life.place / "own.py").write_text(code)
    ranks = 2 if "raise" in code else 1
    status = life.command(*life.flags(), *FLAGS, "--name", "x", ranks=ranks)
    assert status == 2 and life.text.count(said) == 1 and not life.rows(), life.text


def test_flags(refused):
    assert refused("grpo", "wandb=''", "--wandb must not be empty")
    assert refused("grpo", "wandb='x'", "fine")
    assert refused("grpo", "logger=('a.py:b','a.py:b')",
                   "--logger names one twice & no such file")
    for given, read in ("", None), ("--wandb", ["--wandb", "samestep"]), (
            "--wandb mine --steps 3", None), ("--wandb=x", None), (
            "--wandb --steps 3", ["--wandb", "samestep", "--steps", "3"]):
        assert plug.words(given.split()) == (read or given.split())


# ---- the loggers that are here

MODULES = {  # libraries that record
    "wandb.py": """import json, os
def record(*what):
    open("wandb.jsonl", "a").write(json.dumps(what, default=str) + "\\n")
def login(**asked):
    return asked != {"prompt": False, "verify": False}
class init:
    def __init__(self, **how):
        record("init", how)
    def log(self, metrics, step):
        record("log", step, metrics)
        if os.environ.get("AWAY"):
            raise ConnectionError("the server is away")
    def finish(self):
        record("finish")
""",
    "trackio.py": """import json
def init(*project, **how):
    open("got.jsonl", "a").close()
    assert how["name"].startswith("x 20")
def log(metrics, step):
    open("got.jsonl", "a").write(json.dumps([step, metrics]) + "\\n")
def finish():
    open("closed", "a").write("x")
"""}


@pytest.mark.parametrize("away", ["", "yes"])
def test_weights_and_biases_gets_every_row_and_its_failure_costs_a_line(life, away):
    """Nobody is asked for a key; the id has the time of the beginning, so a name that is used again
    is another run."""
    (life.place / "lib").mkdir()
    (life.place / "lib/wandb.py").write_text(MODULES["wandb.py"])
    assert life.go("--wandb", "test", steps=3, ranks=2, AWAY=away,
                   PYTHONPATH=str(life.place / "lib")) == 0, life.text
    (_, how), *logged = map(json.loads, (life.place / "wandb.jsonl").read_text().splitlines())
    began = "".join(filter(str.isdigit, json.loads((life.run / "args.json").read_text())["began"]))
    expected = {"project": "test", "mode": "offline", "resume": "allow", "id": f"x-{began}"}
    assert expected.items() <= how.items()
    found = [[step, without_times(metrics)] for _, step, metrics in logged[:None if away else -1]]
    assert found == (sent(life)[:1] if away else sent(life))
    assert ("--wandb is off from here: ConnectionError: the server is away" in life.text) == (
        bool(away))
    assert (logged[-1] == ["finish"]) == (not away)


def test_trackio(life):
    (life.place / "lib").mkdir()
    (life.place / "lib/trackio.py").write_text(MODULES["trackio.py"])
    assert life.go("--logger", "parts/loggers/to_trackio.py:Trackio", steps=2,
                   PYTHONPATH=str(life.place / "lib")) == 0, life.text
    assert got(life) == sent(life) and (life.place / "closed").exists()


def test_the_examples_are_ten_lines():
    from conftest import ROOT
    for name in "to_tensorboard", "to_trackio":
        text = (ROOT / f"parts/loggers/{name}.py").read_text()
        assert len([line for line in text.splitlines()[1:] if line.strip()]) <= 10
