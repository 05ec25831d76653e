"""./run.sh walk sees what is wrong: a command, a printed number, a script that does not start. It
walks the pages themselves beside the tests."""
import os
import re
import subprocess
import sys
import time
from collections import Counter

import pytest

from docs import walk
from tracked import ROOT, tracked

STEPS = ("step  1/35  reward 0.102  loss -0.0004  gap 5e-06\nstep 35/35  reward 0.979\n"
         "held-out 1,000\n")


@pytest.fixture
def walked(tmp_path, capsys):
    """(a page, short, limit) → how often each verdict came, the walk, and what it printed."""
    def walked(page: str, short: bool = False, limit: float = 60):
        terminal = walk.Terminal(tmp_path, os.environ | {"STEPS": "2"}, walk.CAPPED * short)
        it = walk.Walk(short, terminal)
        walk.LIMIT = {short: limit}
        it.page("x.md", page)
        terminal.close()
        said = capsys.readouterr().out
        return Counter(re.findall(r"^(ok|WRONG) ", said, re.M)), it, said
    return walked


def fenced(commands: str, printed: str = "", mark: str = "") -> str:
    text = f"<!-- walk: {mark} -->\n" * bool(mark) + f"```sh\n{commands}\n```\n"
    return text + f"```text\n{printed}\n```\n" * bool(printed)


@pytest.mark.parametrize("commands, printed, mark, right", [
    ("echo one", "one", "", True),
    ("echo one", "two", "", False),
    ("echo one; echo two", "two\none", "", False),  # in another order
    ("echo one; echo 1.5 two three", "one\n... two ...", "", True),
    (f"printf '{STEPS}'", STEPS, "", True),
    (f"printf '{STEPS}'", "step 1/35 reward 0.112", "", False),
    (f"printf '{STEPS}'", "step  1/35 ... loss -0.0007 ...", "", True),  # its last digit
    (f"printf '{STEPS}'", "gap 4e-06", "", True),
    (f"printf '{STEPS}'", "gap 4e-04", "", False),
    (f"printf '{STEPS}'", "step 34/35  reward 0.979", "", False),
    (f"printf '{STEPS}'", "held-out 1,001", "", False),
    ("echo grpo-20261128-213652: a run", "grpo-20250101-000000: a run", "", True),
    ("false\necho one", "one", "", False),  # not the last command
    ("no_such_command", "", "", False),
    ("python -c 'import no_such_module'", "", "", False),
    ("false", "", "error", True),
    ("true", "", "error", False),
    ("cat <<'END'\nx\nEND\nif then", "", "", False),
    ("exit 0", "", "", False)])  # it would end the reader's terminal
def test_a_block_is_typed_and_what_it_prints_is_compared(walked, commands, printed, mark, right):
    verdicts, it, said = walked(fenced(commands, printed, mark))
    assert bool(verdicts["WRONG"]) != right and bool(it.wrong) != right, said
    assert verdicts["ok"] or not right


def test_blocks_share_a_terminal_and_files(walked):
    """A folder, a variable, a file of the page; a command within a line is typed once."""
    verdicts, it, said = walked(
        "<!-- walk: write mine.py -->\n```python\nprint(7)\n```\n" + fenced("mkdir a && cd a\nx=3")
        + fenced("pwd | grep -c /a$; echo $x; python ../mine.py", "1\n3\n7")
        + "`python ../mine.py` `python ../mine.py …` `python n.py` <!-- walk: not typed: why -->")
    assert verdicts == {"ok": 5} and it.untyped == ["x.md:17  python n.py: why"], said


def test_what_needs_another_machine_is_planned(walked):
    page = fenced("torchrun --nnodes 2 --nproc_per_node 8 \\\n  grpo.py --name X  # on each", "",
                  "plan --data tiny: two machines")
    _, _, said = walked("```sh\npython() { echo $@; }\n```\n" + page + fenced("true", ""))
    assert "python grpo.py --name X --plan --ranks 16 --data tiny" in said


def test_a_block_that_does_not_end_is_killed_with_its_processes(walked):
    began, long = time.monotonic(), f"sleep 987.{os.getpid()}"
    verdicts, _, said = walked(fenced(f"{long} & {long}") + fenced("echo 5", "5"), limit=1)
    assert verdicts == {"WRONG": 1, "ok": 2} and time.monotonic() - began < 20, said
    assert not subprocess.run(["pgrep", "-f", long], capture_output=True).stdout


def test_the_short_walk_caps_steps_and_compares_what_two_steps_print(walked):
    """And leaves out what is long, and the tests, by name."""
    script = "printf 'echo $@' > a.sh\npython() { capped bash a.sh $@; }\npython grpo.py --batch 4"
    page = (fenced("echo 'step 1/2  reward 0.102'", STEPS) + fenced("echo 5", "6", "long: hours")
            + fenced("./run.sh test") + "`./run.sh walk --short`\n"
            + fenced(script, "grpo.py --batch 4 --steps 2"))
    page = page.replace("held-out 1,000\n", "held-out pass@1, before and after: 1\n").replace(
        "  loss -0.0004  gap 5e-06", "")
    verdicts, it, said = walked(page, short=True)
    assert not it.wrong and [x.partition(": ")[2] for x in it.untyped] == [
        "hours", "the tests, which CI runs beside this", "this"], said
    _, it, said = walked(page.replace("0.102'", "0.302'"), short=True)
    assert len(it.wrong) == 1, said


def test_the_short_walk_forks_what_trains_and_nothing_else(walked):
    """In a block, and the ranks of a torchrun in it."""
    forked = "source() { :; }\n" + walk.WARM.replace("$PWD/tests/python", "echo")
    page = fenced(f"{walk.CAPPED}{forked}") + fenced(
        "python grpo.py --batch 4", "grpo.py --batch 4 --steps 2") + fenced(
        "python -c 'print(5)'\npython - <<'END'\nprint(6)\nEND", "5\n6")
    verdicts, it, said = walked(page)
    assert verdicts == {"ok": 5}, said


def test_a_page_that_is_none_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["walk.py", "README.md", "docs/use/strat.md"])
    with pytest.raises(SystemExit, match="2"):
        walk.main()
    said = capsys.readouterr().err
    assert "docs/use/strat.md is no page" in said and "docs/use/start.md" in said


def test_a_script_that_does_not_start_is_seen(tmp_path, capsys):
    """One that hides a module of the standard library, one that fails, one that leaves a file."""
    files = {"good": "print(1)", "numbers": "", "hidden": "import statistics\nprint(1)",
             "fails": "import no_such_module", "silent": "pass",
             "writes": "open('x', 'w')\nprint(1)",
             "needs": "import sys\nsys.exit('needs y: pip install y')"}
    for name, code in files.items():
        (tmp_path / f"{name}.py").write_text(f'{code}\nif __name__ == "__main__":\n    pass\n')
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    subprocess.run("git init -q && git add *.py", shell=True, cwd=tmp_path, check=True)
    it = walk.Walk(False, walk.Terminal(tmp_path, dict(os.environ)))
    walk.start_scripts(it, tmp_path)
    it.terminal.close()
    wrong = {re.search(r"(\w+)\.py", line)[1] for line in it.wrong}
    assert wrong == {"numbers", "hidden", "fails", "silent", "writes"}, capsys.readouterr().out
    assert len(it.untyped) == 1 and "pip install y" in it.untyped[0]


def test_each_block_of_a_page_says_what_it_is():
    """And each mark is one that the walk knows."""
    kinds = {"", "error", "plan", "long", "not", "write"}
    pages = [path for path in tracked() if path.suffix == ".md"]
    assert len(pages) > 30
    for page in pages:
        for block in walk.blocks(str(page.relative_to(ROOT)), page.read_text()):
            how = block.mark.partition(": ")[0].split(" ")[0]
            assert how in kinds and (how in ("", "error", "write") or block.why), block.place
