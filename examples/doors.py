"""A game in which the first of two turns decides, and the second one is noise.

    python examples/doors.py            writes runs/doors: train.jsonl, test.jsonl, chats.jsonl
    ./run.sh doors                      learns it with turn credit: parts/turns/

There are ten doors, and the prize is always behind the same one. The player opens a door in its
first turn, and is paid at once. Then it says many digits, which pay nothing. `chats` are games in
which each digit is drawn at random: sft.py learns from them what can be said.
"""
import argparse
import json
import random
from pathlib import Path

FOLDER, DIGITS = Path("runs/doors"), "0123456789"
PRIZE, LATE = "7", 32  # LATE: digits of the second turn


class Doors:
    def __init__(self, row, seed):
        self.answer, self.won = row["answer"], 0.0

    def reply(self, turns):
        """The second turn ends the game."""
        if len(turns) > 1:
            return None
        self.won = float(turns[0]["content"].strip() == self.answer)
        return "more"

    def reward(self):
        """It grows in the first turn alone."""
        return self.won


def main():
    rng = random.Random(0)
    rows = [{"question": f"Game {n}", "answer": PRIZE}
            for n in rng.sample(range(10_000, 100_000), k=480)]
    chats = []
    for _ in range(2048):
        late = "".join(rng.choices(DIGITS, k=LATE))
        said = [rng.choice(rows[80:])["question"], rng.choice(DIGITS), "more", late]
        chats.append({"messages": [{"role": ["user", "assistant"][i % 2], "content": text}
                                   for i, text in enumerate(said)]})
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, part in ("test", rows[:80]), ("train", rows[80:]), ("chats", chats):
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    main()
