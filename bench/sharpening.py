"""The picture of docs/use/start.md: three signals, two teachers, one seed.

    python bench/sharpening.py        # 6 runs of 60 steps on 2 ranks, about 10 minutes

A run that runs/ has already is not trained again. The task's own reward of each step goes to
bench/sharpening.json, and the picture to docs/pictures/sharpening.png.
"""
import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODELS = {"tiny:sharpen": "Teacher wrong in 40 %: greedy mostly right before",
          "tiny": "Teacher wrong in 75 %: greedy wrong before"}
SIGNALS = {"the task's reward": "--reward exact",
           "no reward, entropy pushed down": "--reward exact:0 --entropy_coef -0.05",
           "a random reward": "--reward exact:0 examples/coin.py:coin"}


def train(model: str, flags: str) -> list[float]:
    """The task's sampled reward of each step, whatever the run is trained on."""
    name = f"sharpening-{list(MODELS).index(model)}-{list(SIGNALS.values()).index(flags)}"
    if not (ROOT / "runs" / name / "done.json").exists():
        subprocess.run(["./run.sh", "--steps", "60", "--model", model, "--name", name,
                        "--eval_data", "tiny@test", "--no-export", *flags.split()], cwd=ROOT,
                       check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    lines = (ROOT / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row["reward/exact"] for row in map(json.loads, lines) if "reward/exact" in row]


def draw(found: dict, path: Path) -> None:
    from matplotlib.figure import Figure
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axis, model in zip(figure.subplots(1, 2, sharey=True), MODELS, strict=True):
        for signal in SIGNALS:
            rewards = found[model][signal]
            axis.plot(range(1, len(rewards) + 1), rewards, label=signal)
        axis.set(xlabel="step", ylim=(-0.03, 1.03))
        axis.set_title(MODELS[model], fontsize=9)
    figure.axes[0].set_ylabel("the task's sampled reward")
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    found = {model: {signal: train(model, flags) for signal, flags in SIGNALS.items()}
             for model in MODELS}
    (ROOT / "bench/sharpening.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, ROOT / "docs/pictures/sharpening.png")
