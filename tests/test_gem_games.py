"""examples/gem_games.py: GEM's own games. It needs GEM, which the project does not install: its
requirements are exact versions. `pip install --no-deps --target there gem-llm`, then
`PYTHONPATH=there pytest tests/test_gem_games.py`."""
import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from rewards import RewardArgs, Scorer
from scoring.replies import Move

ROOT = Path(__file__).resolve().parent.parent
SCRIPT, GAME = ROOT / "examples/gem_games.py", "game:GuessTheNumber-v0-easy"


def said(role, content):
    return {"role": role, "content": content}


def test_without_the_library_it_is_one_sentence(tmp_path):
    (tmp_path / "gem.py").write_text("raise ImportError")
    done = subprocess.run([sys.executable, SCRIPT, GAME], text=True, capture_output=True,
                          env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr == "examples/gem_games.py needs GEM: pip install gem-llm.\n"


def test_an_episode_is_the_librarys():
    """Each game is played here with GEM alone, and its end once more from its turns."""
    gem = pytest.importorskip("gem")
    out = subprocess.run([sys.executable, SCRIPT, GAME], text=True, capture_output=True, check=True)
    rows, rewards = [json.loads(line) for line in out.stdout.splitlines()], set()
    assert len(rows) == 200 and "between 1 and 10" in rows[0]["prompt"]
    with closing(Scorer([f"{SCRIPT}:Game"], RewardArgs(2, 60.0), "reply", homes=True)) as scorer:
        scorer.wait()
        assert scorer.methods == ["reply", "reward"]
        for i, row in enumerate(rows[:20]):
            env, turns, seen, gained = gem.make(GAME), [], [], 0.0
            env.reset(seed=row["seed"])
            for guess in ("5", "the 7", "2", "9", "3"):
                text = guess if guess.startswith("the") else f"\\boxed{{{guess}}}"
                turns = [*turns, said("assistant", text)]
                score, = scorer.score([Move(row, i, turns, seen)], homes=[i])
                assert not score.error, score.error
                theirs, gain, ended, cut, info = env.step(text)
                gained += gain
                seen = [*seen, len(turns)]
                if ended or cut:
                    break
                assert score.parts["reply"] == [said("user", f"{theirs}\n{info['suffix']}")]
                turns = [*turns, *score.parts["reply"]]
            assert score.parts["reply"] is None
            for home in i, i + 1:  # its worker, and the other one
                score, = scorer.score([Move(row, i, turns, seen, over=True)], homes=[home])
                assert not score.error and score.parts["reward"] == pytest.approx(gained)
            rewards.add(gained)
    assert len(rewards) > 1
