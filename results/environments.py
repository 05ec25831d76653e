"""Games of two libraries, learned by a tiny model: three seeds each, and a control.

    pip install gymnasium; pip install --no-deps gem-llm     the project does not need them itself
    python results/environments.py                           all runs: half an hour of two cores
    python results/environments.py lake --seeds 1            some of them
    python results/environments.py --page                    the page again, from environments.json

sft.py first teaches the tiny model what can be said in a game. Its lessons are games in which each
turn is drawn at random; of `guess`, two in five are of a skilled player. grpo.py then trains the
model on the game's own reward. The control, of seed 0 alone, is trained on a random reward, and the
game's is only measured. A finished run is not run again.
"""
import argparse
import json
import os
import random
import re
import runpy
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from files import finished_steps
from results.collect import machine
from tools.plot import cell, ends, run_of

HERE = Path(__file__).resolve().parent
FILE, PAGE = HERE / "environments.json", HERE / "environments.md"


def any_way(rng, skilled, turns):
    return rng.choice(["left", "down", "right", "up"])


def any_number(rng, skilled, turns):
    """Or, in a skilled player's game, the middle of the numbers that are left."""
    low, high = 1, 10
    if not skilled:
        return f"\\boxed{{{rng.randint(low, high)}}}"
    for hint, number in re.findall("(higher|lower) than (\\d+)", str(turns)):
        if hint == "higher":
            low = int(number) + 1
        else:
            high = int(number) - 1
    return f"\\boxed{{{(low + high) // 2}}}"


# file, name: of the adapter. rows: what the file takes to write its rows. say(rng, skilled, turns):
# a turn of the lessons. games: how many they have. taught: flags of sft.py. about: for the page.
Game = namedtuple("Game", "file name rows say turns games taught flags about")
GAMES = {
    "lake": Game("examples/frozen_lake.py", "Lake", [], any_way, 10, 512,
                 "--batch 32 --steps 60", "--max_prompt_tokens 240 --max_tokens 400",
                 "gymnasium's FrozenLake on maps of 4 x 4 that do not slip. A game has at most ten "
                 "moves, and is won or lost."),
    "guess": Game("examples/gem_games.py", "Game", ["game:GuessTheNumber-v0-easy"],
                  any_number, 4, 2048, "--batch 16 --steps 240",
                  "--max_prompt_tokens 900 --max_tokens 480",
                  "GEM's `game:GuessTheNumber-v0-easy`: a number from 1 to 10 in four guesses. Who "
                  "does not find it gets a reward for being near. In two lessons of five the "
                  "player was skilled, and halved the range.")}
CONTROL = ["environment:0", "examples/coin.py:coin"]
HELD_OUT, SKILLED = 50, 0.4
TEXT = """# Environments of libraries, learned

`python results/environments.py` <!-- walk: not typed: hours --> makes this page; its head tells
what is run. Numbers are the mean over the seeds (lowest to highest). Of each held-out row four
games are sampled, as in training.

"""


def make_rows(game: Game, folder: Path) -> None:
    """train.jsonl and test.jsonl; chats.jsonl: the lessons of sft.py."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = subprocess.run([sys.executable, game.file, *game.rows], text=True, check=True,
                           stdout=subprocess.PIPE).stdout.splitlines()
    rows, rng = [json.loads(line) for line in lines], random.Random(0)
    adapter, chats = runpy.run_path(game.file)[game.name], []
    for seed in range(game.games):
        row, skilled = rng.choice(rows[HELD_OUT:]), random.Random(seed).random() < SKILLED
        chats.append({"messages": play(adapter(row, seed), row["prompt"], game, rng, skilled)})
    for name, part in (("test", rows[:HELD_OUT]), ("train", rows[HELD_OUT:]), ("chats", chats)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def play(env, prompt: str, game: Game, rng, skilled: bool) -> list[dict]:
    """A game's messages."""
    messages = [{"role": "user", "content": prompt}]
    for _ in range(game.turns):
        messages.append({"role": "assistant", "content": game.say(rng, skilled, messages[1:])})
        reply = env.reply(messages[1:])
        if reply is None:
            break
        messages.append({"role": "user", "content": reply})
    return messages if messages[-1]["role"] == "assistant" else messages[:-1]


def run(name: str, script: str, flags: list[str]) -> Path:
    """One run, or what it left if it is finished → its folder."""
    if not finished_steps(Path("runs", name)):
        command = [Path(sys.executable).with_name("torchrun"), "--nproc_per_node", "2",
                   f"{script}.py", "--name", name, *flags]
        print(*command, flush=True)
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return Path("runs", name)


def learn(key: str, seed: int, kept: dict, steps: int) -> None:
    """The runs of one game and seed. The base is the same for all seeds."""
    game, data = GAMES[key], Path("runs", f"env-{key}")
    base = run(f"env-{key}-base", "parts/sft/sft", [
        "--data", f"{data}/chats.jsonl", *game.taught.split(), "--lr", "1e-3",
        "--warmup_steps", "5", "--save_every", "0", *game.flags.split()])
    kinds = {"learned": ["environment"]} | ({"control": CONTROL} if seed == 0 else {})
    for kind, reward in kinds.items():
        made = run(f"env-{key}-{kind}-{seed}", "grpo", [
            "--steps", str(steps), "--model", f"{base}/model", "--data", f"{data}/train.jsonl",
            "--eval_data", f"{data}/test.jsonl", "--reply", f"{game.file}:{game.name}",
            "--max_turns", str(game.turns), "--batch", "16", "--group", "8",
            "--lr", "3e-4", "--warmup_steps", "5", "--save_every", "0", "--no-export",
            "--eval_temperature", "1", "--eval_samples", "4", "--seed", str(seed),
            *game.flags.split(), "--reward", *reward])
        kept.setdefault(key, {}).setdefault(kind, {})[str(seed)] = ends(
            run_of(made), "reward/environment")


def page(kept: dict) -> str:
    lines = ["| game | reward | seeds | first 3 steps | last 10 | held-out before | after |",
             "|---" * 7 + "|"]
    for key, kinds in kept["games"].items():
        for kind, seeds in kinds.items():
            columns = [cell([found[what] for found in seeds.values()]) for what in (
                "reward, first 3 steps", "last 10", "pass@1 before", "after")]
            reward = "its own" if kind == "learned" else "random"
            lines.append(f"| {key} | {reward} | {len(seeds)} | {' | '.join(columns)} |")
    about = [f"* `{key}` is `{GAMES[key].file}`: {GAMES[key].about}" for key in kept["games"]]
    return TEXT + "\n".join([*about, f"* The machine: {kept['machine']}.", "", *lines]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("games", nargs="*", metavar="GAME", help=", ".join(GAMES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    if unknown := {*args.games} - {*GAMES}:
        parser.error(f"no such game: {', '.join(unknown)}; there are {', '.join(GAMES)}")
    kept = {"machine": machine(), "games": {}}
    if FILE.exists():
        kept = json.loads(FILE.read_text())
    for key in [] if args.page else args.games or GAMES:
        make_rows(GAMES[key], Path("runs", f"env-{key}"))
        for seed in range(args.seeds):
            learn(key, seed, kept["games"], args.steps)
            FILE.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(page(kept))
    print(page(kept))


if __name__ == "__main__":
    main()
