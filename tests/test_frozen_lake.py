"""examples/frozen_lake.py: the library's own steps, as text. It needs gymnasium, which the project
does not install. An environment of its own is enough: `pip install gymnasium pytest`, then
`pytest --noconftest tests/test_frozen_lake.py`."""
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rewards import RewardArgs, Scorer  # noqa: E402
from scoring.replies import Move  # noqa: E402

SPEC = f"{ROOT}/examples/frozen_lake.py:Lake"
MAP = ["SFFF", "FHFH", "FFFH", "HFFG"]
ROW = {"map": MAP, "slippery": True}
WORDS = ["left", "down", "right", "up"]


def said(role, content):
    return {"role": role, "content": content}


def test_without_the_library_it_is_one_sentence(tmp_path):
    (tmp_path / "gymnasium.py").write_text("raise ImportError")
    done = subprocess.run([sys.executable, ROOT / "examples/frozen_lake.py"], text=True,
                          capture_output=True, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1 and done.stderr == (
        "examples/frozen_lake.py needs gymnasium: pip install gymnasium.\n")


def test_an_episode_is_the_librarys(tmp_path):
    """Each episode is played here with gymnasium alone, and its end once more from its turns."""
    gymnasium = pytest.importorskip("gymnasium")
    with closing(Scorer([SPEC], RewardArgs(2, 60.0), "reply", homes=True)) as scorer:
        scorer.wait()
        assert scorer.methods == ["reply", "reward", "close"]
        results = []
        for seed in range(30):
            env, turns, seen, ended = gymnasium.make("FrozenLake-v1", desc=MAP), [], [], False
            env.reset(seed=seed)
            won = 0.0
            for n in range(20):
                action = [1, 2][(seed + n) % 2]  # down and right
                turns.append(said("assistant", f"I go {WORDS[action]}."))
                move = Move(ROW, seed, turns, seen)
                score, = scorer.score([move], homes=[seed])
                assert not score.error, score.error
                place, won, ended, _, _ = env.step(action)
                seen = [*seen, len(turns)]
                if ended:
                    assert score.parts["reply"] is None
                    break
                (message,) = score.parts["reply"]
                cells = message["content"].replace("\n", "")
                assert cells.index("P") == place and len(cells) == 16
                assert cells.replace("P", "") == "".join(MAP)[:place] + "".join(MAP)[place + 1:]
                turns = [*turns, message]
            for home in seed, seed + 1:  # its worker, and the other one
                over = Move(ROW, seed, turns, seen, over=True)
                score, = scorer.score([over], homes=[home])
                assert not score.error and score.parts["reward"] == won
            results.append((ended, won))
    assert {(True, 1.0), (True, 0.0)} <= {*results}


def test_its_rows_and_what_is_no_move():
    pytest.importorskip("gymnasium")
    out = subprocess.run([sys.executable, ROOT / "examples/frozen_lake.py"], text=True,
                         capture_output=True, check=True).stdout
    rows = [json.loads(line) for line in out.splitlines()]
    assert len(rows) == len({*map(str, rows)}) == 300
    assert rows[0]["prompt"].endswith("\n".join(rows[0]["map"]).replace("S", "P"))
    with closing(Scorer([SPEC], RewardArgs(1, 60.0), "reply", homes=True)) as scorer:
        scorer.wait()
        score, = scorer.score([Move(rows[0], 0, [said("assistant", "jump")], [])], homes=[0])
    assert score.parts["reply"] == [said("user", "Say left, down, right or up.")]
