#!/usr/bin/env bash
# OpenEnv: a step after the connection was lost.
# Expected: it raises, because the server has ended the session and its episode with it.
# So: the client opens another session in silence, and the step plays in a new environment, in which
# no reset was made.
set -euo pipefail
PINS=(openenv==0.10.0)
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
"${PYTHON:-python3}" -m venv "$FOLDER/venv"
cd "$FOLDER"
export PATH=$FOLDER/venv/bin:$PATH PYTHONWARNINGS=ignore
unset PYTHONPATH
pip install --quiet --no-compile "${PINS[@]}" 2>pip.txt || { cat pip.txt >&2; exit 1; }
python --version
pip freeze | grep -i "$(printf '^%s==\n' "${PINS[@]%%==*}")"
python - <<'END'
import socket
import threading
import time

import uvicorn
from openenv import GenericEnvClient
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Add(Action):
    number: int


class Sum(Observation):
    total: int


class Adder(Environment):
    def __init__(self):
        super().__init__()
        self.total = -100  # until a reset

    def reset(self, seed=None, episode_id=None, **_):
        self.total = 0
        return Sum(total=0)

    def step(self, action, timeout_s=None, **_):
        self.total += action.number
        return Sum(total=self.total)

    @property
    def state(self):
        return State()


def start(port):
    """-> what ends the server"""
    app = create_app(Adder, Add, Sum, env_name="adder")
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error",
                                           timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.1)
    return lambda: (setattr(server, "should_exit", True), thread.join())


with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
stop = start(port)
client = GenericEnvClient(base_url=f"http://127.0.0.1:{port}").sync()
seen = [client.reset().observation["total"], client.step({"number": 1}).observation["total"]]
stop()
start(port)
seen.append(client.step({"number": 1}).observation["total"])
print(f"after reset {seen[0]}, after a step {seen[1]}; the server starts anew, a step: {seen[2]}")
assert seen == [0, 1, -99], "the behaviour changed"
END

# Seen on 29 November 2026:
#   Python 3.11.7
#   openenv==0.10.0
#   after reset 0, after a step 1; the server starts anew, a step: -99
