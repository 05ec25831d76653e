"""seen_by.py: which detector sees which mistake of faults.py, and at which step.

    python results/seen_by.py                       all that has no result yet: hours on a core
    python results/seen_by.py --only 21 "other seeds" --detectors plan start
    python results/seen_by.py --only 21 --seeds 5   what it costs in pass@1 and reward
    python results/seen_by.py --table               the column "seen by" of docs/learn/details.md

Each patch is put into one copy of the tracked files, and the detectors are asked in this order:

    plan     grpo.py --plan refuses it
    start    a run of three steps ends before the first: a check, or the comparison of policies
    prove    a promise of tools/prove.py falls short
    tests    a test of TESTS fails
    run      in 35 steps of the sort job a metric leaves its healthy range (parts/report), the run
             ends with an error, misses its grade, or has a warning of its report
    kills    tests/faults.py: a run that is killed 3 times ends otherwise than one that is not
    suite    a test of SUITE fails

Once one before step 1 saw it, the others are not asked (without --all), and the last two are asked
only of what no other has seen, since they take the longest. Sound changes come first: a
detector, test, promise or metric that reports one of them counts as noise for every mistake. So
does one that reports the shipped code with the flags of a mistake, for this mistake. Results are
files of runs/faults/, one for each patch; --table collects them in results/faults.json, from which
another clone goes on.
"""
import argparse
import copy
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy as np
from scipy import stats

from files import is_evaluation, read, read_metrics
from parts.report.report import curves, healthy, last_rows, warnings
from results.collect import machine
from results.faults import FAULTS, PUBLISHED, RULES, SOUND, Fault

ROOT = Path(__file__).resolve().parent.parent
KEPT, FILE, PAGE = ROOT / "runs/faults", ROOT / "results/faults.json", "docs/learn/details.md"
METRICS = KEPT / "metrics"  # of whole runs
SAVED = read(FILE).get("records", {})  # {name: record} of clones before this one
TESTS = ("losses", "left_out")  # tests/test_NAME.py: those of numbers that take seconds
SUITE = tuple("numbers ends rows run resume engine model rewards gpu dist".split())  # and minutes
STEPS, STOP = 35, 18  # of the job; where one that is resumed was stopped
SHORT = "--max_tokens 16 --max_prompt_tokens 64"
JOB = f"{SHORT} --warmup_steps 10 --samples_every 100 --no-export --no-report"
GRADED = "--eval_data tiny@test --target_reward 0.2 0.95 --target_eval 0.1 0.95"
LIMIT = 900  # seconds of a detector: what takes longer hangs
ORDER = "plan start prove tests run kills suite".split()
LAST = ("run", "kills", "suite")  # asked of what no other has seen
FLAGLESS = ("tests", "suite")  # what they say does not depend on the flags of a mistake


# ---- the copy

class Tree:
    """A copy of the tracked files, in which one patch stands at a time. Its commands are forks of
    a process that has torch and vLLM imported (tests/forked.py)."""

    def __init__(self, folder: Path):
        self.folder, self.clock, self.commit = folder, int(time.time()), commit()
        names = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, check=True,
                               capture_output=True).stdout.split("\n")
        for name in filter(None, names):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        (folder / "runs").mkdir()
        for model in (ROOT / "runs").glob("tiny-*"):  # made before
            (folder / "runs" / model.name).symlink_to(model)
        self.python = str(folder / "tests/python")
        self.environment = os.environ | {
            "PYTHON_OF_TESTS": sys.executable, "PYTHON_EXEC": self.python, "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TORCH_CPP_LOG_LEVEL": "ERROR"}

    @contextmanager
    def patched(self, fault: Fault):
        """The mistake stands in the copy."""
        path = self.folder / fault.file
        text = path.read_text()
        assert text.count(fault.old) == 1, f"{fault.name}: not once in {fault.file}"
        self.write(path, text.replace(fault.old, fault.new))
        yield
        self.write(path, text)

    def write(self, path: Path, text: str):
        """Each time has a second of its own, or Python would take an old .pyc for the file's."""
        self.clock += 1
        path.write_text(text)
        os.utime(path, (self.clock, self.clock))

    def start(self, *words: str) -> tuple[subprocess.Popen, Path]:
        """Starts a Python command → the process, and the file of what it prints."""
        out = Path(tempfile.mkstemp(dir=self.folder)[1])
        return subprocess.Popen(
            [self.python, *words], cwd=self.folder, stdout=open(out, "w"), start_new_session=True,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self.environment), out

    def script(self, fault: Fault, *words: str):
        """Starts the fault's script on its ranks."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
                    str(fault.ranks)]
        return self.start(*(torchrun if fault.ranks > 1 else []), fault.script, *words)

    def run(self, process: subprocess.Popen, out: Path, look=None) -> tuple[int | None, str]:
        """Waits → (status, what was printed). look(): asked each half second; when it is true the
        process is killed, and the status is None, as after LIMIT seconds."""
        end, status = time.monotonic() + LIMIT, None
        while (status := process.poll()) is None and time.monotonic() < end:
            if look and look():
                break
            time.sleep(0.5 if look else 0.1)
        if status is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        text = out.read_text(errors="replace")
        out.unlink()
        return status, text


# ---- the detectors: (tree, fault, its record) → signals, each [key, step, sentence]
#
# The key says whether a sound change gives the same signal; step is 0 before the first update.

def sentence(text: str) -> str:
    """The line of an error in what a command printed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line for line in lines if re.search(r"error: |Error: |Error\b.*:|exception", line)]
    return ([line for line in said if line.startswith("error: ")] or said or lines or ["hangs"]
            )[-1][:300]


def plan(tree: Tree, fault: Fault, record: dict) -> list:
    """The plan refuses it."""
    status, text = tree.run(*tree.start(fault.script, "--plan", "--ranks", str(fault.ranks),
                                        *JOB.split(), *shlex.split(fault.flags)))
    return [["plan", 0, sentence(text)]] if status else []


def start(tree: Tree, fault: Fault, record: dict) -> list:
    """A run of three steps ends before the first. What its metrics say is of `run`."""
    name = f"start-{slug(fault)}"
    status, text = tree.run(*tree.script(
        fault, "--steps", "3", "--name", name, "--save_every", "0", *JOB.split(),
        *shlex.split(fault.flags)))
    rows = [row for row in metrics_of(tree, name) if not is_evaluation(row)]
    record["first steps"] = outside(rows)
    return [["start", 0, sentence(text)]] if status != 0 and not rows else []


def prove(tree: Tree, fault: Fault, record: dict) -> list:
    """A promise falls short, or a trial fails."""
    status, text = tree.run(*tree.start("-m", "tools.prove", fault.script, "--group", "4",
                                        *SHORT.split(), *shlex.split(fault.flags)))
    found = re.findall(r"^(.+?): .+  limit \S+  (falls short.*)$", text, re.M)
    if status != 0 and not found:
        return [["prove ended", 0, sentence(text)]]
    return [[f"prove {name}", 0, f"{name} {verdict}"[:300]] for name, verdict in found]


def tests(tree: Tree, fault: Fault, record: dict, names: tuple = TESTS) -> list:
    """A test of numbers fails, or cannot be collected. The first one ends it, unless the change is
    sound. Those that a sound change fails are not run."""
    words = [] if fault in SOUND else ["-x"] + [
        f"--deselect={key.removeprefix('test ')}" for key in noise() if key.startswith("test ")]
    status, text = tree.run(*tree.start(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line", *words,
        *(f"tests/test_{name}.py" for name in names)))
    found = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - (.*))?$", text, re.M)
    if status not in (0, None) and not found:
        found = [("none ran", sentence(text))]
    if status is None:
        found = [("hangs", f"no end in {LIMIT} s")]
    return [[f"test {name}", 0, f"{name}: {why}"[:300]] for name, why in found]


def suite(tree: Tree, fault: Fault, record: dict) -> list:
    """The same of tests that start engines and runs."""
    return tests(tree, fault, record, SUITE)


def kills(tree: Tree, fault: Fault, record: dict) -> list:
    """A run that is killed and goes on differs from one that is not, or cannot go on."""
    status, text = tree.run(*tree.start(
        "tests/faults.py", "--kills", "3", "--script", fault.script.removesuffix(".py"), "--ranks",
        str(fault.ranks), *shlex.split(fault.flags)))
    found = re.search(r"^step \d+: \S+ is .* and .*$", text, re.M)
    return [["kills", 0, (found[0] if found else sentence(text))[:300]]] if status != 0 else []


def run(tree: Tree, fault: Fault, record: dict, seed: int = 0, noise: frozenset = frozenset(),
        whole: bool = False) -> list:
    """The job with its watchers. It is killed at the first signal that is no noise, unless it is
    to be `whole`. A run that is resumed is two."""
    name, found = f"run-{seed}-{slug(fault)}", []
    words = [*JOB.split(), *GRADED.split(), *shlex.split(fault.flags), "--seed", str(seed)]
    saves = str(STOP if fault.resumed else 0)
    for steps in (STOP, STEPS) if fault.resumed else (STEPS,):
        def look():
            rows = [row for row in metrics_of(tree, name) if not is_evaluation(row)]
            return not whole and {key for key, *_ in outside(rows)} - noise

        status, text = tree.run(*tree.script(fault, "--steps", str(steps), "--name", name,
                                             "--save_every", saves, *words), look)
        rows = metrics_of(tree, name)
        done = max((row["step"] for row in rows if not is_evaluation(row)), default=0)
        found = outside([row for row in rows if not is_evaluation(row)])
        missed = re.findall(r"^missed (.*)$", text, re.M)
        if missed and steps == STEPS:
            found.append(["grade", steps, f"missed {missed[0]}"])
        if status and not missed:
            found.append(["error", done, sentence(text)])
            break
        if status is None:
            if not found:
                found.append(["error", done, f"no end in {LIMIT} s"])
            break
    folder = tree.folder / "runs" / name
    if (folder / "done.json").exists():
        found += [["warning " + re.sub(r"[\d.,]+", "", said)[:20], STEPS, said[:300]]
                  for said in warnings(curves(folder), last_rows(folder))]
        record.setdefault("ends", {})[str(seed)] = ends(rows)
        METRICS.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "metrics.jsonl", METRICS / f"{slug(fault)}-{seed}.jsonl")
    return found


def metrics_of(tree: Tree, name: str) -> list[dict]:
    """The rows of a run so far."""
    return read_metrics(tree.folder / "runs" / name / "metrics.jsonl")


def outside(rows: list[dict]) -> list:
    """Where each metric first leaves its healthy range."""
    found, ranges = {}, healthy()
    for row in rows:
        for name, range_ in ranges.items():
            value, low, high = row.get(name, 0), range_["low"], range_["high"]
            bad = value is None or name in row and (
                low is not None and value < low or high is not None and value > high)
            if bad and name not in found:
                found[name] = [f"range {name}", row["step"],
                               f"{name} {value}, not {range_['words']}: {range_['means']}"]
    return [*found.values()]


def ends(rows: list[dict]) -> dict:
    """Of a whole run: the reward of its last 10 steps, and its last pass@1."""
    rewards = [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
    passed = [row["eval/pass@1"] for row in rows if is_evaluation(row)]
    return {"reward": float(np.mean(rewards[-10:])), "pass@1": passed[-1] if passed else None}


# ---- records, and what counts

def slug(fault: Fault) -> str:
    """A name for files."""
    return re.sub(r"\W+", "-", fault.name).strip("-")


def as_shipped(fault: Fault) -> Fault:
    """Nothing is changed: the shipped code with the flags of a mistake."""
    words = f"{fault.script} {fault.flags} {fault.ranks} {fault.resumed}"
    name = "as shipped " + hashlib.sha1(words.encode()).hexdigest()[:8]
    return replace(fault, name=name, new=fault.old)


def place(fault: Fault) -> Path:
    """The file of its record."""
    return KEPT / f"{slug(fault)}.json"


def record_of(fault: Fault) -> dict:
    """What is known of it: {detector: signals}, and more. A detector that is missing did not
    run."""
    if place(fault).exists():
        return read(place(fault))
    return copy.deepcopy(SAVED.get(fault.name, {"name": fault.name}))


def keep(fault: Fault, record: dict):
    """Writes its record."""
    KEPT.mkdir(parents=True, exist_ok=True)
    place(fault).write_text(json.dumps(record, indent=1) + "\n")


def ask(tree: Tree, fault: Fault, detector: str, **options):
    """Runs a detector on it, unless it ran before, and keeps what it says."""
    record = record_of(fault)
    if detector not in record:
        began = time.monotonic()
        with tree.patched(fault):
            record[detector] = globals()[detector](tree, fault, record, **options)
        said = " ".join(text for *_, text in record[detector])
        assert not re.search("(Name|Attribute|Import)Error", said), f"an old patch? {said}"
        record.setdefault("seconds", {})[detector] = round(time.monotonic() - began, 1)
        record["commit"] = tree.commit
        keep(fault, record)
        print(f"  {fault.name}: {detector} {record['seconds'][detector]:.0f} s "
              f"{record[detector][:1] or ''}", flush=True)
    return record[detector]


def commit() -> str:
    """Of the tree that is copied. A * behind it: files differ from it."""
    return subprocess.run("git describe --always --dirty=*".split(), cwd=ROOT, text=True,
                          capture_output=True).stdout.strip()


def keys(record: dict) -> set[str]:
    """Of all signals of a record."""
    return {key for name in (*ORDER, "first steps") for key, *_ in record.get(name, [])}


def noise() -> frozenset[str]:
    """What a sound change gives too."""
    return frozenset().union(*(keys(record_of(one)) for one in SOUND))


def signals(fault: Fault, record: dict, detectors=ORDER) -> list:
    """(step, detector, sentence) of what counts, the first one first. With flags of its own, only
    what the shipped code with these flags was asked for and does not give."""
    loud, other = noise(), record_of(as_shipped(fault)) if alone(fault) else {}
    asked = {*other, *FLAGLESS} if alone(fault) else {*record}
    found = [(step, ORDER.index("run" if name == "first steps" else name), said)
             for name in (*detectors, "first steps") if name in asked
             for key, step, said in record.get(name, []) if key not in loud | keys(other)]
    found.sort(key=lambda one: one[:2])  # of one detector in its own order
    return [(step, ORDER[number], said) for step, number, said in found]


def alone(fault: Fault) -> bool:
    """Whether its job is not that of the sound changes."""
    return bool(fault.flags or fault.ranks > 1 or fault.resumed or fault.script != "grpo.py")


def look_for(tree: Tree, fault: Fault, detectors: list[str], everything: bool, whole: bool):
    """Asks the detectors, the cheapest first, until one has seen it."""
    for detector in detectors:
        record = record_of(fault)
        seen = signals(fault, record, ORDER)
        if not everything and (any(step == 0 for step, *_ in seen) or seen and detector in LAST):
            return
        options = {}
        if detector == "run":  # with flags of its own it is not known yet what is noise
            options = {"noise": noise(), "whole": whole or fault in SOUND or alone(fault)}
        found = ask(tree, fault, detector, **options)
        if detector == "start":
            found = found + record_of(fault)["first steps"]
        if found and alone(fault) and detector not in FLAGLESS:
            ask(tree, as_shipped(fault), detector, **options)


# ---- what it costs

def cost(tree: Tree, fault: Fault, seeds: int):
    """Whole runs of it and of the shipped code, a seed each."""
    for one in (fault, as_shipped(fault)):
        for seed in range(seeds):
            record = record_of(one)
            if str(seed) not in record.get("ends", {}):
                with tree.patched(one):
                    found = run(tree, one, record, seed, whole=True)
                record.setdefault("ends", {}).setdefault(str(seed), {"ended": found[-1][2]}
                                                         if found else {})
                keep(one, record)


def costs(fault: Fault) -> dict:
    """{reward or pass@1: (mean, low, high)} of mistake minus shipped, paired by seed: 95 %."""
    wrong, right = (record_of(one).get("ends", {}) for one in (fault, as_shipped(fault)))
    found = {}
    for what in "reward", "pass@1":
        pairs = [wrong[seed][what] - right[seed][what] for seed in sorted(wrong.keys() & right)
                 if wrong[seed].get(what) is not None and right[seed].get(what) is not None]
        if len(pairs) > 1:
            low, high = stats.ttest_1samp(pairs, 0).confidence_interval()
            found[what] = [round(float(x), 4) for x in (np.mean(pairs), low, high)]
    return found


# ---- the column

def word(fault: Fault) -> str:
    """Of a cell: who saw it first."""
    record = record_of(fault)
    if seen := signals(fault, record):
        step, name, _ = seen[0]
        return f"step {step}" if step else {"run": "start"}.get(name, name)
    judged = record_of(as_shipped(fault)) if alone(fault) else record
    return "not" if all(name in record and (name in judged or name in FLAGLESS or not record[name])
                        for name in ORDER) else "not run"


def legend(words: dict[str, str]) -> str:
    """The paragraph of the page about the column."""
    def count(faults) -> tuple[str, int, int]:
        """Seen before the first update, of those that ran; later; by the last two."""
        found = [words[one.name] for one in faults]
        ran = [it for it in found if it != "not run"]
        late, long = (sum(it.startswith(names) for it in ran) for names in ("step", LAST))
        return f"{len(ran) - late - long - ran.count('not')} of {len(ran)}", late, long

    files = " and ".join(f"`test_{name}.py`" for name in TESTS)
    false = sum(bool(signals_of_sound(one)) for one in SOUND)
    costly = sum(len(record_of(one).get("ends", {})) >= 5 and bool(costs(one))  # others end at once
                 for one in (*RULES.values(), *PUBLISHED))
    command = "`python results/seen_by.py` <!-- walk: not typed: hours -->"
    ours, theirs = count(RULES.values()), count(PUBLISHED)
    commits = sorted({record_of(one).get("commit", "") for one in FAULTS.values()} - {""})
    said = (
        "*Seen by*: who reports it first. plan: `--plan`. start: the checks and the comparison "
        f"before step 1. prove: `./run.sh prove`. tests: {files}. step N: a metric that leaves its "
        "range in the report, an error or the grade, in 35 steps of the sort job with flags with "
        "which it acts. Asked of what none of these saw: kills, `tests/faults.py`; suite, "
        f"{len(SUITE)} longer files of tests. Of these rules {ours[0]} are seen before the first "
        f"update, {ours[1]} later, {ours[2]} by these two; of other published mistakes "
        f"{theirs[0]}, {theirs[1]} and {theirs[2]} ([list](../../results/faults.py); [sentences, "
        f"and costs over five seeds of the {costly} that train, as does the code without them]"
        "(../../results/faults.json)). "
        f"{false} of {len(SOUND)} sound changes is reported: what reports one does not count. "
        f"{others()}Made by {command.replace(' ', '~')} on {', '.join(commits)}.")
    said = textwrap.fill(said, 100, break_long_words=False, break_on_hyphens=False)
    return said.replace(command.replace(" ", "~"), command) + "\n"  # it stays in one line


def others() -> str:
    """What public packages see, by results/diagnosers.py."""
    seen = ", ".join(
        f"`{name}`{' sees' if not i else ''} {len(it['seen'])} of {it['runs']} and "
        f"{len(it['reported of these'])} of {it['sound runs']}"
        for i, (name, it) in enumerate(read(FILE).get("diagnosers", {}).items()))
    return f"Of whole runs, and of sound ones (which solve the task), {seen}. " if seen else ""


def signals_of_sound(fault: Fault) -> list:
    """All signals of a sound change."""
    return sorted(keys(record_of(fault)))


def write_table():
    """The column, the paragraph above it, and results/faults.json."""
    words = {name: word(one) for name, one in FAULTS.items()}
    text = (ROOT / PAGE).read_text()
    lines = []
    for line in text.split("\n"):
        if line.startswith("|"):
            cells = line.split("|")[1:-1]
            number = cells[0].strip()
            cells[4:-1] = [{"": " seen by ", "---": "---"}.get(number) or f" {words[number]} "]
            line = f"|{'|'.join(cells)}|"
        lines.append(line)
    text = "\n".join(lines)
    text = re.sub(r"\*Seen by\*.*?\n\n", "", text, flags=re.S)
    text = text.replace("\n## ", f"\n{legend(words)}\n## ", 1)
    (ROOT / PAGE).write_text(text)
    found = {"machine": machine(), "diagnosers": read(FILE).get("diagnosers", {}), "faults": {},
             "sound": {one.name: signals_of_sound(one) for one in SOUND},
             "records": SAVED | {record["name"]: record for path in sorted(KEPT.glob("*.json"))
                                 if (record := read(path) | {"seconds": {}})}}
    for one in (*RULES.values(), *PUBLISHED):
        first = signals(one, record_of(one))[:1]
        found["faults"][one.name] = {
            "seen by": words[one.name], "says": first[0][2] if first else None,
            "link": one.link, "kind": one.kind, "commit": record_of(one).get("commit"),
            "costs": costs(one)}
    FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAULTS, metavar="NAME", default=[])
    parser.add_argument("--detectors", nargs="+", choices=ORDER, default=ORDER)
    parser.add_argument("--all", action="store_true", help="ask on after one has seen it")
    parser.add_argument("--seeds", type=int, default=0, help="of whole runs, for the cost")
    parser.add_argument("--again", action="store_true", help="forget what is known of these")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        return write_table()
    own = sorted((*RULES.values(), *PUBLISHED), key=lambda one: not one.own)
    chosen = [FAULTS[name] for name in args.only] or [*SOUND, *own]
    known = [*chosen, *map(as_shipped, chosen)]
    for one in known if args.again else ():
        place(one).unlink(missing_ok=True)
        SAVED.pop(one.name, None)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        tree = Tree(Path(folder))
        for fault in chosen:
            look_for(tree, fault, args.detectors, args.all or fault in SOUND, bool(args.seeds))
            if args.seeds:
                cost(tree, fault, args.seeds)
            print(f"{fault.name}: {word(fault)} {costs(fault) or ''}", flush=True)


if __name__ == "__main__":
    main()
