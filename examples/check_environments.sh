#!/usr/bin/env bash
# openenv_games.py and verifiers_env.py with the packages that they are for, outside of CI:
#
#     bash examples/check_environments.sh       # minutes, 1 GB in a temporary folder
#
# Plays games of several turns as a worker of --reply does: what is said, the rewards, the seed of a
# row, the end, a worker that is lost, and errors of the environment. The two packages need versions
# of mcp that exclude each other, so each has its own environment. The last lines are what was seen.
set -euo pipefail
PINS=(openenv==0.10.0 verifiers==0.4.0)
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
cd "$FOLDER"
export PYTHONWARNINGS=ignore PYTHONPATH=$FOLDER
for pin in "${PINS[@]}"; do
  "${PYTHON:-python3}" -m venv "venv-${pin%%=*}"
  "venv-${pin%%=*}/bin/pip" install --quiet --no-compile "$pin" 2>pip.txt ||
    { cat pip.txt >&2; exit 1; }
done

cat > number_server.py <<'END'
"""A server of OpenEnv: find a number from 1 to 15. It draws from the seed of `reset` alone."""
import random
import socket
import threading
import time

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Seen(Observation):
    text: str


class Number(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.secret, self._state = 8, State(episode_id=str(random.getrandbits(64)))

    def reset(self, seed=None, episode_id=None, **_):
        self.secret = random.Random(seed).randint(1, 15)
        self._state.step_count = 0
        return Seen(text="Find a number from 1 to 15.")

    def step(self, action, timeout_s=None, **_):
        self._state.step_count += 1
        if action.number == 0:
            raise ZeroDivisionError("a fault of the game")
        if action.number == self.secret:
            return Seen(text="yes", done=True, reward=1.0)
        text = "higher" if action.number < self.secret else "lower"
        return Seen(text=text, reward=-0.1)

    @property
    def state(self):
        return self._state


def start(port=0):
    """-> (its port, what ends it)"""
    with socket.create_server(("127.0.0.1", port)) as free:
        port = free.getsockname()[1]
    app = create_app(Number, Guess, Seen, env_name="number", max_concurrent_envs=2)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error",
                                           timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.1)
    return port, lambda: (setattr(server, "should_exit", True), thread.join())
END

cat > number_v1.py <<'END'
"""A task set of verifiers with an environment of several turns: find a number from 1 to 15."""
import verifiers.v1 as vf

__all__ = ["NumberEnv", "NumberTaskset"]


class NumberData(vf.TaskData):
    secret: int


class NumberTask(vf.Task[NumberData]):
    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 4)


class NumberConfig(vf.TasksetConfig):
    system: str | None = None


class NumberTaskset(vf.Taskset[NumberTask, NumberConfig]):
    def load(self):
        for secret in range(1, 16):
            yield NumberTask(NumberData(prompt="Find a number from 1 to 15.", secret=secret,
                                        system_prompt=self.config.system), self.config.task)


class NumberEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class NumberEnv(vf.Env[NumberEnvConfig]):
    async def run(self, task, agents):
        found = False
        async with agents.player.interaction(task) as talk:
            turn = await talk.turn()
            while not turn.terminated and not found:
                guess, secret = turn.last_reply, task.data.secret
                found = guess == str(secret)
                if guess == "0":
                    raise ZeroDivisionError("a fault of the game")
                if not found:
                    turn = await talk.turn("say a number" if not guess.isdecimal() else
                                           "higher" if int(guess) < secret else "lower")
        talk.trace.record_reward("found", float(found))
END

cat > play.py <<'END'
"""Plays the examples as a worker of --reply does."""
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(sys.argv[1])  # the project, last, as in a worker
import worker
from parts.turns import replies




def rows_of(name, given):
    done = subprocess.run([sys.executable, worker.ROOT / f"examples/{name}.py", given], text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def play(spec, row, policy, most=9, lose=None):
    """An episode -> (its turns, its reward, an error). lose: before this call its worker is lost,
    and the next one plays its turns again."""
    name, kind = spec.split(":")
    part = worker.RewardSpec(kind, 1.0, str(worker.ROOT / f"examples/{name}.py"))
    seen, turns, (loaded, _) = [], [], replies.load(part, 9.0)

    def ask(over=False):
        nonlocal loaded
        if len(seen) == lose:  # the connections of a killed process are closed
            for it in loaded[0].live.values():
                getattr(it, "close", bool)()
            loaded, _ = replies.load(part, 9.0)
        row_ = {name: it for name, it in row.items() if name != "prompt"}
        move = replies.Move(row=row_ | {"prompt": "", "answer": None}, seed=7, turns=turns,
                            seen=[*seen], over=over, pays=False)
        seen.append(len(turns))
        [[found]] = replies.score(loaded, [[move]])
        value, = found.values()
        return (None, value) if isinstance(value, str) else (value, None)

    value, error = [], None
    while value is not None and not error and len(turns) < 2 * most:
        turns.append({"role": "assistant", "content": policy([it["content"] for it in turns])})
        value, error = ask()
        turns += value or []
    value, error = (None, error) if error else ask(True)
    return [it["content"] for it in turns], value, error


def halve(turns):
    """Looks for a number from 1 to 15 by what it is told."""
    low, high = 1, 15
    for guess, told in zip(turns[::2], turns[1::2]):
        low, high = (int(guess) + 1, high) if told == "higher" else (low, int(guess) - 1)
    return str((low + high) // 2)


def says(*turns):
    return lambda so_far: turns[min(len(so_far) // 2, len(turns) - 1)]


def check(said, found, wanted):
    print(f"  {said}: {found}", flush=True)
    assert found == wanted, f"the behaviour changed: {wanted} was expected"
END

cat > play_openenv.py <<'END'
"""openenv_games.py."""
import random

import number_server
from play import check, halve, play, rows_of, says

GAME = "openenv_games:Game"
port, stop = number_server.start()
rows = rows_of("openenv_games", f"http://127.0.0.1:{port}")
check("rows", (len(rows), rows[3]["prompt"], rows[3]["field"], rows[3]["seed"]),
      (200, "Find a number from 1 to 15.", "number", 3))
secrets = [random.Random(seed).randint(1, 15) for seed in range(9)]
played = [play(GAME, row, halve) for row in rows[:9]]
check("each game ends with its seed's number", [turns[-1] for turns, *_ in played],
      [*map(str, secrets)])
check("a reward of each step", {round(worth, 9) == round(1 - 0.1 * (len(turns) // 2), 9)
                                for turns, worth, _ in played}, {True})
no = "error: this is no action"
check("no action", play(GAME, rows[0], says("?", str(secrets[0]))),
      (["?", no, str(secrets[0])], 1.0, None))
check("an action in JSON", play(GAME, rows[0] | {"field": None}, says("?", '{"number": 14}')),
      (["?", no, '{"number": 14}'], 1.0, None))
row = next(row for row, (turns, *_) in zip(rows, played) if len(turns) == 5)
first = play(GAME, row, halve)
check("a worker that is lost", [play(GAME, row, halve, lose=n) == first for n in (1, 2, 3)],
      [True] * 3)
check("no more turns", round(play(GAME, row, says("1"), most=3)[1], 9), -0.3)
turns, worth, error = play(GAME, rows[1], says("0"))
check("an error of the server", (worth, "a fault of the game" in error), (None, True))


def restarts(turns):
    """Guesses, and starts the server anew before the second guess."""
    if len(turns) == 2:
        stop()
        number_server.start(port)
    return "1"


turns, worth, error = play(GAME, rows[0], restarts)
check("another session, which the client opens in silence",
      (worth, "the session was lost" in error), (None, True))
END

cat > play_verifiers.py <<'END'
"""verifiers_env.py."""
import json
import time

from play import check, halve, play, rows_of, says

GAME = "verifiers_env:Task"
SEAT = {"harness": {"id": "verifiers_player"}, "runtime": {"type": "subprocess"}}
rows = rows_of("verifiers_env", json.dumps({"taskset": {"id": "number_v1"}, "player": SEAT}))
check("rows", (len(rows), rows[3]["prompt"], rows[3]["task"]["secret"]),
      (15, [{"role": "user", "content": "Find a number from 1 to 15."}], 4))
play(GAME, rows[0], halve)  # imports verifiers
began = time.monotonic()
played = [play(GAME, row, halve) for row in rows]
each = (time.monotonic() - began) / sum(len(turns) // 2 + 1 for turns, *_ in played)
check("a turn starts no process: it takes less than 0.3 s", each < 0.3, True)
check("each game ends with its task's number", [int(turns[-1]) for turns, *_ in played],
      [*range(1, 16)])
check("its reward, and the task's own", {worth for _, worth, _ in played}, {1.5})
check("a worker that is lost", [play(GAME, rows[0], halve, lose=n) == played[0] for n in (1, 2, 3)],
      [True] * 3)
check("no more turns", play(GAME, rows[4], says("1"), most=2)[1], 0.5)
turns, worth, error = play(GAME, rows[1], says("0"))
check("an error of the environment", (worth, "a fault of the game" in error), (None, True))
alone = {"taskset": {"id": "number_v1", "system": "Be brief."}, "id": "single-agent", "agent": SEAT}
row = rows_of("verifiers_env", json.dumps(alone))[0]
check("a system prompt", row["prompt"][0], {"role": "system", "content": "Be brief."})
check("an environment of one turn", play(GAME, row, says("1")), (["1"], 0.5, None))
both = {"taskset": {"id": "number_v1"}, "id": "user-sim", "user": SEAT, "assistant": SEAT}
turns, worth, error = play(GAME, rows[0] | {"env": both}, says("1"))
check("a second player", (worth, "has a second player" in error), (None, True))
odd = ["", " 2 ", "<think>\n1</think>\n\n2", "\u2028\ufffd\0\U0001F600",
       "<tool_call>{}</tool_call>"]
check("any turn may be said", play(GAME, rows[0], says(*odd), most=len(odd))[0][::2], odd)
END

for pin in "${PINS[@]}"; do
  name=${pin%%=*}
  "venv-$name/bin/python" --version
  "venv-$name/bin/pip" freeze | grep "^$name=="
  "venv-$name/bin/python" "play_$name.py" "$ROOT"
done

# Seen on 29 November 2026:
#   Python 3.11.7
#   openenv==0.10.0
#   rows: (200, 'Find a number from 1 to 15.', 'number', 3)
#   each game ends with its seed's number: ['14', '3', '14', '4', '4', '10', '13', '6', '4']
#   a reward of each step: {True}
#   no action: (['?', 'error: this is no action', '14'], 1.0, None)
#   an action in JSON: (['?', 'error: this is no action', '{"number": 14}'], 1.0, None)
#   a worker that is lost: [True, True, True]
#   no more turns: -0.3
#   an error of the server: (None, True)
#   another session, which the client opens in silence: (None, True)
#   Python 3.11.7
#   verifiers==0.4.0
#   rows: (15, [{'role': 'user', 'content': 'Find a number from 1 to 15.'}], 4)
#   a turn starts no process: it takes less than 0.3 s: True
#   each game ends with its task's number: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
#   its reward, and the task's own: {1.5}
#   a worker that is lost: [True, True, True]
#   no more turns: 0.5
#   an error of the environment: (None, True)
#   a system prompt: {'role': 'system', 'content': 'Be brief.'}
#   an environment of one turn: (['1'], 0.5, None)
#   a second player: (None, True)
#   any turn may be said: ['', ' 2 ', '<think>\n1</think>\n\n2', …]
