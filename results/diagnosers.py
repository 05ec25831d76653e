"""diagnosers.py: what public packages that diagnose runs say of the runs of seen_by.py.

    python results/seen_by.py --only 48 --seeds 1   whole runs: a mistake, and as shipped
    python results/diagnosers.py                    gives all that are kept in runs/faults/metrics/
                                                    to the packages; writes into results/faults.json

Two of the newest releases in the package index read what a trainer logs. They get each run's
numbers under the names that they know, and a finding counts as in seen_by.py: not if a run of a
sound change or of the shipped code with the same flags gives it too. What they said of a run is
kept in its record, so another clone need not make the run again. Two others read no log:
reward-doctor calls a reward with its own 83 texts, and martingale records the tokens inside TRL or
verl.
"""
import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from files import read_metrics
from results.faults import FAULTS, SOUND, Fault
from results.seen_by import FILE, METRICS, as_shipped, keep, record_of, slug

FOLDER = METRICS.parent / "packages"
NAMES = {"step": "step", "reward/mean": "reward", "reward/std": "reward_std", "lr": "lr",
         "policy/entropy": "entropy", "policy/clip_frac": "clip_ratio", "policy/approx_kl": "kl",
         "grad/norm": "grad_norm", "loss/policy": "policy_loss", "eval/pass@1": "eval_score",
         "rollout/length_mean": "completions/mean_length",
         "rollout/truncated_frac": "completions/clipped_ratio"}  # ours: theirs

# Each prints a JSON list of the names of its findings. argv[1]: the log.
RLDOCTOR = """
import json, sys
from rl_doctor import diagnose, load_run
from rl_doctor.detectors.base import Severity
found = diagnose(load_run(sys.argv[1])).findings
print(json.dumps([f.detector for f in found if f.severity >= Severity.WARNING]))
"""
POLGRAD = """
import json, sys, torch
from polgrad.diagnostics import entropy_trend
rows = map(json.loads, open(sys.argv[1]))
entropy = torch.tensor([row["entropy"] for row in rows if row.get("entropy") is not None])
found = entropy_trend(entropy, window=len(entropy), generator=torch.Generator().manual_seed(0))
print(json.dumps([] if found.changepoint_index is None else ["entropy changes"]))
"""
PACKAGES = {"rldoctor==0.2.0": RLDOCTOR, "polgrad==0.2.1": POLGRAD}


def ask(package: str, log: Path) -> list[str]:
    """Its findings. "no answer": it ended with an error."""
    place = FOLDER / package
    if not place.exists():
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target",
                        str(place), package], check=True)
    done = subprocess.run([sys.executable, "-c", PACKAGES[package], str(log)], text=True,
                          env=os.environ | {"PYTHONPATH": str(place)}, capture_output=True)
    return json.loads(done.stdout) if done.returncode == 0 else ["no answer"]


def log_of(fault: Fault) -> Path | None:
    """The log of its run under their names, a row for each step. None: it was not run whole."""
    path = METRICS / f"{slug(fault)}-0.jsonl"
    if not path.exists():
        return None
    group = re.search(r"--group (\d+)", fault.flags)
    steps: dict[int, dict] = {}
    for row in read_metrics(path):
        known = {NAMES[key]: value for key, value in row.items() if key in NAMES}
        steps.setdefault(row["step"], {"group_size": int(group[1]) if group else 8}).update(known)
    log = FOLDER / "log.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("".join(json.dumps(row) + "\n" for row in steps.values()))
    return log


def findings(package: str, fault: Fault) -> set[str] | None:
    """Of its run with seed 0, from its record if they are known. None: there is no run."""
    record = record_of(fault)
    known = record.setdefault("packages", {})
    if package not in known:
        if (log := log_of(fault)) is None:
            return None
        known[package] = ask(package, log)
        keep(fault, record)
    return set(known[package])


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=form).parse_args()
    table = {}
    for package in PACKAGES:
        sound = {one.name: found for one in SOUND
                 if (found := findings(package, one)) is not None}
        noise, seen, runs = set().union(*sound.values()), {}, 0
        for one in FAULTS.values():
            found = findings(package, one) if one not in SOUND else None
            if found is not None:
                runs += 1
                also = findings(package, as_shipped(one)) or set()
                if found := sorted(found - noise - also):
                    seen[one.name] = found
        if not runs:
            sys.exit("error: no run is known: python results/seen_by.py --seeds 1 makes them")
        table[package] = {"runs": runs, "seen": seen, "sound runs": len(sound),
                          "reported of these": {k: sorted(v) for k, v in sound.items() if v}}
        print(f"{package}: {len(seen)} of {runs} mistakes seen; reported "
              f"{len(table[package]['reported of these'])} of {len(sound)} sound changes")
    FILE.write_text(json.dumps(json.loads(FILE.read_text()) | {"diagnosers": table}, indent=1,
                               ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
