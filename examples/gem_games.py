"""Games of GEM, a library of text environments: guessing, mastermind, wordle, sudoku, hanoi, …

    pip install --no-deps gem-llm          # its word games need nltk too
    python examples/gem_games.py game:GuessTheNumber-v0-easy > guess.jsonl
    python grpo.py --data guess.jsonl --reply examples/gem_games.py:Game --reward environment

https://github.com/axon-rl/gem. `python -c "import gem; gem.print_envs()"` prints the names. A row
has its own seed, so all completions of a prompt play the same game. GEM draws from one generator
for all of its games: those that draw in a step, such as 2048, break the contract of
parts/turns/.
"""
import argparse
import json

ROWS = 200


def make(name, seed):
    """GEM's environment after its reset, and what it says first."""
    try:
        import gem
    except ImportError:
        raise SystemExit(
            "examples/gem_games.py needs GEM: pip install --no-deps gem-llm.") from None
    env = gem.make(name)
    said, info = env.reset(seed=seed)
    return env, f"{said}\n{info.get('suffix', '')}".strip()


class Game:
    def __init__(self, row, seed):
        self.env, _ = make(row["game"], row["seed"])
        self.gained = 0.0

    def reply(self, turns):
        """What the game says. None: it is over."""
        said, gained, terminated, truncated, info = self.env.step(turns[-1]["content"])
        self.gained += float(gained)
        if terminated or truncated:
            return None
        return f"{said}\n{info.get('suffix', '')}".strip() or "Go on."

    def reward(self):
        """The sum over the turns."""
        return self.gained


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game", help="such as game:GuessTheNumber-v0-easy")
    game = parser.parse_args().game
    for seed in range(ROWS):
        _, said = make(game, seed)
        print(json.dumps({"prompt": said, "game": game, "seed": seed}))
