"""walk.py: types what the pages say, in a fresh clone, and compares what is printed.

    ./run.sh walk                    everything, as a reader would: hours
    ./run.sh walk --short            every run ends after two steps: minutes. CI does this
    ./run.sh walk README.md          README.md, and then these pages
    ./run.sh walk --setup            the clone makes its own .venv, as on a new machine

A page is read from the top. A block ```sh, and code within a line that begins like a command, is
typed in one bash, as it stands. A block ```text is what the ```sh block before it prints: its lines
in their order, with others between them. `...` in a line stands for anything. Numbers may differ in
the last digit, because they do so between two CPUs. A comment before a block, or right behind the
command in its line, says what else happens:

    <!-- walk: write FILE -->     the block is written to FILE
    <!-- walk: error -->          its last command must fail
    <!-- walk: plan: WHY -->      planned only: it needs a GPU, the hub or another machine
    <!-- walk: plan FLAGS: WHY -->  the same, with FLAGS in the place of what only the hub has
    <!-- walk: long: WHY -->      left out of the short walk
    <!-- walk: not typed: WHY -->

MODEL, ROWS.jsonl, MINE.py:NAME and runs/NAME are there, and … is left out. A command within a line
is typed once, however many pages have it. Two readers, each with a copy of the clone, share the
pages. One begins with README.md, and the other, once that has made the clone, by starting each
script from another folder with --help. In the short walk these two start Python as a reader does;
on the other pages a script that trains is forked from a process that has the libraries
(tests/forked.py), because their import is most of a run of two steps. The walk prints a line for
each command, and at the end what was not typed, and why.
"""
import argparse
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PAGES = ("README.md", "docs/use/start.md", "docs/use/*.md", "docs/learn/*.md",
         "docs/reference/*.md", "CONTRIBUTING.md", "exercises/README.md", "variants/README.md",
         "parts/*/README.md", "results/README.md", "results/*.md")
SHORT = 2  # steps of a run in the short walk
LIMIT = {False: 3 * 3600, True: 900}  # seconds of a block
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.S | re.M)
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:\./run\.sh|(?:\.venv/bin/)?(?:python|torchrun|pytest) .*"
                     r"(?:\.py\b|parts| -m )|source |vllm serve \S)")
TESTS = re.compile(r"pytest |\S+ -m pytest |\S+ tests/faults\.py|\./run\.sh test")
MARK = re.compile(r"<!-- walk: (.*?) -->", re.S)
NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
# What only a whole run prints.
WHOLE = re.compile(r"after (\d+) steps|of (\d+) steps|step +(\d+)/|before and after")
# In the short walk a script that trains gets --steps, as ./run.sh gives it with STEPS=2, and WARM
# has it forked; torch starts the ranks of torchrun with PYTHON_EXEC.
CAPPED = r"""
python() { capped python "$@"; }
torchrun() { capped torchrun "$@"; }
capped() {
  local script='(^|[ /])(my_)?(grpo|ppo|sft|distill)\.py'
  local ends='--(plan|help|metrics|eval_only|steps)'
  if [[ $* =~ $script && ! $* =~ $ends ]]; then set -- "$@" --steps "$STEPS"; fi
  if [[ $1 = python && $* =~ $script ]]; then set -- "${PYTHON_EXEC:-python}" "${@:2}"; fi
  command "$@"
}
"""
WARM = "source .venv/bin/activate\nexport PYTHON_EXEC=$PWD/tests/python\n"


HAS = r"""
cat > MINE.py <<'END'
def NAME(completion, answer, **row):
    return float(completion.strip() == answer)
END
for n in 3 1 4; do echo '{"prompt": "Sort '$n'20", "answer": "02'$n'"}'; done > ROWS.jsonl
.venv/bin/python grpo.py --name NAME --steps 2 --batch 4 --max_tokens 8 --max_prompt_tokens 32
ln -s runs/NAME/model MODEL
"""


# ---- pages

@dataclass
class Block:
    """What a reader meets: commands to type, or the text that the ones before print."""
    page: str
    line: int
    kind: str  # sh: commands. text: what they print. file: to be written. word: within a line
    text: str
    mark: str = ""  # of its comment: error, plan, long, not typed, write, with what follows

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def why(self) -> str:
        return self.mark.partition(": ")[2]


def blocks(page: str, text: str) -> list[Block]:
    """The blocks of a page, from the top. ValueError: one does not say what it is."""
    found, done, last = [], 0, ""
    for fence in [*FENCE.finditer(text), None]:
        between = text[done:fence.start() if fence else len(text)]
        for code in re.finditer(r"`([^`]+)`", between):
            words = " ".join(code[1].split()).removesuffix(" …")
            if COMMAND.match(words):
                line = text.count("\n", 0, done + code.start()) + 1
                mark = MARK.match(between[code.end():].lstrip())
                found.append(Block(page, line, "word", words, mark[1] if mark else ""))
        if not fence:
            return found
        line = text.count("\n", 0, fence.start()) + 1
        marks = MARK.findall(between.rstrip().rpartition("\n\n")[2])
        mark = " ".join(marks[-1].split()) if marks and between.rstrip().endswith("-->") else ""
        kind = "file" if mark.startswith("write ") else fence[2]
        if not kind:
            raise ValueError(f"{page}:{line}: a block without a language: sh, text, python, …")
        printed = kind == "text" and last in ("sh", "text")  # not what Python prints
        last = kind if printed or kind != "text" else last
        if printed or kind in ("sh", "file"):
            body = re.sub(f"^{fence[1]}", "", fence[3], flags=re.M)
            found.append(Block(page, line, kind, body, mark))
        done = fence.end()


def planned(command: str, flags: str) -> str:
    """A command that trains, as one that plans: `python SCRIPT FLAGS --plan`, for its ranks."""
    size = 1
    for name in "nnodes", "nproc_per_node":
        size *= int((re.findall(rf"--{name}[ =](\d+)", command) or ["1"])[0])
    script = re.search(r"\S+\.py .*", command, re.S)[0].rstrip().partition("  #")[0]
    return f"python {script} --plan --ranks {size} {flags}"


# ---- what is printed

def as_printed(line: str, cap: int | None) -> str:
    """A line, without what differs between two runs: a run's name from the time, `of 35 steps`."""
    line = re.sub(r"(grpo|ppo|sft|distill)-\d{8}-\d{6}", r"\1-TIME", line)
    line = re.sub(r"\x1b\[[0-9;]*m", "", line)
    return " ".join((re.sub(r"(step +\d+)/\d+", r"\1", line) if cap else line).split())


def near(page: str, printed: str) -> bool:
    """Whether a printed number is the page's, up to the last digit; 4e-06 and 5e-06 are alike."""
    ours, theirs = (float(x.replace(",", "")) for x in (page, printed))
    if "e" in page:
        return (ours > 0) == (theirs > 0) and 0.1 <= abs(ours / (theirs or 1e-30)) <= 10
    digits = len(page.partition(".")[2])
    return abs(ours - theirs) <= 1.001 * {0: 0.0, 1: 0.1, 2: 0.03}.get(digits, 5 * 10**-digits)


def is_of_whole_run(line: str, cap: int | None) -> bool:
    """Whether a run that ends after `cap` steps cannot print the line."""
    found = WHOLE.search(line)
    return bool(cap and found and (not any(found.groups())
                                   or int(next(filter(None, found.groups()))) > cap))


def missing(page: str, printed: str, cap: int | None = None) -> list[str]:
    """The lines of a page's block that are not printed, in this order, each with the nearest one
    that is."""
    lines = [as_printed(line, cap) for line in printed.splitlines()]
    wrong, at = [], 0
    for line in page.splitlines():
        if not line.strip(" .") or is_of_whole_run(line, cap):
            continue
        parts = [NUMBER.split(part) for part in as_printed(line, cap).split("...")]
        # The words as they are; a number where a number is; anything for `...`.
        number = rf"({NUMBER.pattern})"
        pattern = ".*?".join(r"\s*" + number.join(map(re.escape, part)).replace(r"\ ", r"\s+")
                             for part in parts)
        numbers = NUMBER.findall(as_printed(line, cap))
        tries = [(i, match) for i, text in enumerate(lines[at:], at)
                 if (match := re.search(pattern, text))]
        right = next((i for i, match in tries
                      if all(map(near, numbers, match.groups()))), None)
        if right is None:
            near_ones = [lines[i] for i, _ in tries[:1]] or ["nothing like it"]
            wrong.append(f"the page has     {line.strip()}\n      printed:         {near_ones[0]}")
        else:
            at = right + 1
    return wrong


# ---- a terminal

class Terminal:
    """A bash in which blocks are typed one after another. It keeps its folder and variables."""

    def __init__(self, folder: Path, env: dict[str, str], first: str = ""):
        self.folder, self.env, self.first = folder, env, first
        self.start()

    def start(self):
        self.out = Path(tempfile.mkstemp()[1])
        self.bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, cwd=self.folder, env=self.env, text=True,
            start_new_session=True)
        self.bash.stdin.write("trap 'failed=$?' ERR\n" + self.first)

    def type(self, text: str, limit: float) -> tuple[int, str, float]:
        """→ (the status of the first command that failed, or 0; what is printed; seconds). A block
        that does not end is killed with all its processes, and a new bash begins."""
        block, began = self.out.with_suffix(".sh"), time.monotonic()
        block.write_text(text)
        self.bash.stdin.write(f"failed=0; . {block} > {self.out} 2>&1 < /dev/null; "
                              f"echo $? $failed\n")
        self.bash.stdin.flush()
        if select.select([self.bash.stdout], [], [], limit)[0]:
            words = (self.bash.stdout.readline() or "1 1").split()  # nothing: the block ended bash
            status = max(map(int, words))
            if self.bash.poll() is not None:
                self.start()
        else:
            os.killpg(self.bash.pid, signal.SIGKILL)
            status = 124
        printed = self.out.read_text(errors="replace")
        if status == 124:
            self.start()
        return status, printed, time.monotonic() - began

    def close(self):
        self.bash.kill()
        for path in self.out, self.out.with_suffix(".sh"):
            path.unlink(missing_ok=True)


# ---- the walk

@dataclass
class Walk:
    """What was typed, and what came of it."""
    short: bool
    terminal: Terminal
    arrived: Callable[[Path], None] = lambda clone: None  # called once there is a clone
    seen: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    untyped: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def cap(self) -> int | None:
        return SHORT if self.short else None

    def say(self, verdict: str, place: str, text: str, seconds: float = 0.0, more: str = ""):
        """Prints a line of the walk, and notes what is wrong."""
        first = " ".join(text.split())[:88]
        line = f"{verdict:5} {seconds:6.1f} s  {place}  {first}"
        print("\n".join(filter(None, [line, more])), flush=True)
        if verdict == "WRONG":
            self.wrong.append(f"{place}  {first}")

    def page(self, page: str, text: str):
        """Types a page."""
        began, printed = time.monotonic(), ""
        for block in blocks(page, text):
            how = block.mark.partition(": ")[0].split(" ")[0]
            if block.text.startswith("./run.sh walk"):
                how, block.mark = "not", "not typed: this"
            if self.short and TESTS.match(block.text):
                how, block.mark = "not", "not typed: the tests, which CI runs beside this"
            if block.kind == "file":
                self.file(block)
            elif block.kind == "text":  # None: its commands are not typed
                found = missing(block.text, printed, self.cap) if printed is not None else []
                self.say("WRONG" if found else "ok", block.place, "what it prints",
                         more="".join(f"      {one}\n" for one in found))
            elif how == "not" or how == "long" and self.short:
                first, printed = block.text.partition("\n")[0], None
                if block.text not in self.seen:
                    self.untyped.append(f"{block.place}  {first}: {block.why}")
                if how == "long":  # nor on a page that does not say so
                    self.seen.add(block.text)
            elif block.kind == "sh" or block.text not in self.seen:
                printed = self.commands(block, how)
                if "git clone" in block.text:
                    self.arrive()
        self.seconds[page] = time.monotonic() - began

    def clone(self):
        """Clones as README.md does, where that page is not walked."""
        self.terminal.type("git clone ADDRESS clone && cd clone", 60)
        self.arrive()

    def arrive(self):
        """In the clone: makes what a reader has, which commands within a line name."""
        status, said, seconds = self.terminal.type(HAS, 900)
        self.say("WRONG" if status else "ok", "clone", "MODEL, ROWS.jsonl, MINE.py, runs/NAME",
                 seconds, said if status else "")
        self.arrived(Path(self.terminal.type("pwd", 60)[1].strip()))

    def file(self, block: Block):
        """Writes the file of a block, as the page says."""
        status, said, _ = self.terminal.type(
            f"cat > {block.mark.split()[1]} <<'WALK_END'\n{block.text}WALK_END\n", 60)
        self.say("WRONG" if status else "ok", block.place, block.mark, more=said)

    def commands(self, block: Block, how: str) -> str:
        """Types the commands of a block → what they print."""
        text = block.text
        if not text.startswith("source "):
            self.seen.add(text)
        if how == "plan":
            lines = re.sub(r"\\\n *", "", text).splitlines()
            flags = block.mark.partition(": ")[0].removeprefix("plan")
            text = "\n".join(planned(line, flags) for line in lines if COMMAND.match(line))
        status, printed, seconds = self.terminal.type(text, LIMIT[self.short])
        if status and how != "error" and (needs := re.search(r"needs .*pip install \S+", printed)):
            self.untyped.append(f"{block.place}  {needs[0]}")
            return printed
        right = (status != 0) == (how == "error") and status != 124
        tail = "\n".join(f"      {line}" for line in printed.splitlines()[-25:])
        self.say("ok" if right else "WRONG", block.place, text, seconds,
                 "" if right else f"      exit status {status}\n{tail}")
        return printed


# ---- scripts

def start_scripts(walk: Walk, folder: Path):
    """Starts each file that has a `__main__` by its path, from another folder, with --help. It must
    end well, say something, and leave no file behind."""
    python = folder / Path(sys.prefix).name / "bin/python"  # of .venv, or .venv-cpu beside a GPU's
    named = subprocess.run(["git", "grep", "-l", "^if __name__ == .__main__.:", "*.py"], cwd=folder,
                           capture_output=True, text=True, check=True).stdout.split()
    scripts = [folder / name for name in named]

    def start(path: Path):
        with tempfile.TemporaryDirectory() as elsewhere:
            began = time.monotonic()
            done = subprocess.run([python, path, "--help"], cwd=elsewhere, capture_output=True,
                                  stdin=subprocess.DEVNULL, text=True, timeout=600,
                                  env=walk.terminal.env)
            left = [*Path(elsewhere).iterdir()]
            return path, done, left, time.monotonic() - began

    with ThreadPoolExecutor(2) as pool:
        for path, done, left, seconds in pool.map(start, scripts):
            name = f"python {path.relative_to(folder)} --help"
            if needs := re.search(r"needs .*pip install \S+", done.stderr):
                walk.untyped.append(f"{name}  {needs[0]}")
                continue
            right = done.returncode == 0 and done.stdout.strip() and not left
            said = "\n".join(done.stderr.splitlines()[-8:])
            walk.say("ok" if right else "WRONG", "script", name, seconds,
                     "" if right else f"      status {done.returncode}, left {left}\n{said}")


# ---- the place

def snapshot(folder: Path) -> Path:
    """A repository with the tree as it stands, edits included, for a reader to clone."""
    origin = folder / "origin"
    subprocess.run(["git", "clone", "-q", ROOT, origin], check=True)
    edits = subprocess.run(["git", "diff", "HEAD", "--binary"], cwd=ROOT, check=True,
                           capture_output=True).stdout
    if edits:
        subprocess.run(["git", "apply", "--index"], cwd=origin, input=edits, check=True)
        subprocess.run(["git", "-c", "user.name=walk", "-c", "user.email=walk@localhost", "commit",
                        "-qam", "the tree as it stands"], cwd=origin, check=True)
    return origin


def environment(folder: Path, options) -> dict[str, str]:
    """What a reader's shell has. The hub is a cache with the small files of the models for which
    pages plan."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from shapes import in_cache
    hub = in_cache(folder / "hub", *(f"Qwen/Qwen2.5-{size}-Instruct" for size in ("0.5B", "7B")))
    env = {name: value for name, value in os.environ.items()
           if name not in ("STARTED_AS", "VIRTUAL_ENV", "PYTHONPATH", "OMP_NUM_THREADS")}
    env |= hub
    if options.short:
        env["STEPS"] = str(SHORT)
    if not options.setup:  # a clone gets our environments, and in short our tiny models
        hook = folder / "template/hooks/post-checkout"
        hook.parent.mkdir(parents=True)
        kept = [*ROOT.glob(".venv*"), *(ROOT.glob("runs/tiny-*") if options.short else [])]
        hook.write_text("#!/bin/sh\nmkdir -p runs\n" + "".join(
            f"ln -s {path} {path.relative_to(ROOT)}\n" for path in kept))
        hook.chmod(0o755)
        env["GIT_TEMPLATE_DIR"] = str(folder / "template")
    return env


def main() -> int:
    """→ exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", metavar="PAGE")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--setup", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="walk-") as name:
        folder = Path(name)
        empty, origin = folder / "empty", snapshot(folder)
        empty.mkdir()
        (empty / "ADDRESS").symlink_to(origin)
        env = environment(folder, options)
        pages = dict.fromkeys(str(path.relative_to(origin)) for pattern in PAGES
                              for path in sorted(origin.glob(pattern)))
        if unknown := set(options.pages) - set(pages):
            parser.error(f"{', '.join(sorted(unknown))} is no page of the walk. Would work: "
                         f"{' '.join(pages)}")
        pages = [page for page in pages if not options.pages or page in options.pages]
        left = iter(pages)  # an iterator, so no page goes to both readers
        walk = Walk(options.short, Terminal(empty, env, CAPPED * options.short))

        def read(place: Path, scripts: bool):
            """A reader, with a clone of their own, takes page after page."""
            if scripts:
                start_scripts(walk, place)
            for page in left:
                first = WARM + CAPPED if options.short else "source .venv/bin/activate\n"
                terminal = Terminal(place, env, first)
                replace(walk, terminal=terminal).page(page, (origin / page).read_text())
                terminal.close()

        with ThreadPoolExecutor(1) as second:
            clones, reading = [], []

            def arrived(clone: Path):
                """The second reader begins, unless an environment would have to be copied."""
                clones.append(clone)
                if not options.setup:
                    place = shutil.copytree(clone, empty / "other", symlinks=True)
                    reading.append(second.submit(read, place, scripts=True))

            walk.arrived = arrived
            if pages[0] == "README.md":
                walk.page(next(left), (origin / "README.md").read_text())
            else:
                walk.clone()
            walk.terminal.close()
            read(clones[0], scripts=options.setup)
            for reader in reading:
                reader.result()
    return report(walk, time.monotonic() - began)


def report(walk: Walk, seconds: float) -> int:
    """Prints the seconds of each page, what was not typed, and whether the pages are right → exit
    status."""
    print("\nseconds a page: " + ", ".join(
        f"{page} {took:.0f}" for page, took in walk.seconds.items()))
    if walk.untyped:
        print("not typed:", *walk.untyped, sep="\n  ")
    if walk.wrong:
        print("WRONG:", *walk.wrong, sep="\n  ")
    verdict = f"BROKEN in {len(walk.wrong)} places" if walk.wrong else "holds"
    print(f"{verdict}: what the pages say is typed, runs and prints what they say "
          f"({'short, ' * walk.short}{seconds:.0f} s)")
    return int(bool(walk.wrong))


if __name__ == "__main__":
    sys.exit(main())
