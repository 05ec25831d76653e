"""bench/gpu.py runs: each of its parts on the tiny shape, on a CPU."""
import re

import pytest

from ranks import script


@pytest.mark.parametrize("only, lines", [
    ("update,whole,score,short,head", 12),
    pytest.param("compiled,rollout", 5, marks=pytest.mark.slow),
    pytest.param("run,awake,lora", 9, marks=pytest.mark.slow)])
def test_every_part_of_the_benchmark_runs_on_a_cpu(tmp_path, only, lines):
    """Each figure is printed when it is there, and stands in the table at the end."""
    results = tmp_path / "RESULTS.md"
    results.write_text("\n\n".join(
        ["# Measured", "## One GPU — `python bench/gpu.py`", "old", "## Next", "kept\n"]))
    done = script("bench/gpu.py", "--device", "cpu", "--where", tmp_path / "here", "--only", only,
                  "--write", results)
    text = results.read_text()
    ours = text.partition("Others' figures")[0]
    rows = re.findall(r"^\| (\S.*) \| (.*) \|$", ours, re.MULTILINE)
    assert len(rows) == lines and "failed" not in ours and "not measured" not in ours, ours
    cell = r"[\d.,]+ |none|8 x |1 x |only on GPU|\d|trainer and transformers |skipped "
    assert all(re.match(cell, found) for _, found in rows), rows
    assert all(f"tiny  {row}: {found}\n" in done.stdout for row, found in rows), done.stdout
    assert "old" not in text and text.endswith("## Next\n\nkept\n")


def test_a_part_that_takes_too_long_is_killed_and_the_next_one_runs(tmp_path):
    done = script("bench/gpu.py", "--device", "cpu", "--where", tmp_path, "--only",
                  "head,lora", "--limit", "0.1")
    said = re.findall(r"^tiny  (\w+) failed: killed after 0 s", done.stdout, re.M)
    assert said == ["make", "head", "lora"], done.stdout
