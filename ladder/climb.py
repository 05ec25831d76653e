"""Shows what each file of the ladder changes, and what that does to the reward.

    python ladder/climb.py           # writes the differences into docs/learn/ladder.md
    python ladder/climb.py --runs    # runs the four files on two ranks, and writes curves.json
"""
import argparse
import json
import os
import re
import subprocess
import sys
from difflib import SequenceMatcher
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FILES = ["nano.py", "ladder/nano_clip.py", "ladder/nano_kl.py", "ladder/nano_packed.py"]
PAGE, CURVES = ROOT / "docs/learn/ladder.md", HERE / "curves.json"
BLOCK = re.compile("```diff\n.*?```", re.S)


def difference(before: str, after: str) -> list[str]:
    """The lines of a file that are not in the one before (+), and those that are no longer (-).

    Between them stands `@@ 57 @@`: what follows begins at line 57 of `after`, and is moved to the
    left. Left out are docstrings of the files, empty lines, and lines that are only indented anew.
    """
    old, new = ((ROOT / name).read_text().splitlines() for name in (before, after))
    start, found = new.index('"""'), []
    for kind, i, i_end, j, j_end in SequenceMatcher(
            None, [line.strip() for line in old], [line.strip() for line in new],
            autojunk=False).get_opcodes():
        lines = [("-", line) for line in old[i:i_end]] + [("+", line) for line in new[j:j_end]]
        lines = [(sign, line) for sign, line in lines if line.strip()]
        if kind != "equal" and j > start and lines:
            left = min(len(line) - len(line.lstrip()) for _, line in lines)
            found += [f"@@ {j + 1} @@", *(sign + line[left:] for sign, line in lines)]
    return found


def page() -> str:
    """The page with the differences of today."""
    blocks = iter(["\n".join(["```diff", *difference(*pair), "```"])
                   for pair in zip(FILES, FILES[1:], strict=False)])
    return BLOCK.sub(lambda match: next(blocks), PAGE.read_text())


def rewards(name: str) -> list[float]:
    """The mean reward of each step of a run on two ranks."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
         ROOT / name], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, check=True,
        stdout=subprocess.PIPE)
    return [float(reward) for reward in re.findall(r"^step \d+  reward (\S+)", done.stdout, re.M)]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", action="store_true", help="run the files too")
    if parser.parse_args().runs:
        found = {Path(name).stem: rewards(name) for name in FILES}
        CURVES.write_text("{" + ",\n ".join(
            f"{json.dumps(name)}: {values}" for name, values in found.items()) + "}\n")
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
