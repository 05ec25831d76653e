"""A game in which the first of two turns decides, and the second one is noise.

    python examples/doors.py            the rows of runs/doors: train, test, and chats to learn from
    ./run.sh doors                      the base, then turn credit: docs/use/turns.md

Three digits are shown. In its first turn the player opens one of these doors, and is paid 1 at once
if it is the largest digit. Then it says many digits more, which pay nothing.
"""
import json
import random
import sys
from pathlib import Path

if __name__ == "__main__":  # Python looks in examples/ only
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

FOLDER, LATE = Path("runs/doors"), 48  # LATE: digits of the second turn


def reply(row, turns):
    """Pays for the first turn. The second one ends the game."""
    if len(turns) > 1:
        return None
    opened = turns[0]["content"].strip()
    return [{"role": "user", "content": "more", "reward": float(opened == row["answer"])}]


def opened(turns, answer, **row):
    """1 if the first turn is right: for the evaluation, and for a control that is not paid."""
    return float(turns[0]["content"].strip() == answer)


def main():
    rng = random.Random(0)
    rows = [{"question": f"Game {n}", "answer": "7"}
            for n in rng.sample(range(10000, 100000), k=480)]
    chats = []
    for _ in range(2048):  # any door, then any digits
        late = "".join(rng.choices("0123456789", k=LATE))
        said = [rng.choice(rows[80:])["question"], rng.choice("0123456789"), "more", late]
        chats.append({"messages": [{"role": ["user", "assistant"][i % 2], "content": text}
                                   for i, text in enumerate(said)]})
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, part in ("test", rows[:80]), ("train", rows[80:]), ("chats", chats):
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    main()
