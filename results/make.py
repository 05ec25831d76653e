"""Makes results/: runs the seeds of a result and files them away, and writes the tables.

    python results/make.py                          the tables and the curves, from the files
    python results/make.py sort-grpo --seeds 0 1 2  these runs first, by their command

A folder has result.json (command, machine, and of each seed the seconds and the exit status),
seed_N/ (args.json with the versions, and metrics.jsonl with the metrics in KEPT, to 6 digits),
curve.png, and ten samples of seed 0 from before the first update and from the end.
"""
import argparse
import json
import os
import platform
import random
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from tools import plot  # noqa: E402

COIN = "examples/coin.py:coin"
# Each job, its task's reward, and a tenth of its learning rate. Controls begin with the reward's
# weight set to 0, so that it is logged and not trained on.
JOBS = {
    "sort-grpo": ("./run.sh", "exact", "3e-5"),
    "sort-lora": ("./run.sh --lora_rank 16", "", ""),  # no controls
    "sort-experts": ("./run.sh --model tiny:experts", "exact", ""),
    "sort-ppo": ("./run.sh ppo", "exact", "3e-5"),
    "kk": ("./run.sh kk", "kk01", "1e-5"),
    "game": ("./run.sh game", "examples/guess.py:won", "3e-5"),
    "vision": ("./run.sh vision", "", ""),  # its control: README.md
    "instructions": ("./run.sh real", "examples/instructions.py:follows", "5e-6"),
    "instructions-lora": ("./run.sh real --lora_rank 16 --lr 5e-4", "", "")}
CONTROLS = {"sharpen": "--entropy_coef -0.05", "coin": COIN}


def commands() -> dict[str, str]:
    """{result: command} of the jobs and of their controls, at both learning rates."""
    found = {}
    for job, (command, reward, slow) in JOBS.items():
        found[job] = command
        if reward:
            for control, flags in CONTROLS.items():
                # An entropy bonus below 0 and no reward; or a random reward.
                without = f"{command} --reward {reward}:0 {flags}"
                found[f"{job}-{control}"] = without
                if slow:
                    found[f"{job}-{control}-slow"] = f"{without} --lr {slow}"
    return found


COMMANDS = commands()
KEPT = ("step|reward/.*|eval/(.*/)?(pass@1.*|rows)|policy/entropy|grad/norm|loss/policy|time/step|"
        "memory/peak_gb|rollout/(length_mean|truncated_frac|logprob_gap_max|tokens)")
BEGIN = "<!-- the table: written by results/make.py -->\n"


def run(name: str, seed: int) -> None:
    """One seed, by the command, and its folder."""
    command, folder = COMMANDS[name], HERE / name
    made = ROOT / f"runs/result-{name}-{seed}"
    shutil.rmtree(made, ignore_errors=True)
    print(f"{name}, seed {seed}: {command} --seed {seed}", flush=True)
    began, others = time.monotonic(), cpu_of_others()
    done = subprocess.run([*shlex.split(command), "--seed", str(seed), "--name", made.name,
                           "--no-export"], cwd=ROOT, stdout=subprocess.DEVNULL)
    seconds, others = round(time.monotonic() - began), cpu_of_others() - others
    if not (made / "done.json").exists():
        sys.exit(f"error: {command} --seed {seed} ended with status {done.returncode} and has not "
                 "finished; nothing was filed")
    out = folder / f"seed_{seed}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    shutil.copy(made / "args.json", out)
    rows = [json.loads(line) for line in (made / "metrics.jsonl").open()]
    short = [{k: float(f"{v:.6g}") if isinstance(v, float) else v
              for k, v in row.items() if re.fullmatch(KEPT, k)} for row in rows]
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in short))
    path = folder / "result.json"
    result = json.loads(path.read_text()) if path.exists() else {"seeds": {}}
    result |= {"command": command, "machine": machine()}
    result["seeds"][str(seed)] = {"seconds": seconds, "status": done.returncode,
                                  "cores used by others": round(others / seconds, 2)}
    path.write_text(json.dumps(result, indent=1) + "\n")
    if seed == 0:
        files = sorted((made / "samples").glob("eval_*")) or sorted((made / "samples").glob("*"))
        for when, file in (("before", files[0]), ("after", files[-1])):
            lines = file.read_text().splitlines()
            some = sorted(random.Random(0).sample(range(len(lines)), 10))  # the same rows
            (folder / f"{when}.jsonl").write_text("".join(lines[i] + "\n" for i in some))


def cpu_of_others() -> float:
    """Seconds of CPU of this machine that are not of the runs started here. Linux only."""
    user, nice, system, _, _, *interrupts = map(int, open("/proc/stat").readline().split()[1:9])
    mine = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
    return busy - mine.ru_utime - mine.ru_stime


def machine() -> str:
    text = Path("/proc/cpuinfo").read_text()
    model = re.search("model name\\s*: (.*)", text)
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores, {model[1] if model else platform.machine()}, " \
           f"{gigabytes:.0f} GiB"


def seeds(folder: Path) -> list[Path]:
    return sorted(folder.glob("seed_*"), key=lambda path: int(path.name.removeprefix("seed_")))


def task_reward(run: Path) -> str:
    """The metric of its first reward: a control has the task's there, with weight 0."""
    first = json.loads((run / "args.json").read_text())["reward"][0]
    return "reward/" + re.sub(":[0-9.]+$", "", first).rpartition(":")[2]  # FILE.py:NAME:WEIGHT


def table() -> str:
    """The mean over the seeds, and the lowest and the highest, of what plot.ends finds."""
    lines = []
    for name, command in COMMANDS.items():
        if not (runs := seeds(HERE / name)):
            continue
        result = json.loads((HERE / name / "result.json").read_text())
        found = []
        for one in runs:
            found.append(plot.ends(one, task_reward(one)))
        notes = [result["seeds"][one.name.removeprefix("seed_")] for one in runs]
        loaded = any(note["cores used by others"] > 0.1 for note in notes)
        columns = [plot.cell([one[key] for one in found]) for key in (
            "reward, first 3 steps", "last 10", "pass@1 before", "after")]
        passed = sum(note["status"] == 0 for note in notes)

        def metrics(key, runs=runs):
            return [[*plot.series(one, key).values()] for one in runs]

        is_control = any(f"-{control}" in name for control in CONTROLS)
        columns += ["no grade" if is_control else f"{passed} of {len(runs)}",
                    plot.cell([note["seconds"] for note in notes], 0),
                    plot.cell([np.median(steps) for steps in metrics("time/step")], 2),
                    f"{np.max(np.concatenate(metrics('memory/peak_gb'))):.2f}"]
        lines.append(" | ".join([
            f"| [{name}]({name})", f"`{command}`" + " (loaded)" * loaded, *columns]) + " |")
    return ("| result | command | reward, first 3 steps | last 10 | held-out before | after "
            "| passed its grade | seconds | of a step | GiB |\n" + "|---" * 10 + "|\n"
            + "\n".join(lines) + "\n")


def by_kind() -> str:
    """Held-out accuracy of each data source before → after, mean over the seeds, of the results
    that have several sources."""
    lines = []
    for name in COMMANDS:
        runs = seeds(HERE / name)
        keys = [key for one in runs[:1] for key in json.loads((one / "metrics.jsonl").open()
                .readline()) if re.fullmatch("eval/.*/pass@1", key)]
        if len(keys) < 2:
            continue
        head = "".join(f"| {key.split('/')[1]} " for key in keys)
        ends = [[[*plot.series(one, key).values()] for one in runs] for key in keys]
        cells = [" → ".join(f"{np.mean([curve[at] for curve in found]):.2f}" for at in (0, -1))
                 for found in ends]
        lines += [f"\n| held-out {head}|\n|---{'|---' * len(keys)}|"] * (not lines)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(COMMANDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    if unknown := {*args.names} - {*COMMANDS}:
        parser.error(f"no such result: {', '.join(unknown)}; there are {', '.join(COMMANDS)}")
    for name in args.names:
        for seed in args.seeds:
            run(name, seed)
    for name in args.names or COMMANDS:
        if runs := seeds(HERE / name):
            plot.draw([runs], HERE / name / "curve.png", (task_reward(runs[0]), "reward/coin"))
    page = HERE / "README.md"
    text, mark, _ = page.read_text().partition(BEGIN)
    page.write_text(text + mark + table() + by_kind())


if __name__ == "__main__":
    main()
