"""bench/host.py in small: what the host does for a step grows with real tokens alone. And the page
of what was measured says of each table how old it is."""
import subprocess

from bench import host, stale
from live import Live
from tracked import ROOT


def test_padding_costs_nothing():
    """A matrix of all completions would double with the longest one, which is the last."""
    found = []
    for longest in 16_000, 32_000:
        samples = host.make_samples(64, 8, 256, longest)
        with Live() as live:
            host.learn(samples, 8, 64, 4, 512 + longest)
        found.append((live, sum(s.tokens for s in samples)))
    (short, tokens), (long, more) = found
    assert more == tokens + 16_000
    assert long.total / short.total < 1.1 * more / tokens
    assert long.largest <= 8 * more  # no tensor has more than one number a token


def test_each_table_names_its_commit_and_files_that_are_there():
    tables = stale.tables_of((ROOT / "bench/RESULTS.md").read_text())
    assert len(tables) > 10
    for table in tables:
        assert table.commit and table.files, table.name
        assert all((ROOT / name).exists() for name in table.files), table.name


PAGE = """
## Fast — `python it.py`
<!-- measured at {first}: it.py -->
| | s |
|---|---|
| tiny | 1 |

<!-- measured at {second}: it.py other.py -->
| | s |
|---|---|
| large | 2 |
## Old
<!-- measured at {first}: it.py; kept: no other
machine -->
| | s |
|---|---|
| a | 2 |
## Nothing says when
| | s |
|---|---|
| b | 2 |
## Without a table
<!-- measured at 1234567: it.py -->
"""


def test_figures_of_older_code_are_named(tmp_path, monkeypatch):
    """Of other code: comments, docstrings and layout may change."""
    def commit(text: str) -> str:
        (tmp_path / "it.py").write_text(text)
        for words in "add .", "-c user.name=a -c user.email=a commit -qm a":
            subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
        return stale.git("rev-parse", "--short", "HEAD").strip()

    monkeypatch.setattr(stale, "ROOT", tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    first, second = commit("x = 1\n"), commit("x = 2\n")
    (tmp_path / "it.py").write_text('"""It."""\nx = 2  # the same\n')
    tables = stale.tables_of(PAGE.format(first=first, second=second))
    assert [table.name for table in tables] == [
        "Fast | tiny", "Fast | large", "Old | a", "Nothing says when | b", "Without a table"]
    said = [stale.why(table) for table in tables]
    assert said[0] == said[2] == f"changed since {first}: it.py" and tables[2].kept
    assert said[1] == "not there: other.py" and said[3].startswith("no comment says")
    assert "1234567" in said[4]  # git knows no such commit
    (tmp_path / "other.py").write_text("y = 1\n")
    assert stale.why(tables[1]) == f"changed since {second}: other.py"
    assert not stale.why(tables[1]._replace(files=["it.py"]))
