"""./run.sh strip NAME …: deletes parts from the checkout where it stands.

    ./run.sh strip lora carry      # asks, then deletes parts/lora/, parts/carry/ and their seams
    ./run.sh strip --all --yes     # all of them, without a question: the core is left
    ./run.sh strip --list          # lines and bytes of each part and of the core

parts/seams.py has what a part has outside its folder. Nothing is written before all is checked.
"""
import ast
import fnmatch
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from parts import pages  # noqa: E402

Files = dict[str, str]  # {name: text}, of all that git tracks


class Mistake(Exception):
    """One sentence. The command ends with status 2, and nothing is done."""


# ---- the checkout

def git(root: Path, *words: str) -> list[str]:
    """What git prints, cut at its zeros."""
    done = subprocess.run(["git", *words, "-z"], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise Mistake(f"strip needs a checkout of git, which keeps what it deletes: {done.stderr}")
    return [name for name in done.stdout.split("\0") if name]


def read(root: Path) -> Files:
    """The files of the project. Bytes that are no UTF-8 come back as they were."""
    return {name: (root / name).read_bytes().decode(errors="surrogateescape")
            for name in git(root, "ls-files") if (root / name).is_file()}


def check_changes(root: Path) -> None:
    """Raises Mistake if the checkout has something that git does not have."""
    changed = [line[3:] for line in git(root, "status", "--porcelain", "--no-renames")]
    if changed:
        raise Mistake(f"git does not have what is changed in {', '.join(changed[:4])}: commit it "
                      "first, so that nothing is lost")


# ---- a house without some parts

class House:
    """Its files, and the table of its parts."""

    def __init__(self, files: Files, parts: dict, seams: dict):
        self.files, self.parts, self.seams = files, parts, seams

    def of(self, name: str) -> list[str]:
        """The files that are of this part alone."""
        part = self.parts[name]
        own = [*part.get("files", ()), part.get("folder", f"parts/{name}") + "/*"]
        return [file for file in self.files if any(fnmatch.fnmatchcase(file, it) for it in own)]

    def here(self) -> list[str]:
        """The parts that are not deleted yet."""
        return [name for name in self.parts if name != "parts" and self.of(name)]

    def without(self, *names: str) -> "House":
        """The house that is left. Raises Mistake if a seam is not what the table says."""
        if not {*self.here()} - {*names}:
            names += "parts",  # with the last one the folder and this command go too
        gone = {file for name in names for file in self.of(name)}
        files = {file: text for file, text in self.files.items() if file not in gone}
        for name in names:
            for file, text, instead in self.seams.get(name, ()):
                if file not in gone:
                    files[file] = replaced(files.get(file, ""), text, instead, file, name)
        if "parts/seams.py" in files:
            files["parts/seams.py"] = without_entries(files["parts/seams.py"], gone.union(names))
        lost = pages.names_of(self.files) - pages.names_of(files)
        files["run.sh"] = without_jobs(files["run.sh"], lost)
        lost = pages.names_of(self.files) - pages.names_of(files)
        files = {file: text for file, text in files.items() if not result_of(file, text) & lost}
        if "parts/pairs.py" in files:
            files["parts/pairs.py"] = without_entries(files["parts/pairs.py"], lost)
        lost = pages.names_of(self.files) - pages.names_of(files) | {
            f"word {word}" for name in names for word in self.parts[name].get("words", ())}
        for file in files:
            if file.endswith(".md") and file != "CHANGELOG.md":
                files[file] = pages.without(files[file], file, lost)
        left = {name: part for name, part in self.parts.items() if name not in names}
        return House(files, left, self.seams)

    def core(self) -> dict[str, str]:
        """What it is counted by: the files in front but nano.py and what is read or kept by git."""
        return {file: text for file, text in self.files.items() if "/" not in file
                and file.endswith((".py", ".sh", ".txt", ".toml")) and file != "nano.py"}


def replaced(whole: str, text: str, instead: str, file: str, part: str) -> str:
    """`whole` with a seam replaced, which must be there once."""
    if whole.count(text) != 1:
        raise Mistake(f"{file} has {whole.count(text)} times what parts/seams.py has of {part}, "
                      f"and must have it once: {text.strip()!r}")
    return whole.replace(text, instead)


def without_jobs(script: str, lost: set[str]) -> str:
    """run.sh without the jobs that use a file or a flag that is gone, and their lines of help."""
    before, mark, cases = script.partition("\ncase ")
    for case in re.findall(r"^  \w[^\n)]*\)(?:.*\n)+?(?=  \S+\)|  \S+ \|)", cases, re.M):
        if lost & {*re.findall(r"[\w/]+\.\w+|--\w+", case)}:
            job, cases = re.match(r" *(\w+)", case)[1], cases.replace(case, "")
            before = re.sub(rf"^# \./run\.sh {job}\b.*\n(#  .*\n)*", "", before, flags=re.M)
    return before + mark + cases


def result_of(file: str, text: str) -> set[str]:
    """What the command of a measured job names, if the file is one of results/."""
    command = re.search(r'"command": "(.*?)"', text) if fnmatch.fnmatch(
        file, "results/*.json") else None
    return pages.named(f"`{command[1]}`", file) if command else set()


def without_entries(table: str, names: set[str]) -> str:
    """A Python file without what it has of these names: entries of a dictionary whose key is or has
    one, and tuples that begin with one."""
    names, lines = names | {name.removeprefix("--") for name in names}, table.splitlines(True)
    spans = []
    for node in ast.walk(ast.parse(table)):
        if isinstance(node, ast.Dict):
            spans += [(key, value) for key, value in zip(node.keys, node.values, strict=True)
                      if names & {getattr(part, "value", "") for part in ast.walk(key)}]
        if isinstance(node, ast.Tuple) and len(node.elts) == 3:
            spans += [(node, node)] if getattr(node.elts[0], "value", "") in names else []
    for first, last in spans:
        lines[first.lineno - 1:last.end_lineno] = [""] * (last.end_lineno - first.lineno + 1)
    return "".join(lines)


# ---- the command

def size(files: Files) -> str:
    """"12 files   3,456 lines    78,901 bytes"."""
    lines = sum(text.count("\n") for text in files.values())
    count = sum(len(text.encode(errors="surrogateescape")) for text in files.values())
    return f"{len(files):4} files {lines:7,} lines {count:9,} bytes"


def listed(house: House) -> str:
    """A line for each part: its code, all that is deleted with it, its seams in the core's Python;
    then the core."""
    core = house.without(*house.here()).core()
    out = [f"{'':13} {'code':>36}   {'with tests, pages, examples':>36}   seams in the core"]
    for name in house.here():
        own = {file: house.files[file] for file in house.of(name)}
        code = {file: text for file, text in own.items() if file.endswith(".py")
                and not {"tests", "examples", "bench", "results"} & {*file.split("/")}}
        seams = [(file, text) for file, text, _ in house.seams.get(name, ())
                 if file in core and file.endswith(".py")]
        lines = sum(len(text.splitlines()) for _, text in seams)
        out.append(f"{name:13} {size(code)}   {size(own)}   {lines} lines in "
                   f"{len({file for file, _ in seams})} files")
    return "\n".join([*out, f"{'core':13} {size(core)}   in front, but nano.py and the pages"])


def chosen(house: House, words: list[str]) -> list[str]:
    """The parts that the command line names. Raises Mistake."""
    here, names = house.here(), [word for word in words if not word.startswith("--")]
    twice = [name for name in names if names.count(name) > 1]
    unknown = [name for name in names if name not in here]
    flags = [word for word in words if word.startswith("--") and word not in ("--all", "--yes")]
    for wrong, what in ((flags, "is no flag of strip: --all, --list, --yes are"),
                        (unknown, f"is no part that is here: {', '.join(here)} are"),
                        (twice, "is there twice")):
        if wrong:
            raise Mistake(f"{wrong[0]} {what}")
    if "--all" in words and names:
        raise Mistake(f"--all is all parts: leave out {' '.join(names)}")
    if not names and "--all" not in words:
        raise Mistake(f"say which parts, or --all: {', '.join(here)} are here")
    return here if "--all" in words else names


def write(root: Path, before: Files, after: Files) -> None:
    """Makes the files of the checkout those of `after`."""
    for file in before.keys() - after.keys():
        (root / file).unlink()
        for folder in (root / file).parents:  # one that holds nothing more goes too
            if {path.name for path in folder.iterdir()} - {"__pycache__"}:
                break
            shutil.rmtree(folder)
    for file, text in after.items():
        if text != before[file]:
            (root / file).write_bytes(text.encode(errors="surrogateescape"))


def agreed(names: list[str], files: int) -> bool:
    """Whether who is asked says yes. Without a terminal nobody does."""
    try:
        said = input(f"delete {', '.join(names)} ({files} files)? [y/N] ")
    except EOFError:
        print()
        return False
    return said.strip().lower() in ("y", "yes")


def main(words: list[str], root: Path = ROOT) -> int:
    """The exit status."""
    try:
        table = runpy.run_path(str(root / "parts/seams.py"))
        house = House(read(root), table["PARTS"], table["SEAMS"])
        if "--list" in words:
            print(listed(house))
            return 0
        names = chosen(house, words)
        check_changes(root)
        left = house.without(*names)
    except Mistake as error:
        print(f"error: {error}.", file=sys.stderr)
        return 2
    if "--yes" not in words and not agreed(names, len(house.files) - len(left.files)):
        print("nothing is deleted")
        return 1
    write(root, house.files, left.files)
    if "docs/check_links.py" in left.files:  # lines of the code have other numbers now
        subprocess.run([sys.executable, root / "docs/check_links.py", "--fix"], check=False,
                       stdout=subprocess.DEVNULL)
    print(f"left: {size(left.files)}\nin front: {size(left.core())}\ntest it: ./run.sh test")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
