"""examples/frozen_lake.py: a move is what a turn says after its thoughts, in a whole word, and not
what it does not mean. The library is a stub: it is not of the environment."""
import random
import sys
from types import ModuleType
from unittest import mock

import pytest

MOVES = ["left", "down", "right", "up"]
OTHERS = ["support", "upright", "cleft", "downtown", "rightly", "setup", "leftover", "sup", "hmm",
          "P", "is", "at", "the", "hole", "1", "uP2", "backup_right"]
FORMS = ["{}", "{}.", "**{}**", "Move: {}", "{}!\n", "({})", "→ {}", '{{"move": "{}"}}', "{}, {}",
         r"\boxed{{{}}}", "<answer>{}</answer>", "`{}`", "I go {}, so {}"]


@pytest.fixture(scope="module")
def lake():
    """The module, whose environment keeps the moves."""
    class Environment:
        def __init__(self):
            self.moves, self.reset, self.close = [], lambda seed: None, lambda: None

        def step(self, move):
            self.moves.append(MOVES[move])
            return 1, 0.0, False, False, {}

    gymnasium, maps = ModuleType("gymnasium"), ModuleType("gymnasium.envs.toy_text.frozen_lake")
    gymnasium.make, maps.generate_random_map = lambda *_, **__: Environment(), None
    with mock.patch.dict(sys.modules, {"gymnasium": gymnasium, maps.__name__: maps}):
        from examples import frozen_lake
        yield frozen_lake


def said(rng: random.Random) -> tuple[str, str | None]:
    """A turn, and its move. None: it says none, or more than one."""
    def words(*more) -> str:
        some = [*rng.choices(OTHERS, k=rng.randrange(6)), *more]
        return rng.choice([" ", "\n", ", "]).join(rng.sample(some, len(some)))

    move = rng.choice(MOVES)
    spelled = rng.choice([move, move.upper(), move.title()])
    text, right = words(rng.choice(FORMS).format(spelled, spelled)), move
    if rng.random() < 0.2:
        text, right = rng.choice(["", words(), f"not {words(*rng.sample(MOVES, 2))}"]), None
    for _ in range(rng.randrange(3)):  # thoughts; the first tag may be in the prompt
        thought = rng.choice(["<think>", ""]) + words(*rng.sample(MOVES, rng.randrange(4)))
        text = f"{thought}</think>{rng.choice([' ', ''])}{text}"
    if rng.random() < 0.1:  # not ended
        text, right = f"{text}<think>{words(move)}", None
    return text, right


@pytest.mark.parametrize("seed", range(300))
def test_a_move_is_what_a_turn_means(seed, lake):
    text, right = said(random.Random(f"lake {seed}"))
    game = lake.Lake({"map": ["SF", "FG"]}, 0)
    reply = game.reply([{"role": "assistant", "content": text}])
    assert game.env.moves == [right] * (right is not None), text
    assert reply == ("SP\nFG" if right else "Say one of left, down, right, up.")


@pytest.mark.parametrize("text, right", [
    ("<think>not left</think>right", "right"), ("support", None), ("up", "up"),
    ("Left or right?", None), ("not left, right", None), ("<THINK>up</THINK> down", "down")])
def test_these_too(text, right, lake):
    game = lake.Lake({"map": ["SF", "FG"]}, 0)
    game.reply([{"role": "assistant", "content": text}])
    assert game.env.moves == [right] * (right is not None)
