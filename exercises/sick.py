"""Makes the sick runs of exercises 9 to 13 and of docs/use/troubleshooting.md: exercises/curves/.

    python exercises/sick.py            # all, one after another, on one rank: about 15 minutes
    python exercises/sick.py stale kl   # some of them
    python exercises/sick.py --curves   # no run: only the files, of the runs in runs/

Each sick run has one mistake. It is a flag, or it is put into the shipped code of that process. A
run is runs/sick-NAME. `python docs/pictures/draw.py` draws the files.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SHORT = "--max_prompt_tokens 64 --max_tokens 16 --warmup_steps 10 --no-export --max_gap 100"
# Prompts that come again in each step, and are longer than a block of the prefix cache.
AGAIN = ("--max_tokens 128 --max_prompt_tokens 128 --warmup_steps 10 --no-export --max_gap 100 "
         "--model tiny:kk --data runs/sick-kk.jsonl --reward kk01 --batch 16 --lr 2e-4")
HACKED = "exercises/sick.py:long_answer exact:0"
RUNS = {  # name: its flags, and in `make_sick` perhaps a mistake
    "healthy": SHORT, "temperature": SHORT, "collapse": f"{AGAIN} --entropy_coef 1",
    "rate": f"{SHORT} --lr 0.01",
    "kl": f"{SHORT} --kl_loss_coef 0.3", "kl_sign": f"{SHORT} --kl_loss_coef 0.3",
    "again": AGAIN, "stale": AGAIN, "hacked": f"{SHORT} --reward {HACKED}"}
FILES = {  # in curves/: the sick run, and the healthy run beside it
    "9": ("temperature", "healthy"), "10": ("stale", "again"), "11": ("kl_sign", "kl"),
    "12": ("hacked", "healthy"), "13": ("rate", "healthy"), "collapse": ("collapse", "again")}
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
    load, sample, options = engine.load, engine.sample, engine.options

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
        engine.options = small_blocks
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
    from flags import parse
    Path("runs").mkdir(exist_ok=True)
    rows = [json.dumps(row) + "\n" for row in tiny.rows(16, 0, "kk")]
    Path("runs/sick-kk.jsonl").write_text("".join(rows))
    sys.argv = ["grpo.py", *flags(name, steps)]
    make_sick(name)
    dist.run(grpo.train, parse(grpo.Args, ""))


def write_curves(name: str, *runs: str):
    """curves/NAME.json: the metrics that both runs have, to 4 digits, one value a step."""
    rows = [[json.loads(line) for line in open(ROOT / f"runs/sick-{run}/metrics.jsonl")]
            for run in runs]
    metrics = [metric for metric in SHOWN if all(row.get(metric) is not None
                                                 for row in rows[0] + rows[1])]
    found = {which: {metric: [float(f"{row[metric]:.4g}") for row in one] for metric in metrics}
             for which, one in zip(("run", "healthy"), rows, strict=True)}
    path = ROOT / "exercises" / "curves" / f"{name}.json"
    path.write_text(json.dumps(found).replace('], "', '],\n"') + "\n")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[*RUNS], metavar="NAME")
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--here", action="store_true", help="one run, in this process")
    asked = parser.parse_args()
    if asked.here:
        return train(asked.names[0], asked.steps)
    for name in [] if asked.curves else asked.names:
        shutil.rmtree(ROOT / "runs" / f"sick-{name}", ignore_errors=True)
        subprocess.run([sys.executable, __file__, name, "--here", "--steps", str(asked.steps)],
                       cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    for name, runs in FILES.items():
        if all((ROOT / f"runs/sick-{run}").exists() for run in runs):
            write_curves(name, *runs)


if __name__ == "__main__":
    main()
