"""What README.md and docs/ say is true."""
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
import tyro

import distill
import grpo
import losses
import ppo
import sft
from docs import check_links, make_flags
from forked import PYTHON
from preflight import memory, plan, rules

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "exercises/README.md")]
PAGES += sorted((ROOT / "docs").glob("*/*.md"))
TEXT = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
BARE = {page: re.sub("^```.*?^```", "", text, flags=re.S | re.M) for page, text in TEXT.items()}
SOURCES = [path for kind in ("py", "sh", "html") for path in ROOT.rglob(f"*.{kind}")
           if not {".venv", "runs"} & {*path.relative_to(ROOT).parts}]
CODE = "\n".join(path.read_text() for path in SOURCES)
SCRIPTS = {"grpo": grpo, "ppo": ppo, "sft": sft, "distill": distill}
FLAGS = {name for script in SCRIPTS.values() for name in plan.flags(script.Args())}
OTHERS = {"nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id",  # torchrun's
          "shutdown-timeout", "job-name", "nodes", "ntasks-per-node", "gpus-per-node",  # Slurm's
          "cpus-per-task", "time", "signal", "sort", "wirings", "fix", "write", "solution", "help"}
OUTSIDE = {"enable_thinking", "HF_TOKEN", "search_document"}  # of other programs


def rows(page: str, heading: str = "") -> list[list[str]]:
    """The cells of the tables of a page, below a heading that contains `heading`."""
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for section in re.split("^##? ", TEXT[page], flags=re.M)
            if heading in section.split("\n")[0]
            for line in section.splitlines() if line.startswith("|")]


def blocks(page: str, kind: str = "") -> list[str]:
    """The code blocks of one kind."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT[page], re.S | re.M)
    return [text for name, text in found if name == kind]


def parsed(command: str):
    """The Args of a command."""
    *_, script, flags = re.split(r"\b(grpo|ppo)\.py", "grpo.py " + command.replace("\\\n", " "))
    args = tyro.cli(SCRIPTS[script].Args, args=flags.split(),
                    config=(tyro.conf.OmitArgPrefixes,), use_underscores=True)
    args.lr = 1e-6   # the default depends on the model
    return args


# ---- every page

@pytest.mark.parametrize("page", TEXT)
def test_lines_flags_names_and_files(page):
    lines = [re.sub(r"\[(.*?)\]\(\S+?\)", r"\1", x) for x in TEXT[page].splitlines()]
    assert not [x for x in lines if len(x) > 100 and not re.match(r"\||\[[\w-]+\]: ", x)]
    named = {*re.findall(r"(?<![\w-])--(?:no-)?([a-z][a-z_-]*)", TEXT[page])}
    assert not named - FLAGS - OTHERS - {"flag"}
    files = {path.name for path in ROOT.rglob("*") if ".venv" not in path.parts} | {"near.py"}
    table = re.search("## I come from.*", BARE[page], re.S)  # names of other systems
    for code in re.findall(r"`([^`\n]+)`", BARE[page].replace(table[0] if table else "", "")):
        for name in re.findall(r"(?<!FILE\.)\b[\w/]+\.(?:py|md|sh|html|svg)\b", code):
            mine = {"mine.py", "my_grpo.py", "my_rewards.py", "FILE.py", "free.py", "twice.py"}
            assert (ROOT / name).exists() or Path(name).name in files | mine, name
        if re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", code) and len(code) > 3:
            name = code.removesuffix("()").split(".")[-1]
            assert name in CODE or name in files or code in OUTSIDE, code


def test_every_link_leads_to_a_file_and_a_heading():
    found = {page: {re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-")
                    for x in re.findall("^#+ (.*)$", page.read_text(), re.M)}
             for page in ROOT.rglob("*.md") if ".venv" not in page.parts}
    for page in found:
        text = re.sub("^```.*?^```", "", page.read_text(), flags=re.S | re.M)
        for name, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", text):
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), (page, name)
            assert not anchor or re.fullmatch(r"L\d+", anchor) or anchor in found[target], (
                page, name, anchor)
    for path in re.findall(r"\b(?:docs|bench|results)/[\w/]+\.md", CODE):
        assert (ROOT / path).exists(), path


def test_the_book_is_short_and_every_page_is_on_a_shelf_of_the_readme():
    pages = [page for page in TEXT if page.startswith("docs/")]
    assert len(pages) <= 15 and sum(len(TEXT[page].encode()) for page in pages) <= 150_000
    assert not [page for page in pages if f"]({page})" not in TEXT["README.md"]]


# ---- README.md

def test_the_readme_is_short():
    text = TEXT["README.md"]
    assert len(text.splitlines()) <= 110
    prose = re.sub(r"\]\(\S+?\)|[*`]|^#.*$|^\* \*\*(Learn|Use|Look up).*$", "", BARE["README.md"],
                   flags=re.M)
    sentences = re.split(r"(?<=[.?!:])\s+|\n\n", prose)
    assert not [x for x in sentences if len(x.split()) > 30]
    front = {path.name for path in ROOT.glob("*.py")}
    assert front <= {*re.findall(r"\w+\.py", text)}
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert {f"{room}/" for room in rooms} <= {*re.findall(r"`(\w+/)`", text)}


def test_the_forks_of_the_readme_run(tmp_path):
    """Each diff makes a file; the command above it gives its flags."""
    found = re.findall(r"\(`./run.sh (.*?)`.*?\):\n```diff\n\+\+\+ (\w+\.py)\n(.*?)^```",
                       TEXT["README.md"], re.S | re.M)
    assert [name for _, name, _ in found] == ["near.py", "free.py", "twice.py"]
    for command, name, diff in found:
        lines = diff.splitlines()
        assert len(lines) <= 10 and all(line.startswith("+") for line in lines)
        (tmp_path / name).write_text("\n".join(line[1:] for line in lines))
        flags = command.removeprefix("prove ").replace(name, str(tmp_path / name)).split()
        done = subprocess.run([PYTHON, "grpo.py", "--plan", "--max_tokens", "16", *flags], cwd=ROOT,
                              text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              timeout=600)
        assert done.returncode == 0, done.stdout
    names = {}
    exec((tmp_path / "near.py").read_text(), names)
    assert names["near"]("1243", "1234") == 0.5
    exec((tmp_path / "twice.py").read_text(), names)
    for text, reply, right in ("12", None, 1.0), ("21", "Sort again.", 0.0):
        turns = [{"role": "assistant", "content": text}]
        assert names["reply"]({"answer": "12"}, turns) == reply
        assert names["right"](turns, "12") == right
    exec((tmp_path / "free.py").read_text(), names)
    check_loss(names["free"])


def check_loss(function) -> None:
    """It has the shape and the metrics of clip's."""
    logprobs, old, advantages = torch.randn(3, 2, 5)
    args = logprobs.requires_grad_(), old, advantages, torch.ones(2, 5, dtype=torch.bool)
    bounds = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    loss, metrics = function(*args, engine_logprobs=old, **bounds)
    theirs, expected = losses.clip_loss(*args, **bounds)
    assert loss.shape == theirs.shape and loss.requires_grad and metrics.keys() == expected.keys()


# ---- docs/use/

def test_the_page_of_flags_is_written_from_the_dataclasses():
    page = TEXT["docs/use/flags.md"]
    assert page.partition(make_flags.BEGIN)[2] == make_flags.tables()
    listed = re.findall(r"^\| `--(\w+)` \|", page, re.M)
    assert sorted(listed) == sorted(FLAGS) and make_flags.SAME_UPDATE <= FLAGS


def test_a_flag_that_keeps_the_update_may_change_in_a_resumed_run():
    from keeping import checkpoint
    assert not make_flags.SAME_UPDATE & {*checkpoint.FIXED}
    text = BARE["docs/reference/metrics_and_files.md"]
    listed = re.search(r"cannot change in the middle of a run:(.*?)All others", text, re.S)[1]
    assert {*re.findall("--(\\w+)", listed)} == {
        *checkpoint.FIXED} - {"script", "source", "rows", "loss_file", "advantage_file"} | {
        "loss", "advantage"}


def test_every_recipe_passes_the_checks():
    _, _, *recipes = rows("docs/use/recipes.md", "Algorithms")
    recipes = [row for row in recipes if len(row) == 2 and "`-" in row[1] + "`-" * (
        row[1].startswith("`ppo"))]
    assert len(recipes) == 23
    for _, command in recipes:
        found = {rule.kind for rule in rules.problems(parsed(command.strip("`")), 8)}
        assert found <= {"--update_tokens"}, command   # the page says so for DAPO


@pytest.mark.parametrize("page, name", [("docs/use/recipes.md", "soft_clip"),
                                        ("docs/use/start.md", "named")])
def test_the_examples_of_a_loss_and_of_a_reward_run(page, name):
    names, = [{}]
    exec(re.sub("^   ", "", re.search("```python\n(.*?)```", TEXT[page], re.S)[1], flags=re.M),
         names)
    if name == "named":
        assert names[name]("It is RED.", "red") == 1.0
    else:
        check_loss(names[name])


def check_pasted(pasted: str, printed: str) -> None:
    """Lines can be left out (`...`) and folded."""
    printed = " ".join(printed.split())
    for part in re.split(r"^ *\.\.\.$| \.\.\.$", pasted, flags=re.M):
        assert " ".join(part.split()) in printed, f"{part}\nis not in\n{printed}"


@pytest.mark.parametrize("page", ["docs/use/memory_and_machines.md", "docs/use/troubleshooting.md"])
def test_pasted_output_is_what_the_command_prints(page):
    pasted = [block for block in blocks(page) if block.startswith("$ python ")]
    assert pasted
    for block in pasted:
        command, _, lines = block.replace("\\\n", " ").partition("\n")
        done = subprocess.run([PYTHON, *command.split()[2:]], cwd=ROOT, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600)
        check_pasted(lines, done.stdout)


def test_the_pasted_plan_for_64_gpus():
    page = "docs/use/memory_and_machines.md"
    script, = blocks(page, "bash")
    args = parsed(script[script.index("grpo.py --name"):])
    assert not rules.problems(args, 64, 7473)
    made, shape = plan.Plan(args, 64, 7473, 0), memory.shape_of(args.model)
    pasted, = [block for block in blocks(page) if "64 engines" in block]
    check_pasted(pasted, memory.planned(made, shape, 80 * memory.GIB).text())


def test_durations_are_those_of_the_results():
    jobs = {"./run.sh": "sort-grpo", "./run.sh ppo": "sort-ppo", "./run.sh kk": "kk",
            "./run.sh game": "game", "./run.sh real": "instructions"}
    table = {row[0].strip("`"): row[2] for row in rows("docs/use/start.md", "The jobs")}
    for command, folder in jobs.items():
        seeds = json.loads((ROOT / "results" / folder / "result.json").read_text())["seeds"]
        mean = sum(seed["seconds"] for seed in seeds.values()) / len(seeds)
        assert table[command] == f"{mean:.0f}", command
    assert f"of {mean / 60:.0f} minutes" in TEXT["README.md"]  # of `real`, the last


def test_the_numbers_of_the_losses_are_in_their_table():
    table = (ROOT / "bench/loss_table.md").read_text()
    part = TEXT["docs/learn/algorithms.md"].partition("## Which loss")[2].partition("\n## ")[0]
    ends = [float(x) for x in re.findall(r"\| [-+]\d\.\d+: [-+](\d\.\d+) to ", table)
            + re.findall(r"\| [-+]\d\.\d+: \S+ to [-+](\d\.\d+)", table)]
    assert "0.014" in part and 0.014 in ends
    for number in "0.946", "0.968":
        assert number in part and f"| {number} (" in table


# ---- docs/reference/

def test_the_metrics_of_the_code_are_the_documented_ones():
    cells = " ".join(row[0] for row in rows("docs/reference/metrics_and_files.md")
                     if len(row) == 2)
    documented = {*re.findall("`([^`]+)`", cells)}
    groups = "reward|rollout|loss|policy|critic|grad|batch|update|data|eval|time|memory"
    shipped = "\n".join(path.read_text() for path in SOURCES if path.suffix == ".py" and not {
        "tests", "bench", "tools", "exercises", "results", "docs"} & {*path.parts})
    found = {*re.findall(rf'"((?:{groups})/[a-z][a-z0-9_@]*)"', shipped)}
    found |= {f"time/{name}" for name in re.findall(r'\b(?:time|phase)\("(\w+)"\)', shipped)}
    assert len(found) > 25
    assert not found - documented
    names = {name for name in documented if "/" in name and not re.search("[A-Z/]$|[A-Z]", name)}
    assert len(names) > 40
    for name in names:   # spelled whole, by its last part, or by the phase it measures
        last = name.partition("/")[2].removesuffix("_not_finite")
        phase = last.removesuffix("_gb").removesuffix("_reserved")
        spelled = f'"{name}"', f'"{last}"', f"/{last}", f'("{phase}")', f"/{phase}_"
        assert any(text in shipped for text in spelled), name


def test_every_dependency_has_its_reason():
    for name in re.findall("^([^#=\n]+)==", (ROOT / "requirements.txt").read_text(), re.M):
        assert f"`{name}`" in TEXT["CONTRIBUTING.md"], name


def test_every_test_file_stands_in_the_table_of_promises():
    table = " ".join(row[1] for row in rows("CONTRIBUTING.md", "What the tests prove"))
    assert {*re.findall(r"test_\w+\.py", table)} <= {
        path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert check_links.pages()
