"""Five pipelines from one small base to a policy, with seeds, and their comparison.

    python results/pipelines.py --model runs/smollm2        three seeds, two runs at once: an hour
    python results/pipelines.py --pipelines sft --seeds 1   one pipeline, to try it
    python results/pipelines.py --page                      pipelines.md again, of pipelines.json

The task is a short word, reversed letter by letter: a base fails it. The pipelines:

    grpo          GRPO from the base: the control. Without a first success there is nothing to learn
    sft           supervised training on 128 right answers
    sft-long      supervised training on 800: what right answers are worth, if you have them
    sft-grpo      GRPO from the sft policy
    distill       the sft-grpo policy as the teacher of the base

A finished run is not run again: what the page needs of it is in results/pipelines.json. One that
was killed begins again, as it saves nothing on its way. With --tag=-try nothing is filed: the page
is printed.
"""
import argparse
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy as np
from scipy import stats

from files import finished_steps, is_evaluation, read_metrics
from results.collect import machine
from tools.plot import cell

HERE = Path(__file__).resolve().parent
FILE, PAGE = HERE / "pipelines.json", HERE / "pipelines.md"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPT = "Write these letters in reverse order, with spaces between them: {}"
PIPELINES = {  # name: (script, steps, its model, its teacher, its flags)
    "grpo": ("grpo", 30, "base", None, "--batch 4 --group 8 --lr 2e-5 --eval_every 10"),
    "sft": ("sft", 8, "base", None, "--batch 16 --lr 1e-4 --eval_every 8"),
    "sft-long": ("sft", 50, "base", None, "--batch 16 --lr 1e-4 --eval_every 25"),
    "sft-grpo": ("grpo", 30, "sft", None, "--batch 4 --group 8 --lr 2e-5 --eval_every 10"),
    "distill": ("distill", 15, "base", "sft-grpo",
                "--batch 4 --group 8 --lr 5e-5 --divergence reverse_kl --eval_every 5")}
SCRIPTS = {name: f"parts/{name}/{name}.py" for name in ("sft", "distill")}
BEFORE = {"grpo": [], "sft": [], "sft-long": [], "sft-grpo": ["sft"],
          "distill": ["sft", "sft-grpo"]}
COMMON = ("--reward exact --max_prompt_tokens 64 --max_tokens 12 --update_tokens 1024 "
          "--logprob_tokens 2048 --save_every 0 --warmup_steps 3").split()
TEXT = """# Five pipelines from one small base

`python results/pipelines.py --model runs/smollm2` <!-- walk: not typed: hours --> makes this page:
SmolLM2-135M-Instruct (see [README.md](README.md)) reverses 3 to 5 letters. `grpo` begins with the
base: it is the control. `sft` learns 128 right answers, `sft-long` 800 (400 rows, twice).
`sft-grpo` begins with the sft policy. `distill` begins with the base, and the sft-grpo policy
teaches it. Columns with "in all" count the pipelines before it too. Seconds are those of the
training steps, without starts and evaluations; other runs had the other core, so they compare the
pipelines only roughly. A policy is saved in the base's bfloat16, so the next pipeline begins beside
it: see "held-out before". The machine: MACHINE.

"""


# ---- runs

def make_rows(folder: Path, n: int) -> None:
    """train.jsonl, n rows, and test.jsonl, at most 100: different words of 3 to 5 letters."""
    rng, words = random.Random(0), {}
    while len(words) < n + min(n, 100):
        letters = rng.sample(LETTERS, rng.choice([3, 4, 5]))
        words[" ".join(letters)] = " ".join(reversed(letters))
    rows = [{"question": PROMPT.format(word), "answer": answer} for word, answer in words.items()]
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rows[:n]), ("test", rows[n:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def name_of(pipeline: str, seed: int, tag: str) -> str:
    return f"pipelines{tag}-{pipeline}-{seed}"


def run(pipeline: str, seed: int, args) -> dict:
    """One run, or what it left if it is finished → what is measured of it."""
    script, steps, start, teacher, flags = PIPELINES[pipeline]
    steps, name = args.steps or steps, name_of(pipeline, seed, args.tag)
    model = args.model if start == "base" else f"runs/{name_of(start, seed, args.tag)}/model"
    command = [sys.executable, SCRIPTS.get(script, f"{script}.py"), "--model", model,
               "--data", "runs/pipelines/train.jsonl", "--eval_data", "runs/pipelines/test.jsonl",
               "--steps", str(steps), "--seed", str(seed), "--name", name, *COMMON, *flags.split()]
    if teacher:
        command += ["--teacher", f"runs/{name_of(teacher, seed, args.tag)}/model"]
    if finished_steps(Path("runs", name)) < steps:
        print(*command, flush=True)
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return measured(read_metrics(Path("runs", name, "metrics.jsonl")))


def measured(rows: list[dict]) -> dict:
    """Of metrics.jsonl: held-out accuracy, with what was spent until then."""
    tokens, seconds, points = 0, 0.0, []
    for row in rows:
        if is_evaluation(row):
            points.append({"step": row["step"], "tokens": tokens, "seconds": round(seconds, 1)} | {
                key: round(row[f"eval/{name}"], 4) for key, name in (
                    ("pass", "pass@1"), ("low", "pass@1_low"), ("high", "pass@1_high"))})
        else:
            tokens += row.get("rollout/tokens", 0)
            seconds += row["time/step"]
    return {"points": points, "tokens": tokens, "seconds": round(seconds, 1)}


# ---- the page

def spent(found: dict, pipeline: str, seed: str, what: str) -> float:
    """By a pipeline and by those before it; nan if one of them is not there."""
    return sum(found.get(one, {}).get(seed, {}).get(what, np.nan)
               for one in [*BEFORE[pipeline], pipeline])


def against(found: dict, pipeline: str) -> str:
    """The last accuracy minus that of the control: 95 % of the mean over pairs of equal seeds."""
    last, control = ({seed: one["points"][-1]["pass"] for seed, one in found.get(name, {}).items()}
                     for name in (pipeline, "grpo"))
    pairs = [last[seed] - control[seed] for seed in sorted(last.keys() & control.keys())]
    if pipeline == "grpo" or len(pairs) < 2:
        return ""
    low, high = stats.ttest_1samp(pairs, 0).confidence_interval()
    return f"{np.mean(pairs):+.3f} ({low:+.3f} to {high:+.3f})"


def table(found: dict) -> str:
    """One line a pipeline: mean (lowest to highest) over the seeds."""
    lines = ["| pipeline | seeds | held-out before | after | minus the control (95 %, paired by "
             "seed) | 95 % over the rows, each seed | tokens sampled | in all | seconds | in all |",
             "|---" * 10 + "|"]
    for pipeline, runs in found.items():
        ends = [(one["points"][0]["pass"], one["points"][-1]) for one in runs.values()]
        cells = [pipeline, str(len(runs)), cell([before for before, _ in ends]),
                 cell([after["pass"] for _, after in ends]), against(found, pipeline),
                 ", ".join(f"{after['low']:.2f} to {after['high']:.2f}" for _, after in ends)]
        for what in ("tokens", "seconds"):
            cells.append(cell([one[what] for one in runs.values()], 0))
            cells.append(cell([spent(found, pipeline, seed, what) for seed in runs], 0))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def curves(found: dict) -> str:
    """One line an evaluation: the accuracy against what the pipeline itself has spent."""
    lines = ["| pipeline | step | tokens sampled | seconds | held-out |", "|---" * 5 + "|"]
    for pipeline, runs in found.items():
        for points in zip(*(one["points"] for one in runs.values()), strict=True):
            cells = [cell([p[what] for p in points], 0) for what in ("step", "tokens", "seconds")]
            cells.append(cell([p["pass"] for p in points]))
            lines.append(f"| {pipeline} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page(kept: dict) -> str:
    return TEXT.replace("MACHINE", kept["machine"]) + table(kept["pipelines"]) + "\n" \
        + curves(kept["pipelines"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/smollm2")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pipelines", nargs="+", default=[*PIPELINES], choices=[*PIPELINES])
    parser.add_argument("--steps", type=int, help="of each; not given: those of PIPELINES")
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--tag", default="", help="a part of the runs' names: --tag=-try")
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    kept = {"machine": machine(), "pipelines": {}}
    if FILE.exists() and not args.tag:
        kept = json.loads(FILE.read_text())
    if not args.page:
        make_rows(Path("runs/pipelines"), args.rows)
        # A job is a list of pipelines that need each other. Each run has one rank.
        alone = {"grpo", "sft-long"}
        lists = [[pipeline for pipeline in args.pipelines if pipeline not in alone],
                 *([pipeline] for pipeline in args.pipelines if pipeline in alone)]
        jobs = [(seed, pipelines) for pipelines in lists for seed in range(args.seeds)]
        with ThreadPoolExecutor(2) as two:
            found = two.map(lambda job: [run(pipeline, job[0], args) for pipeline in job[1]], jobs)
            for (seed, pipelines), runs in zip(jobs, found, strict=True):
                for pipeline, one in zip(pipelines, runs, strict=True):
                    kept["pipelines"].setdefault(pipeline, {})[str(seed)] = one
                if not args.tag:
                    FILE.write_text(json.dumps(kept, indent=1) + "\n")
    if not args.tag:
        PAGE.write_text(page(kept))
    print(page(kept))


if __name__ == "__main__":
    main()
