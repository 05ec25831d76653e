"""The curves of docs/use/troubleshooting.md: healthy and sick runs of the tiny model.

    python bench/sick.py            # all, one after another, on one rank: about 15 minutes
    python bench/sick.py stale kl   # some of them
    python bench/sick.py --draw     # no run: only the pictures, of the runs in runs/
    python bench/sick.py --curves   # no run: only exercises/curves/, of the runs in runs/

Each sick run has one mistake. It is a flag, or it is put into the shipped code of that process. A
run is runs/sick-NAME. The pictures are docs/pictures/sick_NAME.svg. It also prints the table of
docs/use/troubleshooting.md: what each metric was in the last 5 steps of each run.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SHORT = "--max_prompt_tokens 64 --max_tokens 16 --warmup_steps 10 --no-export --max_gap 100"
# Prompts that come again in each step, and are longer than a block of the prefix cache.
AGAIN = ("--max_tokens 128 --max_prompt_tokens 128 --warmup_steps 10 --no-export --max_gap 100 "
         "--model tiny:kk --data runs/sick-kk.jsonl --reward kk01 --batch 16 --lr 2e-4")
HACKED = "bench/sick.py:long_answer exact:0"
RUNS = {  # name: its flags, and in `make_sick` perhaps a mistake
    "healthy": SHORT, "temperature": SHORT, "collapse": f"{AGAIN} --entropy_coef 1",
    "rate": f"{SHORT} --lr 0.01",
    "kl": f"{SHORT} --kl_loss_coef 0.3", "kl_sign": f"{SHORT} --kl_loss_coef 0.3",
    "again": AGAIN, "stale": AGAIN, "hacked": f"{SHORT} --reward {HACKED}"}
PICTURES = {  # of a sick run: the healthy run beside it, and metrics
    "stale": ("again", "rollout/logprob_gap_mean policy/entropy reward/mean"),
    "temperature": ("healthy", "rollout/logprob_gap_mean policy/entropy reward/mean"),
    "kl_sign": ("kl", "loss/kl grad/norm reward/mean"),
    "rate": ("healthy", "policy/entropy rollout/length_mean reward/mean"),
    "collapse": ("again", "policy/entropy grad/norm reward/mean"),
    "hacked": ("healthy", "reward/mean reward/exact rollout/length_mean")}

EXERCISES = {9: "temperature", 10: "stale", 11: "kl_sign", 12: "hacked", 13: "rate"}
SHOWN = ("reward/mean reward/exact reward/std policy/entropy policy/ratio grad/norm loss/kl "
         "rollout/logprob_gap_mean rollout/length_mean").split()


def long_answer(completion, answer, **row):
    """A reward with a hole: it counts right digits, and does not count wrong ones."""
    return sum(digit in completion for digit in answer) / len(answer)


def make_sick(name: str):
    """Puts the mistake into the shipped code of this process."""
    import grpo
    import losses
    import rollout
    engine, learn, estimate = rollout.Engine, grpo.learn, losses.kl_estimate
    load, sample, options = engine.load, engine.sample, engine.options_of_device

    def small_blocks(self, *args):
        return options(self, *args) | {"block_size": 32}  # on a CPU 128, longer than the prompts

    def without_reset(self, *args):
        self.llm.reset_prefix_cache = yes
        load(self, *args)

    def colder(self, prompts, group, temperature, *args):
        return sample(self, prompts, group, 0.5 * temperature, *args)

    def wrong_sign_of_kl(*args, **given):
        return -estimate(*args, **given)

    def wrong_sign_of_entropy(args, *others, **given):
        return learn(replace(args, entropy_coef=-args.entropy_coef), *others, **given)

    if RUNS[name] == AGAIN:
        engine.options_of_device = small_blocks
    if name == "stale":
        engine.load = without_reset
    elif name == "temperature":
        engine.sample = colder
    elif name == "kl_sign":
        losses.kl_estimate = wrong_sign_of_kl
    elif name == "collapse":
        grpo.learn = wrong_sign_of_entropy


def yes() -> bool:
    return True


def flags(name: str, steps: int) -> list[str]:
    return f"--steps {steps} --name sick-{name} {RUNS[name]}".split()


def train(name: str, steps: int):
    """In this process, on one rank."""
    import dist
    import grpo
    from examples import tiny
    from keeping.run import parse
    Path("runs").mkdir(exist_ok=True)
    rows = [json.dumps(row) + "\n" for row in tiny.rows(16, 0, "kk")]
    Path("runs/sick-kk.jsonl").write_text("".join(rows))
    sys.argv = ["grpo.py", *flags(name, steps)]
    make_sick(name)
    dist.run(grpo.train, parse(grpo.Args, ""))


def curve(name: str, metric: str) -> list:
    rows = open(ROOT / "runs" / f"sick-{name}" / "metrics.jsonl")
    return [json.loads(row).get(metric) for row in rows]


def draw(sick: str, healthy: str, metrics: list[str]):
    """docs/pictures/sick_NAME.svg, and a line of the table."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure
    rcParams |= {"svg.hashsalt": "sick", "svg.fonttype": "none", "font.size": 9}
    figure = Figure(figsize=(8.4, 2.2), layout="constrained")
    cells = []
    for axis, metric in zip(figure.subplots(1, len(metrics)), metrics, strict=True):
        for name, color, label in (healthy, "#1a7f37", "healthy"), (sick, "#cf222e", "sick"):
            values = curve(name, metric)
            if None not in values:
                axis.plot(range(1, len(values) + 1), values, color=color, label=label)
                cells.append(f"{metric} {label} {np.mean(values[-5:]):.3g}")
        axis.set_title(metric, fontsize=9)
        axis.set_xlabel("step")
    axis.legend()
    path = ROOT / "docs" / "pictures" / f"sick_{sick}.svg"
    figure.savefig(path, metadata={"Date": None})
    print(f"{sick}: {'; '.join(cells)}")


def write_curves(number: int, sick: str):
    """exercises/curves/NUMBER.json: a sick run's metrics, and those of the healthy run."""
    found = {"run": {}, "healthy": {}}
    for metric in SHOWN:
        both = curve(sick, metric), curve(PICTURES[sick][0], metric)
        if None not in both[0] + both[1]:
            for run, values in zip(found, both, strict=True):
                found[run][metric] = [float(f"{value:.4g}") for value in values]
    path = ROOT / "exercises" / "curves" / f"{number}.json"
    path.write_text(json.dumps(found).replace('], "', '],\n"') + "\n")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[*RUNS], metavar="NAME")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--here", action="store_true", help="one run, in this process")
    asked = parser.parse_args()
    if asked.here:
        return train(asked.names[0], asked.steps)
    if asked.curves:
        for number, sick in EXERCISES.items():
            write_curves(number, sick)
        return
    for name in [] if asked.draw else asked.names:
        shutil.rmtree(ROOT / "runs" / f"sick-{name}", ignore_errors=True)
        subprocess.run([sys.executable, __file__, name, "--here", "--steps", str(asked.steps)],
                       cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    for sick, (healthy, metrics) in PICTURES.items():
        if all((ROOT / "runs" / f"sick-{name}").exists() for name in (sick, healthy)):
            draw(sick, healthy, metrics.split())


if __name__ == "__main__":
    main()
