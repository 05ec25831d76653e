"""Environments with a state: --reply FILE.py:CLASS. The same episodes after a worker's death, on
any ranks, with few of them alive. One that answers otherwise when played again is noticed."""
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

import data
import ranks
from chats import turns
from chats.turns import said
from dist import SettingsError
from examples import tiny
from faults import Attempt, differences
from rewards import RewardArgs
from test_layouts import run
from test_layouts import same as same_run
from test_turns import ALONE, END, FakeEngine, bridge

import rollout  # isort: skip

ROOT = Path(__file__).parent.parent
CLASS = """
import os, random, time
from pathlib import Path
made = 0
class Dice:
    def __init__(self, row, seed):
        global made
        made += 1
        self.row, self.dice, self.rolls = row, random.Random(seed), []
        Path(row["answer"], "made").open("a").write("x")
    def reply(self, turns):
        assert sum(turn["role"] == "assistant" for turn in turns) == len(self.rolls) + 1
        self.rolls.append(self.dice.randrange(10**9))
        kind, n = self.row["kind"], len(self.rolls)
        trap = Path(self.row["answer"], f"{kind}-{n}")
        if kind in ("exit", "hang") and n == 2 and not trap.exists():
            trap.touch()
            os._exit(3) if kind == "exit" else time.sleep(1e9)
        if kind == "raise" and n == 2:
            raise KeyError("no such thing")
        if kind == "lie": return f"{made}"
        return None if n == 3 else f"roll {self.rolls[-1]}"
    def reward(self):
        if self.row["kind"] == "none": return None
        if self.row["kind"] == "lies": return made
        return sum(self.rolls) / 1e9
    def close(self):
        Path(self.row["answer"], "closed").open("a").write("x")
"""
KINDS = ["plain", "plain", "raise", "plain", "none", "plain"]


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "dice.py").write_text(CLASS)
    return f"{tmp_path}/dice.py:Dice"


def play(world, spec, kinds, folder, max_turns=4, most=100, timeout=20.0):
    """Episodes of these kinds → (completions, what was printed)."""
    args = SimpleNamespace(turn_args=turns.TurnArgs(spec, max_turns), max_tokens=200,
                           reward_args=RewardArgs(2, timeout, max_environments=most))
    prompts = [data.Prompt(i, data.Row(i, "q", [5, 6, 7 + i], str(folder), {"kind": kind}, ""))
               for i, kind in enumerate(kinds)]
    engine, printed, there = FakeEngine(), [], bridge()
    there.methods = ["reply", "reward", "close"]

    def seed(i, turn=0):
        return 10 * i + turn

    done = engine.complete([rollout.Request(p.row.prompt_ids, seed(i))
                            for i, p in enumerate(prompts)])
    episodes = turns.Episodes(args, there, world, SimpleNamespace(say=printed.append))
    with closing(episodes.workers):
        episodes.play(prompts, done, engine.complete, seed)
    return done, printed


def seen(done):
    return [(c.ids.tolist(), c.turns, c.failed) for c in done]


def test_an_environment_keeps_its_state_and_gives_the_reward(spec, tmp_path):
    done, _ = play(ALONE, spec, KINDS, tmp_path)
    assert [c.failed for c in done] == [kind == "raise" for kind in KINDS]
    for kind, c in zip(KINDS, done, strict=True):
        if kind == "raise":
            continue
        own = [turn for turn in c.turns if turn["role"] == "assistant"]
        rolls = [int(t["content"][5:]) for t in c.turns if t["role"] == "user"]
        assert len({*rolls}) == len(rolls) == len(own) - 1
        reward = c.turns[-1]["reward"]
        assert (reward is None) == (kind == "none")
        if kind == "plain" and len(own) == 3:  # its last roll was not put in
            assert sum(rolls) / 1e9 < reward
    # One is played again at its end (seed 0 of 0, 10, 20, …; 40 too): made twice, closed twice.
    made, closed = (len((tmp_path / name).read_text()) for name in ("made", "closed"))
    assert made == len(KINDS) + 2 and closed == made - 1  # "raise" is not closed


@pytest.mark.parametrize("kinds, most", [
    (["exit" if kind == "raise" else "plain" for kind in KINDS], 100), (["plain"] * 6, 1)])
def test_a_dead_worker_or_a_small_limit_changes_no_episode(spec, tmp_path, kinds, most):
    """What dies itself fails; the environments that died with it are made again."""
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    whole, _ = play(ALONE, spec, ["plain"] * 6, tmp_path / "one")
    done, printed = play(ALONE, spec, kinds, tmp_path / "two", most=most)
    assert [c.failed for c in done] == [kind == "exit" for kind in kinds]
    assert plain(done, kinds) == plain(whole, kinds)
    made = [len((tmp_path / name / "made").read_text()) for name in ("one", "two")]
    assert made[1] > made[0]
    assert (most == 1) == any("2 live at once (--max_environments)" in text for text in printed)


def plain(done, kinds):
    return [one for one, kind in zip(seen(done), kinds, strict=True) if kind == "plain"]


def layouts(world, spec, folder):
    return seen(play(world, spec, KINDS, folder)[0])


def test_every_rank_has_the_same_episodes(spec, tmp_path):
    alone = seen(play(ALONE, spec, KINDS, tmp_path)[0])
    assert all(found == alone for found in ranks.results(2, layouts, spec, str(tmp_path)))


def test_one_that_lies_is_noticed(spec, tmp_path):
    """At its end, for a sample of the episodes; and whenever it is made again."""
    for kind, words in ("lie", "'content': "), ("lies", "its reward was"):
        done, printed = play(ALONE, spec, [kind] * 5, tmp_path)
        assert [c.failed for c in done] == [True, False, False, False, True]  # seeds 0 and 40
        assert "answered otherwise when it was played again: " in printed[0]
        assert words in printed[0]
    done, _ = play(ALONE, spec, ["lie"] * 5, tmp_path, most=1)
    assert sum(c.failed for c in done) > 2


@pytest.mark.parametrize("code, reward, words", [
    (CLASS.replace("def reply", "def answer"), "exact", "needs a method reply"),
    (CLASS.replace("def reply", "async def reply"), "exact", "must be def, not async def"),
    (CLASS.replace("def reward", "def value"), "environment:2", "needs a class with reward"),
    (CLASS.replace("random.Random(seed)", "random"), "exact", "when it was played again"),
    (CLASS.replace("(self, row, seed)", "(self, row)"), "exact", "2 positional arguments")])
def test_a_class_that_cannot_be_used_is_refused(tmp_path, code, reward, words):
    (tmp_path / "dice.py").write_text(code)
    args = SimpleNamespace(turn_args=turns.TurnArgs(f"{tmp_path}/dice.py:Dice"), reward=(reward,),
                           reward_args=RewardArgs(1), data_args=data.DataArgs())
    rows = [data.Row(0, "q", [5], str(tmp_path), {"kind": "plain"}, "")]
    with pytest.raises(SettingsError, match=words):
        turns.check(args, bridge().tokenizer, [END], tiny.VOCAB, rows)


def test_the_reward_of_an_environment():
    from scoring.verifiers import environment
    assert environment([said("a") | {"reward": 0.5}]) == 0.5 and environment([said("a")]) is None


# ---- the real script

ROLLS = """
import random
class Rolls:
    def __init__(self, row, seed):
        self.dice, self.sum = random.Random(seed), 0
    def reply(self, turns):
        self.sum += self.dice.randrange(1000) + len(turns[-1]["content"])
        return f"{self.sum}"
    def reward(self):
        return self.sum % 7 / 7
"""


@pytest.fixture(scope="module")
def rolls(tmp_path_factory):
    """Flags of a run, and the run on one rank."""
    folder = tmp_path_factory.mktemp("rolls")
    (folder / "rolls.py").write_text(ROLLS)
    flags = ("--reply", f"{folder}/rolls.py:Rolls", "--reward", "environment", "--max_turns", "3",
             "--max_tokens", "120")
    one = run(folder, *flags)
    assert all(row["rollout/turns_mean"] > 1.3 and row["reward/std"] > 0 for row in one.rows[1:3])
    return flags, one


@pytest.mark.slow
@pytest.mark.parametrize("ranks_each, more", [
    (2, ()), (3, ("--max_environments", "1")), (2, ("--tp", "2"))])
def test_any_layout_plays_the_same_episodes(tmp_path, rolls, ranks_each, more):
    flags, one = rolls
    same_run(run(tmp_path, *flags, *more, ranks_each=ranks_each), one)


@pytest.mark.slow
def test_killed_in_the_middle_of_episodes_and_resumed(tmp_path, rolls):
    def go(name, faults=""):
        return Attempt(tmp_path, "--model", tiny.ensure(str(ROOT / "runs")), "--name", name,
                       "--steps", "5", *rolls[0], faults=faults).end()

    status, text = go("alone")
    assert status == 0, text
    status, text = go("x", "reply:1:3:kill")
    assert status == 1 and "exitcode  : -9" in text, text
    status, text = go("x")
    assert status == 0 and "resumed from runs/x/checkpoints/step_2" in text, text
    assert differences(tmp_path / "runs/alone", tmp_path / "runs/x") == []
