"""bench/gpu.py runs: each of its parts on the tiny shape, on a CPU."""
import re

import pytest

from ranks import script


@pytest.mark.parametrize("only, lines", [
    ("update,whole,score,head", 11),
    pytest.param("compiled,sync,sleep,rollout,plan", 15, marks=pytest.mark.slow),
    pytest.param("awake,lora", 4, marks=pytest.mark.slow)])
def test_every_part_of_the_benchmark_runs_on_a_cpu(tmp_path, only, lines):
    results = tmp_path / "RESULTS.md"
    results.write_text("\n\n".join(
        ["# Measured", "## One GPU — `python bench/gpu.py`", "old", "## Next", "kept\n"]))
    script("bench/gpu.py", "--device", "cpu", "--where", tmp_path / "here", "--only", only,
           "--write", results)
    text = results.read_text()
    ours = text.partition("Others' figures")[0]
    rows = re.findall(r"^\| (\S.*) \| (.*) \|$", ours, re.MULTILINE)
    assert len(rows) == lines and "failed" not in ours and "not measured" not in ours, ours
    assert all(re.match(r"[\d.,]+ |none|8 x |1 x |only on GPU|\d", cell) for _, cell in rows), rows
    assert "old" not in text and text.endswith("## Next\n\nkept\n")
