"""Short instructions that a program can check, for a small chat model: rows and their reward.

    python examples/instructions.py            writes runs/instructions/train.jsonl and test.jsonl
    python grpo.py --model MODEL --data runs/instructions/train.jsonl \\
        --eval_data runs/instructions/test.jsonl --reward examples/instructions.py:follows

The idea is IFEval's (https://arxiv.org/abs/2311.07911) and Tulu 3's. Copy this file for a task of
your own: `KINDS` makes a row, `follows` grades a completion.
"""
import argparse
import json
import random
import re
import zlib
from pathlib import Path

THINGS = """apple baker bird boat book bread bridge car cat clock cloud coat cow dog door dress
farm fire fish flower forest garden girl hat hill horse house island kitchen lake lamp letter
market moon mountain mouse music ocean paint paper phone picture pilot rain river road school ship
snow song star storm street summer sun table teacher tiger train tree window winter wolf""".split()
NAMES = "Anna Ben Carl Dora Emma Frank Grace Henry Ivy Jack Kate Leo Mary Nick Olga Paul".split()


def words(rng):
    need = rng.sample(THINGS, 2)
    return "Write one sentence with the words {} and {}.".format(*need), {
        "sentences": 1, "need": need}


def short(rng):
    need, most = rng.choice(THINGS), rng.randint(10, 14)
    return f"Write one sentence about the {need}. Use at most {most} words.", {
        "sentences": 1, "need": [need], "most": most}


def lowercase(rng):
    need = rng.sample(THINGS, 2)
    shouted = " AND ".join(need).upper()
    return f"Write these words in lowercase letters: {shouted}", {"lower": need}


def first_letter(rng):
    place, letter = rng.choice(THINGS), rng.choice("AIMSTW")
    return f"You see a {place}. Write a sentence that begins with the letter {letter}.", {
        "sentences": 1, "letter": letter}


def as_json(rng):
    value = {"name": rng.choice(NAMES), "age": rng.randint(2, 99)}
    return "{name} is {age} years old. Write this as JSON with the keys name and age.".format(
        **value), {"json": value}


def arithmetic(rng):
    a, b, sign = rng.randint(0, 9), rng.randint(0, 9), rng.choice("+-")
    a, b = (max(a, b), min(a, b)) if sign == "-" else (a, b)
    return f"What is {a} {sign} {b}?", {"last": a + b if sign == "+" else a - b}


def comparison(rng):
    pair = rng.sample(range(10, 100), 2)
    return "Which number is larger, {} or {}? Begin with this number.".format(*pair), {
        "first": max(pair)}


KINDS = {"words": words, "short": short, "lowercase": lowercase,
         "first_letter": first_letter, "json": as_json, "arithmetic": arithmetic,
         "comparison": comparison}


def rows(each, seed, split):
    """`each` different rows of every kind, in turn. One prompt in five is in the split "test"."""
    rng, found = random.Random(f"{split} {seed}"), {kind: {} for kind in KINDS}
    for kind, make in KINDS.items():
        for _ in range(100 * each):  # some kinds have few prompts
            prompt, rule = make(rng)
            held_out = zlib.crc32(prompt.encode()) % 5 == 0
            if held_out == (split == "test") and len(found[kind]) < each:
                found[kind][prompt] = {"prompt": prompt, "rule": rule, "data_source": kind}
    return [row for turn in zip(*(found[kind].values() for kind in KINDS), strict=True)
            for row in turn]


def follows(completion, rule, **row):
    """1 if the completion follows the rule of its row, else 0."""
    text = completion.strip()
    numbers = re.findall("[0-9]+", text)
    if "json" in rule:  # the first object, whatever is around it
        try:
            return float(json.loads(text[text.find("{"):text.find("}") + 1]) == rule["json"])
        except (ValueError, RecursionError):
            return 0.0
    if "last" in rule:  # "4 + 5 = 9"
        return float(numbers[-1:] == [str(rule["last"])])
    if "first" in rule:  # "71 is larger than 34"
        return float(numbers[:1] == [str(rule["first"])])
    if "lower" in rule:  # in lowercase, and nowhere else in capitals
        said = [word for word in re.findall("[A-Za-z]+", text) if word.lower() in rule["lower"]]
        return float({*said} == {*rule["lower"]})
    said = {*re.findall("[a-z]+", text.lower())}
    ok = {*rule.get("need", ())} <= said and text.startswith(rule.get("letter", ""))
    parts = re.split(r"(?<=[.!?])\s+", text)  # each has three words or more, and ends in a mark
    ok &= len(parts) == rule["sentences"] and len(text.split()) <= rule.get("most", 99)
    ok &= all(part[-1:] in ".!?" and len(part.split()) >= 3 for part in parts)
    return float(ok)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    folder = Path("runs/instructions")
    folder.mkdir(parents=True, exist_ok=True)
    for split, each in (("train", 100), ("test", 20)):
        lines = [json.dumps(row) + "\n" for row in rows(each, 0, split)]
        (folder / f"{split}.jsonl").write_text("".join(lines))
        print(f"{folder / split}.jsonl: {len(lines)} rows")
