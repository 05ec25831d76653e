"""The pages are true where that can be run: their links lead somewhere, what they name is there,
their commands run and print the lines below them, and their numbers are those of the files."""
import importlib
import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import tyro

import checkpoint
import grpo
import losses
import plan
import ranks
from docs import check_links
from examples import tiny
from fakes import SCRIPTS
from forked import PYTHON
from results import environments, roads, table
from settings import changed, values_of
from shapes import in_cache
from tracked import ROOT, tracked

FILES = [str(path.relative_to(ROOT)) for path in tracked()]
TEXT = {name: (ROOT / name).read_text() for name in FILES if re.fullmatch(
    r"(README|CONTRIBUTING|AGENTS)\.md|docs/.*\.md|(exercises|variants|parts/\w+)/README\.md",
    name)}
FIRST = ["README.md",
         *(f"docs/use/{name}.md" for name in ("start", "recipes", "troubleshooting", "gpus")),
         *(name for name in TEXT if name.startswith(("parts/", "variants/")))]
TESTS = "".join((ROOT / name).read_text() for name in FILES if "/test_" in name)
OF_PARTS = [importlib.import_module(name.removesuffix(".py").replace("/", ".")) for name in FILES
            if re.fullmatch(r"parts/\w+/\w+\.py", name)
            and "class Args(" in (ROOT / name).read_text()]
FLAGS = {name for script in [*SCRIPTS.values(), *OF_PARTS] for name in values_of(script.Args())}
OTHERS = {"local_addr", "nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id",
          "max_restarts", "shutdown-timeout",  # torchrun's
          "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time",
          "signal",  # Slurm's
          "sort", "fix", "write", "solution", "help", "kills", "show",  # of our tools
          "only", "list", "limit", "shapes",  # of ./run.sh gpu and bench/gpu.py
          "num_generations", "tasks", "model_args", "flag"}  # TRL's, lm-eval's; any


def bare(text: str) -> str:
    """A page without its code blocks."""
    return re.sub("^ *```.*?^ *```$", "", text, flags=re.S | re.M)


def blocks(page: str) -> list[str]:
    """The code blocks of a page that are commands or their output, without Python."""
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", TEXT[page], re.S | re.M)
    return [text.replace("\\\n", " ") for kind, text in found if kind != "python"]


def rows(page: str, heading: str = "") -> list[list[str]]:
    """The cells of the tables of a page, below a heading that contains `heading`."""
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for section in re.split("^##? ", TEXT[page], flags=re.M)
            if heading in section.split("\n")[0]
            for line in section.splitlines() if line.startswith("|")]


@pytest.fixture(scope="module", autouse=True)
def hub(tmp_path_factory):
    """The small files of the models that pages plan for, and no network."""
    names = (f"Qwen/Qwen2.5-{size}-Instruct" for size in ("0.5B", "7B"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in in_cache(tmp_path_factory.mktemp("hub"), *names).items():
            patch.setenv(name, value)
        yield


# ---- names and links

def test_every_link_leads_to_a_file_and_a_heading_or_to_the_code_that_it_shows():
    """And every page of docs/ can be reached from the README."""
    pages = {path: path.read_text() for path in tracked() if path.suffix == ".md"}
    headings = {page: {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
                       for heading in re.findall("^#+ (.*)$", text, re.M)}
                for page, text in pages.items()}
    for page, text in pages.items():
        for name, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", bare(text)):
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), (page, name)
            assert re.fullmatch(r"(L\d+)?", anchor) or anchor in headings[target], (page, anchor)
    assert not [page for page in TEXT if page.startswith("docs/")
                and f"]({page})" not in TEXT["README.md"]]
    for page in check_links.pages():
        assert not check_links.check(page) and not check_links.unlinked(page), page


@pytest.mark.parametrize("page", TEXT)
def test_flags_and_files_that_a_page_names_are_there(page):
    named = {*re.findall(r"(?<![\w-])--(?:no-)?([a-z][a-z_-]*)", TEXT[page])}
    assert not named - FLAGS - OTHERS
    assert all(f"def {name}(" in TESTS for name in re.findall(r"`(test_\w+)`", TEXT[page]))
    theirs = {"mine.py", "my_grpo.py", "my_rewards.py", "FILE.py", "free.py", "near.py", "MINE.py",
              *re.findall(r"cat > (\w+\.py)", "".join(TEXT.values()))}
    for code in re.findall(r"`([^`\n]+)`", bare(TEXT[page]).partition("## I come from")[0]):
        for name in re.findall(r"(?<!FILE\.)\b[\w/]+\.(?:py|md|sh|html|svg)\b", code):
            there = (ROOT / name).exists() or name in theirs
            assert there or Path(name).name in {Path(file).name for file in FILES}, name


def test_the_page_lists_what_may_not_change_in_a_resumed_run():
    text = bare(TEXT["docs/reference/metrics_and_files.md"])
    listed = re.search(r"is refused in one sentence:(.*?)All\s+others", text, re.S)[1]
    assert {*re.findall("--(\\w+)", listed)} == checkpoint.fixed(grpo.Args()) & FLAGS


# ---- commands and code

STANDS_FOR = {"runs/NAME": "x", "SMALL": "tiny", "LARGE": "tiny:skilled", "PROJECT": "x",
              "NAME": "exact", "free.py:free": "clip", "twice.py:reply": "examples/again.py:reply"}
ELSEWHERE = ("git ", "source ", "vllm ", "unset ", "echo ", "cat ", "AutoModel")  # no program here
REFUSED = ("--batch 0", "--help", "--num_generations")  # they end at once


def commands(page: str) -> list[str]:
    """What a reader would type: lines of code blocks, and what stands in the text or a table."""
    fenced = re.sub("<<'END'\n.*?^END$", "", "".join(blocks(page)), flags=re.S | re.M)
    first = r"\$? ?(?:\./run\.sh|(?:\.venv/bin/)?(?:python|torchrun)\b|git |echo |vllm )"
    found = [line.split("  #")[0].strip("$ ") for line in fenced.splitlines()
             if re.match(first, line.strip())]
    recipes = [f"python {'' if cell.startswith('`ppo') else 'grpo.py '}{cell.strip('`')}"
               for _, cell, *_ in rows(page, "Algorithms") if re.match("`(ppo.*)?-", cell)]
    return found + recipes + [code for code in re.findall("`([^`]+)`", bare(TEXT[page])) if
                              re.match(first, code) and (" " in code or code == "./run.sh")]


def stand_in(word: str) -> str:
    """A word of a command, or one of the tiny task for a name of the hub, a file of the reader's,
    or a word in capitals: what needs the network or a GPU says so on its page."""
    if word in STANDS_FOR:
        return STANDS_FOR[word]
    if re.fullmatch(r"\w+\.py:\w+", word):
        return "exact"
    hub = "/" in word and ":" in word and ".py:" not in word or word.startswith("Qwen/")
    return "tiny" if hub or re.fullmatch(r"[A-Z]+(\.jsonl)?|\w+\.jsonl", word) else word


def test_every_command_of_the_first_pages_can_run():
    """Its program or job is there, and its flags are checked as a run checks them."""
    jobs = re.findall(r"^  ([a-z]+)[ |:*a-z]*\)", (ROOT / "run.sh").read_text(), re.M)
    jobs += ["help", "", *(path.stem for path in ROOT.glob("parts/*/jobs/*.sh"))]
    seen = 0
    for command in (command for page in FIRST for command in commands(page)):
        words = shlex.split(command)
        program = next((word for word in words if word.endswith(".py")), "")
        given = words[words.index(program) + 1:] if program else words[1:]
        if words[0] == "./run.sh":
            job = given.pop(0) if given and not given[0].startswith("-") else ""
            assert job in jobs, command
            program = {"": "grpo.py", "ppo": "ppo.py"}.get(job, "run.sh")
        assert program and (ROOT / program).is_file() or command.startswith(ELSEWHERE), command
        if Path(program).stem in SCRIPTS and not any(text in command for text in REFUSED):
            args = tyro.cli(SCRIPTS[Path(program).stem].Args, use_underscores=True,
                            args=[stand_in(word) for word in given if word != "…"],
                            config=(tyro.conf.OmitArgPrefixes,))
            args.lr = args.lr or 1e-6
            found = plan.problems(args, 4, 7473)  # the recipes leave --update_tokens to the reader
            assert all(text.startswith("--update_tokens ") for text in found), (command, found)
            seen += 1
    assert seen > 50


PASTED = [(page, block) for page in TEXT for block in blocks(page)
          if re.match(r"\$ (python|torchrun .*) grpo\.py ", block)]


@pytest.mark.parametrize("page, block", [
    pytest.param(page, block, id=block.split("\n")[0][-40:],
                 marks=[pytest.mark.slow] * ("--steps" in block)) for page, block in PASTED])
def test_a_command_prints_the_lines_that_stand_below_it(page, block, tmp_path):
    """Lines can be left out (`...`) and folded. Those of other systems' errors train: any batch on
    any number of ranks, and twice the group in the same memory."""
    command, _, lines = block.partition("\n")
    launcher, _, given = command.partition("grpo.py ")
    size = int((re.findall(r"--nproc_per_node (\d+)", launcher) or ["1"])[0])
    (tmp_path / "runs").mkdir()
    model = Path(tiny.ensure(str(ROOT / "runs")))
    (tmp_path / "runs" / model.name).symlink_to(model)

    def printed(words: str) -> str:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(size)]
        done = subprocess.run([PYTHON, *torchrun * (size > 1), ROOT / "grpo.py", *words.split()],
                              cwd=tmp_path, text=True, capture_output=True, timeout=900)
        assert done.returncode == 0 or "--steps" not in words, done.stderr
        return " ".join((done.stdout + done.stderr).split())

    found = printed(given)
    for part in re.split(r"^ *\.\.\.$| \.\.\.$", lines, flags=re.M):
        assert " ".join(part.split()) in found, f"{part}\nis not in\n{found}"
    if "--group 64" in command:
        half = printed(given.replace("--group 64", "--group 32"))
        assert re.search(r"sum [\d. ]+", half)[0] == re.search(r"sum [\d. ]+", found)[0]


def test_the_idea_of_the_readme_stands_in_learn():
    """Its lines are those of grpo.py, in this order; `...` stands for lines that are left out."""
    code = inspect.getsource(grpo.learn)
    for shown in re.search(r"```python\n(.*?)```", TEXT["README.md"], re.S)[1].splitlines():
        if shown.strip() != "...":
            assert f"{shown}\n" in code, shown
            code = code.partition(f"{shown}\n")[2]


def test_the_forks_and_the_first_task_run(tmp_path, monkeypatch):
    """Each file that the README or the page of the first task makes is as the style wants it, and
    its flags are accepted. The loss has the shape and the metrics of clip's."""
    found = re.findall(r"```\ncat > (\w+\.py) <<'END'\n(.*?)^END\n\./run\.sh (.*?)\n```",
                       TEXT["README.md"], re.S | re.M)
    start = TEXT["docs/use/start.md"]
    task = re.search("```python\n(.*?)```", start, re.S)[1]
    command, = re.findall(r"^python grpo.py (--plan .*)$", start, re.M)
    monkeypatch.chdir(tmp_path)
    names = {}
    for name, text, given in [*found, ("mine.py", task, command)]:
        (tmp_path / name).write_text(text)
        args = tyro.cli(grpo.Args, args=given.split(), config=(tyro.conf.OmitArgPrefixes,))
        assert not plan.problems(changed(args, lr=1e-3), 1), given
        exec(text, names)
    subprocess.run([sys.executable, "-m", "ruff", "check", "--config", ROOT / "pyproject.toml",
                    "--extend-ignore", "D", tmp_path], check=True)
    assert names["near"]("1243", "1234") == 0.5 and names["score"]("0123", "01234") == 0.8
    logp, old, A = torch.randn(3, 10)
    args = logp.requires_grad_(), old, A, torch.arange(2).repeat_interleave(5)
    bounds = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    loss, metrics = names["free"](*args, n_rows=2, engine_logprobs=old, **bounds)
    theirs, expected = losses.clip_loss(*args, **bounds)
    assert loss.shape == theirs.shape and loss.requires_grad and metrics.keys() == expected.keys()


# ---- numbers

@pytest.mark.parametrize("page", ["reward_to_loss", "one_step"])
def test_a_page_prints_what_it_says(page):
    ranks.script("tests/pages.py", f"docs/learn/{page}.md")


def test_pages_that_a_command_writes_have_the_numbers_of_its_files():
    """The tables of results/ are what their commands print of the committed runs."""
    page = (table.HERE / "README.md").read_text()
    assert page.partition(table.BEGIN)[2] == table.table() + table.by_kind() + table.credit()
    for made in roads, environments:
        assert made.PAGE.read_text() == made.page(json.loads(made.FILE.read_text()))
