"""The pages for learning are true: what they print, draw, link to, cite and ask."""
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("docs", "docs/pictures")]
import check_links  # noqa: E402
import draw  # noqa: E402
import run_notebook  # noqa: E402

from forked import PYTHON  # noqa: E402


def python(*command: str):
    return subprocess.run([PYTHON, *command], cwd=ROOT, capture_output=True, text=True,
                          timeout=600)


def tables(page: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]]
            for line in (ROOT / page).read_text().splitlines() if line.startswith("| ")]


@pytest.mark.parametrize(
    "page", ["choices_and_gap", "reward_to_loss", "one_step", "second_update"])
def test_a_page_prints_what_it_says(page):
    done = python("tests/pages.py", f"docs/learn/{page}.md")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_page_with_a_wrong_number_is_found(tmp_path):
    page = "```python\nprint('loss', 0.5)\n```\n\n```text\nloss 0.5002\n```\n"
    (tmp_path / "page.md").write_text(page)
    assert python("tests/pages.py", str(tmp_path / "page.md")).returncode == 1
    (tmp_path / "page.md").write_text(page.replace("0.5002", "0.5000"))
    assert python("tests/pages.py", str(tmp_path / "page.md")).returncode == 0


def test_the_notebook_gives_what_it_keeps():
    before = {*ROOT.glob("runs/tour-*")}
    done = python("docs/run_notebook.py", "docs/learn/tour.ipynb")
    for folder in {*ROOT.glob("runs/tour-*")} - before:
        shutil.rmtree(folder)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_notebook_was_run_from_its_first_cell_to_its_last():
    cells = json.loads((ROOT / "docs/learn/tour.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    kinds = [one["output_type"] for cell in code for one in cell["outputs"]]
    assert kinds.count("stream") >= 10 and kinds.count("display_data") == 1
    for cell in cells:
        for link in re.findall(r"\]\(([^)#]+)", "".join(cell["source"])):
            assert (ROOT / "docs/learn" / link).is_file(), link


@pytest.mark.parametrize("code, kept, tolerance, right", [
    ("print('loss', 0.5)", "loss 0.5\n", None, True),
    ("print('loss', 0.5)", "loss 0.5000001\n", None, False),
    ("print('loss', 0.5)", "loss 0.45\n", 0.1, True),
    ("print('loss', 0.5)", "loss 0.39\n", 0.1, False),
    ("print('loss', 0.5)", "reward 0.5\n", 0.1, False),
    ("print('loss', 0.5)", "loss 0.5 0.5\n", 0.1, False),
    ("x = 1", "1\n", None, False), ("print(1)", "", None, False)])
def test_a_notebook_that_gives_something_else_is_found(tmp_path, code, kept, tolerance, right):
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "execution_count": 1, "outputs": [],
            "source": ["y = 1\n", code]}
    if tolerance:
        cell["metadata"]["tolerance"] = tolerance
    if kept:
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": [kept]}]
    path = tmp_path / "page.ipynb"
    path.write_text(json.dumps({"cells": [cell]}))
    assert run_notebook.run(path, write=False) == right
    run_notebook.run(path, write=True)
    assert run_notebook.run(path, write=False)


def test_a_figure_that_a_notebook_lost_is_found():
    figure = {"output_type": "display_data", "metadata": {}, "data": {"image/png": ""}}
    cell = {"metadata": {}, "outputs": [figure]}
    assert run_notebook.differs(cell, []) and run_notebook.differs(cell, [figure, figure])
    assert not run_notebook.differs(cell, [figure])


def test_links_to_lines_point_to_the_code_that_they_show(tmp_path):
    assert not [sentence for page in check_links.pages() for sentence in check_links.check(page)]
    assert sum(page.read_text().count(".py#L") for page in check_links.pages()) > 70
    (tmp_path / "file.py").write_text("a = 1\nb = 2\nb = 3\n")
    (tmp_path / "page.md").write_text("[`a = 1`](file.py#L2) [`b = `](file.py#L2)")
    assert len(check_links.check(tmp_path / "page.md")) == 2
    assert len(check_links.check(tmp_path / "page.md", fix=True)) == 1    # b is there twice
    assert "[`a = 1`](file.py#L1)" in (tmp_path / "page.md").read_text()


def test_every_claim_about_another_project_has_a_thread_or_a_commit(tmp_path):
    assert not [sentence for page in check_links.pages() for sentence in check_links.unlinked(page)]
    page, url = tmp_path / "page.md", "https://github.com/a/b"
    for text, right in (
            ("TRL had this bug.", False), (f"[TRL 7]({url}/issues/7) had this bug.", True),
            (f"[TRL]({url}) had this bug.", False), ("TRL has `beta`.", True),
            (f"* [verl]({url}/blob/{'0' * 40}/x.py#L7) fails.\n* verl hangs.", False),
            (f"[verl]({url}/blob/main/x.py) fails.", False), ("See verl#7.", False),
            (f"[verl][x] fails.\n\n[x]: {url}/blob/{'0' * 40}/x.py#L7", True),
            (f"[verl][x] fails.\n\n[y]: {url}/issues/7", False)):
        page.write_text(text + "\n")
        assert (not check_links.unlinked(page)) == right, text


@pytest.mark.parametrize("name", draw.PICTURES)
def test_pictures_are_what_the_script_draws(name):
    assert (ROOT / f"docs/pictures/{name}.svg").read_text() == draw.PICTURES[name]()
    assert any(f"](../pictures/{name}.svg)" in page.read_text() for page in check_links.pages())


def test_the_table_of_five_algorithms_is_that_of_their_curves():
    curves, mean = json.loads((ROOT / "bench/curves.json").read_text()), lambda x: sum(x) / len(x)
    rows = [row for row in tables("docs/learn/algorithms.md") if row[1][:1] == "0"]
    for (name, seeds), row in zip(curves.items(), rows, strict=True):
        runs = [*seeds.values()]
        assert len(runs) == 3 and {len(run["reward"]) for run in runs} == {35}, name
        assert row[1:] == [
            f"{mean([mean(run['reward'][:3]) for run in runs]):.3f}",
            f"{mean([mean(run['reward'][-10:]) for run in runs]):.3f}",
            f"{mean([[r >= 0.9 for r in run['reward']].index(True) + 1 for run in runs]):.1f}",
            f"{mean([run['completions'] for run in runs]):,.0f}", str(runs[0]["updates"]),
            f"{mean([run['clip_frac'] for run in runs]):.3f}"]
    page = (ROOT / "docs/learn/algorithms.md").read_text().replace("\\\n", " ")
    for flag in {flag for seeds in curves.values() for flag in seeds["0"]["flags"].split()}:
        assert flag in page


def test_every_figure_of_the_evidence_is_in_its_source():
    rows = [row for row in tables("docs/reference/evidence.md") if (ROOT / row[-1]).is_file()]
    assert len(rows) >= 10
    for what, figure, source in rows:
        if source.endswith(".md"):
            assert re.search(rf"(?<![\d.-]){re.escape(figure)}", (ROOT / source).read_text()), what
    families = [row for row in tables("docs/reference/evidence.md")
                if len(row) == 5 and "e-" in row[3]]
    figures = {row[0]: row[1] for row in rows}
    assert len(families) == 22
    for column, who in ((3, "trainer and transformers"), (4, "engine and trainer")):
        assert float(figures[f"{who}, 22 models"]) == max(float(row[column]) for row in families)
    layouts = (ROOT / "tests/test_layouts.py").read_text()
    assert "[(0, 5)] + [(seed, 2) for seed in range(1, 10)]" in layouts    # 10 seeds
    assert layouts.count("difference(ran.weights, one.weights) < 1e-5") == 1
    others = re.findall(r"\([124], [12], \(|same\(run\(tmp_path, \"-", layouts)
    assert str(len(others)) == figures["other layouts: machines, shardings, engines"]


def test_the_citation_is_complete():
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "license"} <= found.keys()


def test_each_page_has_five_questions():
    asked = re.split("^## ", (ROOT / "tests/questions.md").read_text(), flags=re.M)[1:]
    for part in asked:
        assert (ROOT / part.split("\n")[0]).is_file()
        assert len(re.findall(r"^\d\. .*\?", part, re.M)) == len(re.findall(r"\?\s+\*", part)) == 5
    assert len(asked) >= 8
