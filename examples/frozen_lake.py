"""An environment of a library: gymnasium's FrozenLake as text. `pip install gymnasium`.

    python examples/frozen_lake.py > lake.jsonl            # 300 different maps of 4 x 4
    python grpo.py --data lake.jsonl --reply examples/frozen_lake.py:Lake --reward environment

`Lake` is an adapter between `reset`, `step` and parts/turns/. Copy it for another environment:
one whose steps depend on its seed and the actions alone can be played again. A row with "slippery":
true is the game as gymnasium has it, where only one move in three goes where the player says.
"""
import argparse
import json
import re

try:
    import gymnasium
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map
except ImportError:
    raise SystemExit("examples/frozen_lake.py needs gymnasium: pip install gymnasium.") from None

MOVES = ["left", "down", "right", "up"]  # by their numbers in gymnasium
RULES = """You are P on a lake of ice. Reach G. F is ice, and H is a hole that ends the game.
Each turn, say one of left, down, right, up.

{}"""


class Lake:
    def __init__(self, row, seed):
        self.map, self.won = row["map"], 0.0
        self.env = gymnasium.make("FrozenLake-v1", desc=self.map,
                                  is_slippery=row.get("slippery", False))
        self.env.reset(seed=seed % 2**31)

    def reply(self, turns):
        """What the player sees after the move of its turn."""
        move = move_in(turns[-1]["content"])
        if move is None:
            return "Say one of left, down, right, up."
        place, reward, fell_or_won, out_of_time, _ = self.env.step(MOVES.index(move))
        self.won = float(reward)
        return None if fell_or_won or out_of_time else shown(self.map, int(place))

    def reward(self):
        """1 if the goal was reached."""
        return self.won

    def close(self):
        self.env.close()


def move_in(text):
    """The one direction that a turn names after its thoughts. None: it names none or several, such
    as "not left, right", or its thoughts have no end."""
    said = text.lower().rpartition("</think>")[2].partition("<think>")
    named = {*re.findall(rf"\b({'|'.join(MOVES)})\b", said[0])}
    return named.pop() if len(named) == 1 and not said[1] else None


def shown(rows, place):
    cells = "".join(rows)
    cells = cells[:place] + "P" + cells[place + 1:]
    return "\n".join(cells[i:i + len(rows)] for i in range(0, len(cells), len(rows)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    maps = [generate_random_map(size=4, seed=seed) for seed in range(2000)]  # some are equal
    for lake in list({str(lake): lake for lake in maps}.values())[:300]:
        print(json.dumps({"prompt": RULES.format(shown(lake, 0)), "map": lake}))
