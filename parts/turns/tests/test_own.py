"""What an environment is handed is its own (as in tests/test_doors.py)."""
import copy

import pytest

import worker
from parts.turns import replies
from test_doors import ALL, DEEDS, SPOIL

FUNCTION = """def it(row, turns):
    value = f"{len(turns)} {len(row['deep'])}"
    given = [row, turns]
    DEED
    return value
"""
TURNS = {"function": FUNCTION, "coroutine": f"async {FUNCTION}",
         "class": "class it:\n    def __init__(self, row, seed):\n"
                  "        self.deep = len(row['deep'])\n        given = row\n        DEED\n"
                  "    def reply(self, turns):\n        value = f'{len(turns)} {self.deep}'\n"
                  "        given = turns\n        DEED\n        return value\n"}


@pytest.mark.parametrize("deed", [DEEDS["writes"], ALL.replace("os.fork() or os._exit(0); ", "")])
@pytest.mark.parametrize("door", TURNS)
def test_what_an_environment_does_with_a_turn_is_its_own_affair(tmp_path, door, deed):
    """Each call of it sees the row and the turns as they were."""
    file = tmp_path / f"env_{door}_{len(deed)}.py"  # each has its name in this process
    file.write_text(SPOIL + TURNS[door].replace("DEED", deed.format("given")))
    row = {"prompt": "p", "answer": "a", "deep": [[1], [2]]}
    move = replies.Move(row=row, seed=3, turns=[{"role": "assistant", "content": "x"}], seen=[],
                        over=False, pays=False)
    before = copy.deepcopy(move)
    loaded, _ = replies.load(worker.RewardSpec("it", 1.0, str(file)), 5.0)
    for _ in range(2):
        (found,), (other,) = replies.score(loaded, [[move], [move]])
        assert found == other and "2" in str(found) and "1 2" in str(found), found
        assert move == before
