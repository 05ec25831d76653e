"""The pages are true: their links lead somewhere, what they name is there, and their numbers are
those of the files. Their commands are typed by docs/walk.py."""
import importlib
import json
import re
import textwrap
from pathlib import Path

import pytest
import tyro

import grpo
import identity
import plan
import ranks
from docs import check_links
from docs.pictures import draw
from fakes import SCRIPTS
from results import environments, pipelines, table
from settings import sections
from tracked import ROOT, tracked

FILES = [str(path.relative_to(ROOT)) for path in tracked()]
TEXT = {name: (ROOT / name).read_text() for name in FILES if re.fullmatch(
    r"(README|CONTRIBUTING|AGENTS)\.md|docs/.*\.md|(exercises|variants|parts/\w+)/README\.md",
    name)}
TESTS = "".join((ROOT / name).read_text() for name in FILES if "/test_" in name)
OF_PARTS = [importlib.import_module(name.removesuffix(".py").replace("/", ".")) for name in FILES
            if re.fullmatch(r"parts/\w+/\w+\.py", name)
            and "class Args(" in (ROOT / name).read_text()]
FLAGS = {name for script in [*SCRIPTS.values(), *OF_PARTS] for name in vars(script.Args())}
OTHERS = {"local_addr", "nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id",
          "max_restarts", "shutdown-timeout",  # torchrun's
          "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time",
          "signal",  # Slurm's
          "sort", "fix", "write", "solution", "help", "kills", "script", "show", "short", "setup",
          "only", "list", "limit", "shapes", "runs",  # of our tools
          "num_generations", "gpus", "config", "tasks", "model_args", "flag"}  # of other systems


def bare(text: str) -> str:
    """A page without its code blocks."""
    return re.sub("^ *```.*?^ *```$", "", text, flags=re.S | re.M)


def rows(page: str, heading: str = "") -> list[list[str]]:
    """The cells of the tables of a page, below a heading that contains `heading`."""
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for section in re.split("^##? ", TEXT[page], flags=re.M)
            if heading in section.split("\n")[0]
            for line in section.splitlines() if line.startswith("|")]


# ---- names and links

def test_every_link_leads_to_a_file_and_a_heading_or_to_the_code_that_it_shows():
    """And every page of docs/ and parts/ is two clicks from the README."""
    pages = {path: path.read_text() for path in tracked() if path.suffix == ".md"}
    headings = {page: {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
                       for heading in re.findall("^#+ (.*)$", text, re.M)}
                for page, text in pages.items()}
    for page, text in pages.items():
        for name, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", bare(text)):
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), (page, name)
            assert re.fullmatch(r"(L\d+)?", anchor) or anchor in headings[target], (page, anchor)
    home = ROOT / "README.md"
    clicked = {home}
    for _ in range(2):
        clicked |= {(page.parent / name).resolve() for page in clicked & {*pages}
                    for name in re.findall(r"\]\((?!http)([^)#\s]+)", pages[page])}
    assert not [name for name in TEXT if ROOT / name not in clicked]
    for page in check_links.pages():
        assert not check_links.check(page) and not check_links.unlinked(page), page


def test_a_comment_that_begins_a_line_stands_alone():
    """Markdown ends the paragraph there, and shows the rest of the line as raw HTML."""
    begun = re.compile(r"^ {0,3}<!--.*?-->.*\S.*$", re.M)
    assert not [(path.name, line) for path in tracked() if path.suffix == ".md"
                for line in begun.findall(bare(path.read_text()))]


@pytest.mark.parametrize("page", TEXT)
def test_flags_and_files_that_a_page_names_are_there(page):
    named = {*re.findall(r"(?<![\w-])--(?:no-)?([a-z][a-z_-]*)", TEXT[page])}
    assert not named - FLAGS - OTHERS
    ours = TEXT[page].partition("## I come from")[0]  # what stands below are names of others
    assert all(f"def {name}(" in TESTS for name in re.findall(r"`(test_\w+)`", ours))
    theirs = {"mine.py", "my_grpo.py", "my_rewards.py", "FILE.py", "free.py", "near.py", "MINE.py",
              *re.findall(r"cat > (\w+\.py)", "".join(TEXT.values()))}
    for code in re.findall(r"`([^`\n]+)`", bare(TEXT[page]).partition("## I come from")[0]):
        for name in re.findall(r"(?<!FILE\.)\b[\w/]+\.(?:py|md|sh|html|svg)\b", code):
            there = (ROOT / name).exists() or name in theirs
            assert there or Path(name).name in {Path(file).name for file in FILES}, name


def test_the_page_lists_what_may_not_change_in_a_resumed_run():
    text = bare(TEXT["docs/reference/metrics_and_files.md"])
    listed = re.search(r"is refused in one sentence:(.*?)Anything\s+else", text, re.S)[1]
    fixed = identity.FIXED.union(*(section.fixed for section in sections(grpo.Args())))
    assert {*re.findall("--(\\w+)", listed)} == fixed & FLAGS


# ---- code and numbers

def test_the_flags_of_an_algorithm_are_accepted():
    """Of each row of the tables; the walk types none. --update_tokens is left to the reader."""
    seen = 0
    for page in "docs/use/recipes.md", "variants/README.md":
        for _, cell, *_ in rows(page, "Algorithms"):
            if not re.match("`(ppo.*)?-", cell):
                continue
            words = cell.strip("`").split()
            script = SCRIPTS["ppo" if words[0] == "ppo.py" else "grpo"]
            args = tyro.cli(script.Args, args=[word for word in words if word != "ppo.py"],
                            use_underscores=True, config=(tyro.conf.OmitArgPrefixes,))
            args.lr = 1e-6
            found = plan.problems(args, 4, 7473)
            assert all(text.startswith("--update_tokens ") for text in found), (cell, found)
            seen += 1
    assert seen > 20


def test_the_idea_of_the_readme_is_ten_lines_of_nano():
    """They stand there one below the other: nothing is left out."""
    shown = re.search(r"```python\n(.*?)```", TEXT["README.md"], re.S)[1]
    assert shown.count("\n") == 10
    assert f"\n{textwrap.indent(shown, ' ' * 8)}" in (ROOT / "nano.py").read_text()


def test_the_readme_has_the_lines_of_each_file_in_front():
    """To the nearest ten, or one beside: an edit of a few lines does not make it wrong. The eight
    of a step are those of its picture."""
    page, lines = TEXT["README.md"], {
        name: (ROOT / name).read_text().count("\n") for name in FILES
        if name.endswith(".py") and "/" not in name}
    listed = page.partition("## The files")[2].partition("\n## ")[0]
    eight = dict(re.findall(r"^\| \[(\w+\.py)\]\(\1\) \| (\d+) \|", listed, re.M))
    others = dict(re.findall(r"`(\w+\.py)` (\d+)", listed))
    assert len(eight) == 8 and {*eight} | {*others} | {"nano.py"} == {*lines}
    assert f"The other {len(others)} files" in listed
    assert f"`nano.py` is the algorithm in {lines.pop('nano.py')} lines" in page
    for name, said in (eight | others).items():
        assert abs(lines[name] - int(said)) <= 10, (name, lines[name], said)
    count, total = re.search(r"the core is\s+(\d+)\s+files, ([\d,]+) lines", page).groups()
    assert int(count) == len(lines)
    assert abs(sum(lines.values()) - int(total.replace(",", ""))) <= 100
    bold = re.findall("<text[^>]*bold[^>]*>(.*?)<", draw.step())
    assert {*re.findall(r"\w+\.py", " ".join(bold))} == {*eight}


@pytest.mark.parametrize("name", draw.PICTURES)
def test_a_picture_is_what_its_numbers_draw(name):
    assert draw.PICTURES[name]() == (ROOT / f"docs/pictures/{name}.svg").read_text()


SOUGHT = """must be divisible by num_generations; real_train_batch_size; infer_tp; sleep mode;
not synchronized; mismatch; model_merger; custom_reward_function; extra_info; breakpoint;
compute_metrics; num_generations_eval; best checkpoint; early stopping; different number of GPUs;
tensorboard; curriculum; sandbox"""  # what users of other systems search for


@pytest.mark.parametrize("phrase", SOUGHT.replace("\n", " ").split("; "))
def test_what_users_search_for_has_a_line(phrase):
    """Beside it stands what does that here: a flag, a file or a page."""
    found = [row for row in rows("docs/use/recipes.md", "Errors of other systems")
             if phrase.lower() in row[0].lower()]
    assert len(found) == 1 and re.search(r"`[^`]*(--\w|\.\w|/\w)[^`]*`", found[0][1]), found


@pytest.mark.parametrize("page", ["reward_to_loss", "one_step"])
def test_a_page_prints_what_it_says(page):
    ranks.script("tests/pages.py", f"docs/learn/{page}.md")


def test_pages_that_a_command_writes_have_the_numbers_of_its_files():
    """The tables of results/ are what their commands print of the committed runs."""
    page = (table.HERE / "README.md").read_text()
    assert page.partition(table.BEGIN)[2] == table.table() + table.by_kind() + table.credit()
    for made in pipelines, environments:
        assert made.PAGE.read_text() == made.page(json.loads(made.FILE.read_text()))


def test_each_finding_runs_alone_and_has_its_row_in_the_table():
    """It is sent to people as one file."""
    scripts = {name: (ROOT / name).read_text() for name in FILES if re.match("findings/.*sh", name)}
    starts = set()
    for name, text in scripts.items():
        start, _, rest = text.partition("PINS=(")[2].partition(")\n")[2].partition("\n\n")
        starts.add(start[:start.index("pip freeze")])
        assert not re.search(r'\bsource\b|"\$0"|BASH_SOURCE|findings/|\.\./', text), name
        assert re.search(r"assert |\[ .*==? ", rest) and "\n# Seen on " in text, name
        assert set(re.findall(r"^#   ([\w-]+)==", text, re.M)) <= {
            pin.partition("==")[0] for pin in re.findall(r"\S+==[\d.]+", text)}, name
    assert len(starts) == 1 and "mktemp -d" in starts.pop()
    shown = re.findall(r"([a-z_0-9]+\.sh)`", TEXT["docs/reference/libraries.md"])
    assert {*shown} == {Path(name).name for name in scripts}
