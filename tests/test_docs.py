"""What README.md and docs/ say is true: what they name, link to, print, draw, cite and count."""
import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import tyro

import checkpoint
import conftest
import grpo
import losses
import plan
from docs import check_links
from forked import PYTHON
from house import SCRIPTS, has, module
from settings import values_of
from shapes import in_cache, shape_of
from tracked import tracked

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("docs", "docs/pictures")]
import draw  # noqa: E402

PAGES = [ROOT / name for name in (
    "README.md", "CONTRIBUTING.md", "AGENTS.md", "exercises/README.md")]
PAGES += sorted(path for path in tracked() if path.match("docs/*/*.md")
                or path.match("parts/*/README.md") or path == ROOT / "variants/README.md")
PARTS = [str(page.relative_to(ROOT)) for page in PAGES if page.match("parts/*/*")]
TEXT = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
BARE = {page: re.sub("^```.*?^```", "", text, flags=re.S | re.M) for page, text in TEXT.items()}
FILES = tracked()
SOURCES = [path for path in FILES if path.suffix in {".py", ".sh", ".html"}]
CODE = "\n".join(path.read_text() for path in SOURCES)
FLAGS = {name for script in SCRIPTS.values() for name in values_of(script.Args())}
OTHERS = {"local_addr", "nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint",
          "rdzv_id", "max_restarts", "shutdown-timeout",  # torchrun's
          "job-name", "nodes", "ntasks-per-node", "gpus-per-node",  # Slurm's
          "cpus-per-task", "time", "signal", "sort", "write", "solution", "help",
          "kills", "show",
          "num_generations", "tasks", "model_args"}  # TRL's, lm-eval's
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


@pytest.fixture(scope="module", autouse=True)
def hub(tmp_path_factory):
    """The small files of the models that pages plan for, and no network."""
    names = (f"Qwen/Qwen2.5-{size}-Instruct" for size in ("0.5B", "7B"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in in_cache(tmp_path_factory.mktemp("hub"), *names).items():
            patch.setenv(name, value)
        yield


def printed(*command: str, status: int | None = 0) -> str:
    """status: the one that it must end with. None: any."""
    done = subprocess.run([PYTHON, *command], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=600)
    assert status is None or done.returncode == status, done.stdout
    return done.stdout


def problems_of(command: str, ranks: int, rows: int = 0):
    """The Args of a command, and what is wrong with them."""
    *_, script, flags = re.split(r"\b(grpo|ppo)\.py", "grpo.py " + command.replace("\\\n", " "))
    args = tyro.cli(SCRIPTS[script].Args, args=flags.split(),
                    config=(tyro.conf.OmitArgPrefixes,), use_underscores=True)
    args.lr = 1e-6  # the default depends on the model
    return args, plan.problems(args, ranks, *([rows] if rows else []))


# ---- names and links

@pytest.mark.parametrize("page", TEXT)
def test_lines_flags_names_and_files(page):
    lines = [re.sub(r"\[(.*?)\]\(\S+?\)", r"\1", x) for x in TEXT[page].splitlines()]
    assert not [x for x in lines if len(x) > 100 and not re.match(r"\||\[[\w-]+\]: ", x)]
    named = {*re.findall(r"(?<![\w-])--(?:no-)?([a-z][a-z_-]*)", TEXT[page])}
    assert not named - FLAGS - OTHERS - {"flag"}
    files = {path.name for path in FILES}
    table = re.search("## I come from.*|$", BARE[page], re.S)[0]  # names of other systems
    for code in re.findall(r"`([^`\n]+)`", BARE[page].removesuffix(table)):
        for name in re.findall(r"(?<!FILE\.)\b[\w/]+\.(?:py|md|sh|html|svg)\b", code):
            mine = {"mine.py", "my_grpo.py", "my_rewards.py", "FILE.py", "free.py", "MINE.py"}
            assert (ROOT / name).exists() or Path(name).name in files | mine, name
        if re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", code) and len(code) > 3:
            name = code.removesuffix("()").split(".")[-1]
            assert name in CODE or name in files or code in OUTSIDE or name in table, code


def test_every_link_leads_to_a_file_and_a_heading():
    found = {page: {re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-")
                    for x in re.findall("^#+ (.*)$", page.read_text(), re.M)}
             for page in FILES if page.suffix == ".md"}
    for page in found:
        text = re.sub("^```.*?^```", "", page.read_text(), flags=re.S | re.M)
        for name, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", text):
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), (page, name)
            assert not anchor or re.fullmatch(r"L\d+", anchor) or anchor in found[target], (
                page, name, anchor)
    assert not [page for page in TEXT if page.startswith("docs/")
                and f"]({page})" not in TEXT["README.md"]]  # a shelf for each page


def test_links_to_code_and_claims_about_other_projects(tmp_path):
    """A link's code is in its file. A claim has a thread or a commit."""
    for page in check_links.pages():
        assert not check_links.check(page) and not check_links.unlinked(page)
    (tmp_path / "file.py").write_text("a = 1\nclass B:\n    def c(self):\n        d = 2\n")
    page, url = tmp_path / "page.md", "https://github.com/a/b"
    page.write_text(f"[`a`](file.py) [`B.c`](file.py) [TRL 7]({url}/issues/7) had an error.")
    assert not check_links.check(page) and not check_links.unlinked(page)
    page.write_text(f"[`c`](file.py) [`B.d`](file.py) [`a`](file.py#L1) [b]({url}/blob/main/x.py)")
    assert len(check_links.check(page)) == 3 and check_links.unlinked(page)


# ---- commands and code

RUN = {"runs/NAME": "x", "MODEL": "tiny", "SMALL": "tiny", "LARGE": "tiny:skilled",
       "ROWS.jsonl": "tiny", "rows.jsonl": "tiny", "chats.jsonl": "tiny", "held_out.jsonl": "tiny",
       "prompts.jsonl": "tiny", "FILE": "tiny", "FOLDER": "tiny", "DATA": "tiny", "NAME": "exact",
       "PROJECT": "x", "MINE.py:NAME": "exact", "mine.py:named": "exact",
       "near.py:near": "exact", "free.py:free": "clip", "twice.py:right": "exact",
       "twice.py:reply": "examples/again.py:reply"}
ELSEWHERE = ("git ", "source ", "vllm ", "unset ", "echo ", "cat ", "AutoModel")  # no program here
REFUSED = ("--batch 0", "--help", "--num_generations")  # they end at once


def commands(page: str) -> list[str]:
    """What a reader would type: lines of code blocks, and what stands in the text or a table."""
    fences = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", TEXT[page], re.S | re.M)
    fenced = "".join(text for kind, text in fences if kind != "python").replace("\\\n", " ")
    fenced = re.sub("<<'END'\n.*?^END$", "", fenced, flags=re.S | re.M)
    plain = re.sub("^ *```.*?^ *```$", "", TEXT[page], flags=re.S | re.M)
    first = r"\$? ?(?:\./run\.sh|(?:\.venv/bin/)?(?:python|torchrun)\b|git |echo |vllm )"
    found = [line.split("  #")[0].strip("$ ") for line in fenced.splitlines()
             if re.match(first, line.strip())]
    return found + [code for code in re.findall("`([^`]+)`", plain)
                    if re.match(first, code) and (" " in code or code == "./run.sh")]


def test_every_command_of_the_first_pages_can_run():
    """Flags are checked as a run checks them. Names of the hub, and words in capitals, are the tiny
    task here: what needs the network or a GPU says so on its page."""
    script = (ROOT / "run.sh").read_text()
    jobs = re.findall(r"^  ([a-z]+)[ |:*a-z]*\)", script, re.M) + ["help", ""]
    jobs += [path.stem for path in ROOT.glob("parts/*/jobs/*.sh")]
    seen = 0
    for page in ("README.md", *(f"docs/use/{name}.md" for name in (
            "start", "recipes", "troubleshooting")), *PARTS):
        for command in commands(page):
            words = shlex.split(command)
            program = next((word for word in words if word.endswith(".py")), "")
            flags = words[words.index(program) + 1:] if program else words[1:]
            if words[0] == "./run.sh":
                job = flags.pop(0) if flags and not flags[0].startswith("-") else ""
                assert job in jobs, command
                program = {"": "grpo.py", "sft": "parts/sft/sft.py", "ppo": "ppo.py"}.get(job, "")
            if any(text in command for text in REFUSED):
                continue
            if Path(program).stem not in SCRIPTS:
                assert not program or (ROOT / program).is_file(), command
                assert program or command.startswith(("./run.sh", *ELSEWHERE)), command
                continue
            flags = [RUN.get(word, word) for word in flags if word != "…"]
            flags = ["tiny" if "/" in word and ":" in word or word.startswith("Qwen/") else word
                     for word in flags]
            args = tyro.cli(SCRIPTS[Path(program).stem].Args, args=flags, use_underscores=True,
                            config=(tyro.conf.OmitArgPrefixes,))
            args.lr = args.lr or 1e-6
            assert not plan.problems(args, 4, 7473), command
            seen += 1
    assert seen > 25


def forks() -> dict[str, tuple[str, str]]:
    """{file: (its text, the command below it)} of the README and of parts."""
    found = re.findall(r"```\ncat > (\w+\.py) <<'END'\n(.*?)^END\n\./run\.sh (.*?)\n```",
                       TEXT["README.md"] + "".join(map(TEXT.get, PARTS)), re.S | re.M)
    return {name: (text, flags) for name, text, flags in found}


def test_the_idea_of_the_readme_stands_in_learn():
    """In this order; `...` stands for lines that are left out."""
    block = re.search(r"```python\n(.*?)```", TEXT["README.md"], re.S)[1]
    code = inspect.getsource(grpo.learn)
    for shown in block.splitlines():
        if shown.strip() != "...":
            assert f"{shown}\n" in code, shown
            code = code.partition(f"{shown}\n")[2]


def test_the_forks_of_the_readme_run(tmp_path):
    """Each block makes a file, which is as the style wants it, and gives its flags."""
    assert {*forks()} == {"near.py", "free.py"} | ({"twice.py"} if has("turns") else set())
    names = {}
    for name, (text, flags) in forks().items():
        (tmp_path / name).write_text(text)
        printed("grpo.py", "--plan", "--max_tokens", "16",
                *flags.replace(name, str(tmp_path / name)).split())
        exec(text, names)
    printed("-m", "ruff", "check", "--config", "pyproject.toml", str(tmp_path))
    assert names["near"]("1243", "1234") == 0.5 and names["near"]("12349", "1234") == 0.8
    for text, reply, right in ("12", None, 1.0), ("21", "Sort again.", 0.0):
        if not has("turns"):
            break
        turns = [{"role": "assistant", "content": text}]
        assert names["reply"]({"answer": "12"}, turns) == reply
        assert names["right"](turns, "12") == right
    check_loss(names["free"])


@pytest.mark.slow
def test_the_forks_of_the_readme_print_what_it_says(tmp_path):
    """Minutes. The rewards and turns of the text, with the file and without."""
    text, lines = TEXT["README.md"], {}
    for name, (code, flags) in forks().items():
        (tmp_path / name).write_text(code)
        lines[name] = "./run.sh", *flags.replace(name, str(tmp_path / name)).split()
    lines |= {"": ("./run.sh",), "four": ("./run.sh", "--minibatches", "4")}
    found, turns = {}, []
    for name, command in lines.items():
        steps = "1" if name in ("", "near.py") else "8"
        done = subprocess.run([*command, "--steps", steps, "--no-export"], cwd=ROOT, text=True,
                              capture_output=True, check=True)
        found[name] = dict(re.findall(r"step (\d+)/.*?reward ([\d.]+)", done.stdout))
        turns = re.findall(r"turns (\d\.\d\d)", done.stdout) or turns
        shutil.rmtree(ROOT / re.search(r"the run is in (\S+)", done.stdout)[1])
    assert f"reward {found['near.py']['1']}, without the file {found['']['1']}" in text
    loss = f"reward {found['free.py']['8']}, without the loss {found['four']['8']}"
    assert loss in " ".join(text.split())
    assert not turns or f"fall from {turns[0]}" in TEXT["parts/turns/README.md"]


def test_the_task_of_the_first_page_is_checked_by_the_plan_that_it_gives(tmp_path):
    page = TEXT["docs/use/start.md"]
    (tmp_path / "mine.py").write_text(re.search("```python\n(.*?)```", page, re.S)[1])
    command, = re.findall(r"^python grpo.py (--plan .*)$", page, re.M)
    command = command.replace("mine.py", str(tmp_path / "mine.py"))
    assert "plan for grpo.py on 1 rank: 64 prompts" in printed("grpo.py", *command.split())


def check_loss(function) -> None:
    """It has the shape and the metrics of clip's."""
    logp, old, A = torch.randn(3, 10)
    args = logp.requires_grad_(), old, A, torch.arange(2).repeat_interleave(5)
    bounds = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    loss, metrics = function(*args, n_rows=2, engine_logprobs=old, **bounds)
    theirs, expected = losses.clip_loss(*args, **bounds)
    assert loss.shape == theirs.shape and loss.requires_grad and metrics.keys() == expected.keys()


def test_every_recipe_passes_the_checks():
    recipes = rows("docs/use/recipes.md", "Algorithms")
    recipes += rows("variants/README.md") if has("variants") else []
    commands = [row[1].strip("`") for row in recipes if len(row) == 2 and re.match(
        "`(ppo.*)?-", row[1])]
    assert len(commands) >= (19 if has("variants") else 9)
    for command in commands:
        assert all(
            problem.startswith("--update_tokens ")  # the page says so
            for problem in problems_of(command, 8)[1]), command


@pytest.mark.parametrize("page", ["docs/use/memory_and_machines.md", "docs/use/troubleshooting.md",
                                  *(["parts/lora/README.md"] if has("lora") else [])])
def test_pasted_output_is_what_the_command_prints(page):
    """Lines can be left out (`...`) and folded."""
    pasted = [block for block in blocks(page) if block.startswith("$ python ")]
    assert pasted
    for block in pasted:
        command, _, lines = block.replace("\\\n", " ").partition("\n")
        text = " ".join(printed(*command.split()[2:], status=None).split())
        for part in re.split(r"^ *\.\.\.$| \.\.\.$", lines, flags=re.M):
            assert " ".join(part.split()) in text, f"{part}\nis not in\n{text}"


def test_the_script_for_several_machines_passes_the_checks_and_fits():
    script = (ROOT / "examples/slurm.sh").read_text()
    args, problems = problems_of(script[script.index("grpo.py --name"):], 64, 7473)
    made = plan.Plan(args, 64, 7473, 0)
    assert not problems and plan.Memory(made, shape_of(args.model), 80 * 2**30).fits


@pytest.mark.parametrize(
    "page", ["reward_to_loss", "one_step"])
def test_a_page_prints_what_it_says(page):
    printed("tests/pages.py", f"docs/learn/{page}.md")


# ---- what is written by a script, and figures

def test_the_page_has_what_may_not_change_in_a_resumed_run():
    text = BARE["docs/reference/metrics_and_files.md"]
    listed = re.search(r"is refused in one sentence:(.*?)All\s+others", text, re.S)[1]
    assert {*re.findall("--(\\w+)", listed)} == checkpoint.fixed(grpo.Args()) & {*FLAGS}


@pytest.mark.parametrize("name", draw.PICTURES)
def test_pictures_are_what_the_script_draws(name):
    assert (ROOT / f"docs/pictures/{name}.svg").read_text() == draw.PICTURES[name]()


def test_the_pages_of_numbers_are_what_the_committed_numbers_say():
    for made in filter(None, map(module, ("results.roads", "results.environments"))):
        assert made.PAGE.read_text() == made.page(json.loads(made.FILE.read_text()))


def test_measurements_have_their_commands_and_every_named_command_is_there():
    measured = "".join(path.read_text() for path in FILES if path.name == "RESULTS.md")
    for section in re.split("^## ", measured, flags=re.M)[1:]:
        assert re.search(r"`[^`]*((bench|tests)/\w+\.py|\./run\.sh)", section), section
    assert max(len(x) for x in measured.splitlines() if not re.match(
        r"\[[\w-]+\]: |\|", x)) <= 100  # links, and tables
    pages = [*TEXT.values(), measured, *(p.read_text() for p in ROOT.glob("results/*.md"))]
    named = {*re.findall(r"(?<!/)\b(?:bench|tests|results|tools|docs|exercises)/[\w/]+\.py\b",
                         "\n".join(pages))}
    assert len(named) > 20 and not [name for name in named if not (ROOT / name).exists()]


def test_durations_are_those_of_the_results():
    seconds = {}
    for name in ("sort-grpo", "instructions"):
        job = json.loads((ROOT / f"results/{name}.json").read_text())
        seconds[name] = sum(seed["seconds"] for seed in job["seeds"].values()) / len(job["seeds"])
    assert f"in {seconds['instructions'] / 60:.0f} minutes" in TEXT["README.md"]
    words = "{sort-grpo:.0f} for `./run.sh`, {instructions:.0f} for `./run.sh real`"
    assert words.format(**seconds) in TEXT["docs/use/start.md"]


def test_the_defaults_of_the_script_and_of_run_sh_are_those_of_the_page():
    args, job = values_of(grpo.Args()), " ".join((ROOT / "run.sh").read_text().split())
    table = {row[0].strip("`-"): row[1:] for row in rows("docs/use/start.md", "The jobs")
             if len(row) == 3 and row[0].startswith("`--")}
    for flag, (script, shell) in table.items():
        assert script == str(args[flag] or "none" if flag == "eval_data" else args[flag])
        value = re.match("`?([^`]+)", shell)[1]
        assert re.search(rf"\b({flag}|held_out) {value}\b", job), flag
    assert len(table) == 5


def test_the_metrics_of_the_code_are_the_documented_ones():
    cells = " ".join(row[0] for row in rows("docs/reference/metrics_and_files.md")
                     if len(row) == 2)
    documented = {*re.findall("`([^`]+)`", cells)}
    groups = "reward|rollout|loss|policy|critic|grad|batch|update|data|eval|time|memory"
    shipped = "\n".join(path.read_text() for path in SOURCES if path.suffix == ".py" and not {
        "tests", "bench", "tools", "exercises", "results", "docs"} & {*path.parts})
    found = {*re.findall(rf'"((?:{groups})/[a-z][a-z0-9_@]*)"', shipped)}
    found |= {f"time/{name}" for name in re.findall(r'\b(?:time|phase)\("(\w+)"\)', shipped)}
    assert len(found) > 25 and not found - documented
    for name in (name for name in documented if "/" in name and not re.search("[A-Z]|/$", name)):
        last = name.partition("/")[2].removesuffix("_not_finite")
        phase = last.removesuffix("_gb").removesuffix("_reserved")
        # spelled whole, by its last part, or by the phase it measures
        spelled = f'"{name}"', f'"{last}"', f"/{last}", f'("{phase}")', f"/{phase}_"
        assert any(text in shipped for text in spelled), name


def test_every_dependency_says_why_and_every_promise_has_its_tests():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    bare = [b for a, b in pairwise(lines) if "==" in b and not b.startswith("#")
            and not (a.startswith("# ") or "==" in a)]
    assert not bare and len(lines) > 20
    assert {f"test_{name}.py" for files in conftest.PROMISES.values() for name in files.split()
            } <= {path.name for path in FILES}


def test_the_pages_are_few_and_short():
    pages = [path for path in FILES if path.suffix == ".md" and (
        path.parent == ROOT or path.is_relative_to(ROOT / "docs"))]
    assert len(pages) <= 15
    assert sum(page.stat().st_size for page in [*pages, *map(ROOT.joinpath, PARTS)]) <= 133_000
    assert len(TEXT["README.md"].splitlines()) <= 115
