"""examples/openenv_games.py says to a server what it said when this was recorded, and makes of its
answers the same game. examples/check_environments.sh plays it, and verifiers_env.py, for real."""
import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest

from parts.turns.replies import Environments, Move
from worker import ROOT

SESSION, OTHER = {"episode_id": "5318", "step_count": 1}, {"episode_id": "7", "step_count": 1}


def seen(text, reward=None, done=False):
    return SimpleNamespace(observation={"metadata": {}, "text": text}, reward=reward, done=done,
                           metadata=None)


RESET = [("reset", {"seed": 3}, seen("Find a number from 1 to 15.")), ("state", None, SESSION)]
LOW = [("step", {"number": "1"}, seen("higher", -0.1)), ("state", None, SESSION)]
END = [("step", {"number": "4"}, seen("yes", 1.0, True)), ("state", None, SESSION)]
NONE = [("step", {"number": "?"},
         RuntimeError("Server error: Invalid message (code: VALIDATION_ERROR)"))]
FAULT = [("step", {"number": "0"},
          RuntimeError("Server error: a fault of the game (code: EXECUTION_ERROR)"))]
LOST = [("step", {"number": "1"}, seen("higher", -0.1)), ("state", None, OTHER)]
GAMES = {  # the turns: (what was said, the replies, the reward or the error)
    ("<think>4?</think> 1", "4"): (RESET + LOW + END, ["higher", None], 0.9),
    ("?", "4"): (RESET + NONE + END, ["error: this is no action", None], 1.0),
    ("1",): (RESET + LOW, ["higher"], -0.1),
    ("0",): (RESET + FAULT, [], "a fault of the game"),
    ("1", "1"): (RESET + LOW + LOST, ["higher"], "the session was lost")}


class Client:
    """OpenEnv's (0.10.0), where the server answers as it did."""
    def __init__(self, base_url):
        self.said, self.open = iter(Client.recorded), True

    def sync(self):
        return self

    def __getattr__(self, name):
        def call(argument=None, **named):
            what, wanted, answer = next(self.said)
            assert (name, argument or named or None) == (what, wanted)
            if isinstance(answer, Exception):
                raise answer
            return answer
        return call

    def close(self):
        assert next(self.said, None) is None


@pytest.mark.parametrize("turns", GAMES)
def test_a_game_of_openenv_is_played_as_it_was_recorded(turns):
    Client.recorded, replies, worth = GAMES[turns]
    openenv = ModuleType("openenv")
    openenv.GenericEnvClient = Client
    with mock.patch.dict(sys.modules, {"openenv": openenv}):
        from examples import openenv_games
    games, chat, found, seen_at = Environments(openenv_games.Game), [], [], []
    row = {"server": "http://localhost:8000", "field": "number", "seed": 3}
    asked = dict(row=row, seed=5, turns=chat, pays=False)
    try:
        for turn in turns:
            chat.append({"role": "assistant", "content": turn})
            reply = games.start([Move(**asked, seen=[*seen_at], over=False)])
            found.append(reply[0]["content"] if reply else None)
            seen_at.append(len(chat))
            chat += reply or []
        assert games.start([Move(**asked, seen=seen_at, over=True)]) == pytest.approx(worth)
    except (RuntimeError, ConnectionError) as error:
        assert worth in str(error)
    assert found == replies


def test_the_script_plays_as_a_worker_does():
    """Its play.py, with an environment that needs no package, whose worker is lost or not."""
    script = (ROOT / "examples/check_environments.sh").read_text()
    code, = re.findall(r"cat > play\.py <<'END'\n(.*?\n)END\n", script, re.S)
    code += "for n in (None, 1): print(play('doors:Doors', {}, says('7', '1'), lose=n))\n"
    code += "print(play('doors:Doors', {}, lambda so_far: 7)[1:])\n"
    done = subprocess.run([sys.executable, "-c", code, ROOT], text=True, capture_output=True)
    *played, failed = done.stdout.splitlines()
    assert played == [str((["7", "more", "1"], 0.0, None))] * 2, done.stderr
    assert "AttributeError: " in failed
