"""tools/ask.py: what does the model say? k completions of one prompt, before and after training.

    python tools/ask.py runs/NAME "Sort 4312"           with the run's template, flags and script
    python tools/ask.py runs/NAME --row 3               row 3 of its held-out rows, with the reward
    python tools/ask.py runs/NAME '{"question": "Sort 4312", "answer": "1234"}' -k 2
    python tools/ask.py MODEL "Sort 4312" --max_tokens 16        flags of grpo.py

A text is the column `question` of a row; an object in JSON is a whole row. Completions of a row
with an answer have the run's --reward. Further flags replace those of the run. The run's folder
stays as it is: the evaluation is made elsewhere.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import checkpoint
import data
from answers import ANSWERS
from errors import SettingsError, command
from files import as_lines, read
from worker import ROOT, find_file

NOT_KEPT = ("target_reward target_eval keep_best stop_at tp logger wandb data eval_data eval_every "
            "eval_only model name").split()  # flags of a training, and what is given anew
NO_REWARD = "def no_reward(completion, **row):\n    return 0.0\n"


def row_of(asked, kept: dict) -> dict:
    """Returns the row to ask. SettingsError: there is none."""
    if asked.row is not None:
        spec = kept.get("eval_data") or kept.get("data")
        if not spec:
            raise SettingsError(f"--row needs a run, and {asked.model} is none.")
        rows = list(data.read(spec, 0 if kept.get("eval_data") else kept["seed"])[0])
        if not 1 <= asked.row <= len(rows):
            raise SettingsError(f"--row must be 1 to {len(rows):,}, the rows of {spec} (got "
                                f"{asked.row}).")
        return rows[asked.row - 1]
    if not asked.question:
        raise SettingsError('nothing is asked. Would work: a question in quotes, or --row 1.')
    if asked.question.lstrip().startswith("{"):
        try:
            return json.loads(asked.question)
        except ValueError as error:
            raise SettingsError(f"{asked.question} is no object in JSON ({error}).") from None
    return {"question": asked.question}


def sides_of(run: Path, kept: dict, place: Path) -> dict[str, str]:
    """Returns {"before" and "after": a model} of a run. A run that has not ended gets its newest
    checkpoint as a folder in `place`. It has no "after" if it has no checkpoint."""
    sides = {"before": kept["model"]}
    if (run / "done.json").exists() and (run / "model").exists():
        return sides | {"after": str(run / "model")}
    if checkpoint.steps(run / "checkpoints"):
        made = place / "after"
        done = subprocess.run([sys.executable, ROOT / "tools/export.py", run, "--to", made],
                              capture_output=True, text=True)
        if done.returncode:
            raise SettingsError(f"the newest checkpoint cannot be used: {done.stderr.strip()}")
        sides["after"] = str(made)
    return sides


def beside(base: Path, place: Path) -> Path:
    """Makes a folder in `place` in which all paths of a command in `base` are right, and whose
    runs/ask is new. Returns the path of runs/ask."""
    (place / "runs/ask").mkdir(parents=True)
    for folder, there in (base, place), (base / "runs", place / "runs"):
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name not in ("runs", "ask") and not (there / path.name).exists():
                (there / path.name).symlink_to(path)
    return place / "runs/ask"


def completions(model: str, row: dict, asked, kept: dict, base: Path) -> list[dict]:
    """Returns the completions of a model, as objects of samples/. SettingsError: the evaluation
    fails; its last line says why."""
    with tempfile.TemporaryDirectory(prefix="ask-") as place:
        folder = beside(base, Path(place))
        script = kept.get("script", "grpo.py")
        if not (found := find_file(script)):
            raise SettingsError(f"there is no {script} in {base}, where the run began.")
        if kept:
            (folder / "args.json").write_text(json.dumps(
                {name: value for name, value in kept.items() if name not in NOT_KEPT}))
        (Path(place) / "asked.jsonl").write_text(as_lines([row]))
        flags = ["--model", model, "--data", "asked.jsonl", "--eval_data", "asked.jsonl",
                 "--eval_only", "--eval_samples", str(asked.k), "--name", "ask"]
        temperature = asked.temperature or kept.get("temperature", 1.0)
        flags += ["--eval_temperature", str(temperature), *asked.flags]
        if not scored(row):
            (Path(place) / "no_reward.py").write_text(NO_REWARD)
            flags += ["--reward", "no_reward.py:no_reward"]
        done = subprocess.run([sys.executable, found.absolute(), *flags], cwd=place, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        samples = [*folder.rglob("samples/eval_*.jsonl")]
        if done.returncode or not samples:
            raise SettingsError(f"{model} cannot be asked:\n{done.stdout.strip()[-2000:]}")
        return read(samples[0])


def scored(row: dict) -> bool:
    """Whether the run's reward has something to compare with."""
    return any(name in row for name in ANSWERS) or len(row) > 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="runs/NAME, or what --model takes")
    parser.add_argument("question", nargs="?", help="a text, or a row in JSON")
    parser.add_argument("--row", type=int, help="the number of a row of --eval_data, or of --data")
    parser.add_argument("-k", type=int, default=4, help="completions of each model")
    parser.add_argument("--temperature", type=float, help="that of the run, or 1")
    asked, asked.flags = parser.parse_known_args()
    run = Path(asked.model).absolute()
    kept = read(run / "args.json") if (run / "args.json").exists() else {}
    base = run.parent.parent if kept and run.parent.name == "runs" else Path.cwd()
    os.chdir(base)
    row = row_of(asked, kept)
    with tempfile.TemporaryDirectory(prefix="ask-") as place:
        sides = sides_of(run, kept, Path(place)) if kept else {"model": asked.model}
        for number, (side, model) in enumerate(sides.items()):
            found = completions(model, row, asked, kept, base)
            if not number:
                print(found[0]["prompt"])
            print(f"--- {side}: {model}")
            for one in found:
                reward = "unscored" if one["reward"] is None else f"{one['reward']:g}"
                print(f"[{reward}] " * scored(row) + one["completion"], flush=True)


if __name__ == "__main__":
    command(main)
