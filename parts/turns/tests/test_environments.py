"""Environments with a state: --reply FILE.py:CLASS. The same episodes on any ranks, and after a
worker's death; that of examples/frozen_lake.py is the library's (`pip install gymnasium`: the
project does not)."""
import os
import subprocess
import sys
from contextlib import closing

import pytest

import data
import fakes
import ranks
from errors import SettingsError
from examples import tiny
from faults import Attempt, differences, metrics
from log import read
from parts.turns import turns
from parts.turns.paid import environment
from parts.turns.replies import Move
from parts.turns.turns import ReplyPool, said
from test_turns import ALONE, END, bridge, play
from tracked import ROOT

CREDIT = ROOT / "parts/turns/turn_credit.py:turn_credit"
EXAMPLES, GAME = ROOT / "examples", "game:GuessTheNumber-v0-easy"
CLASS = """
import os, random
from pathlib import Path
class Dice:
    def __init__(self, row, seed):
        self.row, self.dice, self.rolls = row, random.Random(seed), []
        Path(row["answer"], "made").open("a").write("x")
    def reply(self, turns):
        assert sum(turn["role"] == "assistant" for turn in turns) == len(self.rolls) + 1
        self.rolls.append(self.dice.randrange(10**9))
        kind, n = self.row["kind"], len(self.rolls)
        trap = Path(self.row["answer"], f"{kind}-{n}")
        if kind == "exit" and n == 2 and not trap.exists():
            trap.touch()
            os._exit(3)
        if kind == "raise" and n == 2:
            raise KeyError("no such thing")
        return None if n == 3 else f"roll {self.rolls[-1]}"
    def reward(self):
        if self.row["kind"] == "none": return None
        if self.row["kind"] == "nan": return float("nan")
        if self.row["kind"] == "count": return len(self.rolls)
        return sum(self.rolls) / 1e9
    def close(self):
        Path(self.row["answer"], "closed").open("a").write("x")
"""
KINDS = ["plain", "plain", "raise", "nan", "none", "plain"]


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "dice.py").write_text(CLASS)
    return f"{tmp_path}/dice.py:Dice"


def rolled(world, spec, kinds, folder, max_turns=4, reward="turns"):
    return play(world, spec, kinds, max_turns, 10.0, room=200, answer=str(folder),
                reward=(reward,))[1]


def seen(done):
    return [(c.ids.tolist(), c.turns, c.failed) for c in done]


def test_an_environment_keeps_its_state_gives_the_reward_and_pays_its_turns(spec, tmp_path):
    """A turn is paid what the reward grows by."""
    done = rolled(ALONE, spec, KINDS, tmp_path)
    assert [c.failed for c in done] == [kind in ("raise", "nan") for kind in KINDS]
    for kind, c in zip(KINDS, done, strict=True):
        if c.failed:
            continue
        own = [turn for turn in c.turns if turn["role"] == "assistant"]
        rolls = [int(t["content"][5:]) for t in c.turns if t["role"] == "user"]
        assert len({*rolls}) == len(rolls) == len(own) - 1
        reward, paid = c.turns[-1]["reward"], [turn["paid"] for turn in own]
        assert (reward is None) == (kind == "none") and environment(c.turns) == reward
        if kind == "plain":
            assert sum(paid) == pytest.approx(reward, abs=1e-15)
            assert paid[:len(rolls)] == pytest.approx([roll / 1e9 for roll in rolls], abs=1e-15)
            assert len(own) < 3 or sum(rolls) / 1e9 < reward  # its last roll was not put in
    made, closed = (len((tmp_path / name).read_text()) for name in ("made", "closed"))
    assert made == len(KINDS) and closed == made - 2  # what failed is not closed
    only, = rolled(ALONE, spec, ["plain"], tmp_path, reward="environment")
    assert not any("paid" in turn for turn in only.turns)


def test_an_environment_sees_the_last_allowed_turn(spec, tmp_path):
    """It decides the reward, though no turn follows."""
    done = rolled(ALONE, spec, ["count"] * 6, tmp_path, 2)
    whole = [c for c in done if not c.truncated]
    assert len(whole) > 2 and {c.turns[-1]["reward"] for c in whole} == {2}


def test_a_dead_worker_changes_no_other_episode_and_no_payment(spec, tmp_path):
    """What dies itself fails; the environments that died with it are made again."""
    kinds = ["plain", "plain", "exit", "plain", "plain", "plain"]
    whole = rolled(ALONE, spec, ["plain"] * 6, tmp_path)
    made = (tmp_path / "made").stat().st_size
    done = rolled(ALONE, spec, kinds, tmp_path)
    assert [c.failed for c in done] == [kind == "exit" for kind in kinds]
    for one, two, kind in zip(seen(whole), seen(done), kinds, strict=True):
        assert one == two or kind == "exit"
    assert (tmp_path / "made").stat().st_size > 2 * made


def layouts(world, spec, folder):
    return seen(rolled(world, spec, KINDS, folder))


def test_every_rank_has_the_same_episodes(spec, tmp_path):
    alone = seen(rolled(ALONE, spec, KINDS, tmp_path))
    (tmp_path / "made").unlink()
    assert all(found == alone for found in ranks.results(2, layouts, spec, str(tmp_path)))
    assert len((tmp_path / "made").read_text()) == len(KINDS)  # each stays on its rank


@pytest.mark.parametrize("code, reward, words", [
    (CLASS.replace("def reply", "def answer"), "exact", "needs a method reply"),
    (CLASS.replace("def reply", "async def reply"), "exact", "must be def, not async def"),
    (CLASS.replace("    def reward", "    @property\n    def reward"), "turns",
     "reply, reward and close of the class Dice must be methods"),
    (CLASS.replace("def reward", "def value"), "environment:2", "needs a class with reward"),
    (CLASS.replace("def reward", "def value"), "turns", "--reward turns needs a class with")])
def test_a_class_that_cannot_be_used_is_refused(tmp_path, code, reward, words):
    (tmp_path / "dice.py").write_text(code)
    args = fakes.args(reply=f"{tmp_path}/dice.py:Dice", reward=(reward,), reward_workers=1)
    rows = [data.Row(0, "q", [5], str(tmp_path), {"kind": "plain"}, "")]
    with pytest.raises(SettingsError, match=words):
        turns.check(args, bridge().tokenizer, [END], tiny.VOCAB, rows)


# ---- `async def`

ASYNC = """import asyncio, os
begun = 0
async def reply(turns, answer):
    global begun
    begun += 1
    if answer == "ends":
        os._exit(1)
    while answer == "all" and begun < 4:  # until all four are asked
        await asyncio.sleep(0.01)
    return str(answer)
"""


@pytest.mark.parametrize("answers, expected", [
    (["all"] * 4, ["all"] * 4), (["a", "ends", "b", "c"], ["a", None, "b", "c"])])
def test_one_worker_answers_many_at_once_and_each_alone_if_it_ends(tmp_path, answers, expected):
    (tmp_path / "waits.py").write_text(ASYNC)
    moves = [Move({"prompt": "q", "answer": answer}, i, [said("a")], []) for i, answer in
             enumerate(answers)]
    args = fakes.args(reward_workers=1, reward_timeout=20.0)
    with closing(ReplyPool([f"{tmp_path}/waits.py:reply"], args)) as pool:
        pool.wait()
        found = [answer.values[0] for answer in pool.ask(moves, homes=[*range(4)])]
    assert [it and it[0]["content"] for it in found] == expected


# ---- those of examples/

@pytest.mark.parametrize("name, module, words", [
    ("frozen_lake", "gymnasium", "gymnasium: pip install gymnasium."),
    ("gem_games", "gem", "GEM: pip install gem-llm.")])
def test_without_its_library_an_example_is_one_sentence(tmp_path, name, module, words):
    (tmp_path / f"{module}.py").write_text("raise ImportError")
    done = subprocess.run([sys.executable, EXAMPLES / f"{name}.py", GAME], text=True,
                          capture_output=True, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1 and done.stderr == f"examples/{name}.py needs {words}\n"


def test_an_episode_of_the_lake_is_the_librarys():
    """Each is played here with gymnasium alone, and its end once more in the other worker."""
    gymnasium = pytest.importorskip("gymnasium")
    grid, words, rewards = ["SFFF", "FHFH", "FFFH", "HFFG"], ["left", "down", "right", "up"], set()
    row = {"map": grid, "slippery": True}
    args = fakes.args(reward_workers=2, reward_timeout=60.0)
    with closing(ReplyPool([f"{EXAMPLES}/frozen_lake.py:Lake"], args)) as pool:
        pool.wait()
        for seed in range(20):
            env, chat, seen, over, won = gymnasium.make("FrozenLake-v1", desc=grid), [], [], 0, 0
            env.reset(seed=seed)
            while not over:
                action = [1, 2][(seed + len(seen)) % 2]  # down and right
                chat = [*chat, said(f"I go {words[action]}.")]
                found, = pool.ask([Move(row, seed, chat, seen)], homes=[seed])
                assert not found.error, found.error
                place, won, over, _, _ = env.step(action)
                seen = [*seen, len(chat)]
                assert (found.values[0] is None) == over
                for message in found.values[0] or []:
                    cells = message["content"].replace("\n", "")
                    assert cells == "".join(grid)[:place] + "P" + "".join(grid)[place + 1:]
                    chat = [*chat, message]
            for home in seed, seed + 1:
                found, = pool.ask([Move(row, seed, chat, seen, over=True)], homes=[home])
                assert not found.error and found.values[0] == won
            rewards.add(won)
        found, = pool.ask([Move(row, 99, [said("jump")], [])], homes=[0])
    assert rewards == {0, 1}
    assert found.values[0] == [{"role": "user", "content": "Say left, down, right or up."}]


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


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["environment", f"turns --advantage {CREDIT}"])
def test_killed_in_the_middle_of_episodes_and_resumed(flags, tmp_path):
    (tmp_path / "rolls.py").write_text(ROLLS)

    def go(name, faults=""):
        return Attempt(tmp_path, "--model", tiny.ensure(str(ROOT / "runs")), "--name", name,
                       "--steps", "5", "--reply", f"{tmp_path}/rolls.py:Rolls", "--reward",
                       *flags.split(), "--max_turns", "3", "--max_tokens", "120",
                       faults=faults).end()

    status, text = go("alone")
    assert status == 0, text
    status, text = go("x", "parts.turns.turns/Episodes/reply:1:3:kill")
    assert status == 1 and "exitcode  : -9" in text, text
    status, text = go("x")
    assert status == 0 and "resumed from runs/x/checkpoints/step_2" in text, text
    assert differences(tmp_path / "runs/alone", tmp_path / "runs/x") == []
    if "turns" in flags:
        kept = metrics(tmp_path / "runs/x")
        assert all(row["reward/turns"] == row["reward/mean"] for row in kept)
        rows = read(tmp_path / "runs/x/samples/step_00005.jsonl")
        assert all("paid" in turn for row in rows for turn in row["turns"][::2])
