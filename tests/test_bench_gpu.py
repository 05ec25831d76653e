"""bench/gpu.py runs: each of its parts on the tiny shape, on a CPU. It had failed at its first line
for weeks before anyone had a GPU to run it on."""
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_part_runs_on_a_cpu(tmp_path):
    results = tmp_path / "RESULTS.md"
    results.write_text("# Measured\n\n## One GPU — `python bench/gpu.py`\n\nold\n\n## Next\n\nkept\n")
    done = subprocess.run(
        [sys.executable, "bench/gpu.py", "--device", "cpu", "--where", str(tmp_path / "here"),
         "--write", str(results)], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    text = results.read_text()
    ours, _, others = text.partition("Others' figures")
    rows = re.findall(r"^\| (\S.*) \| (.*) \|$", ours, re.MULTILINE)
    assert len(rows) == 20 and "failed" not in ours and "not measured" not in ours, ours
    assert all(re.match(r"[\d.,]+ |none|8 x |1 x |only on GPU|\d", cell) for _, cell in rows), rows
    assert "CPU, only to see that it runs" in ours and "old" not in text
    assert "Nothing in this table was measured here" in re.sub(r"\s+", " ", others)
    assert "prime-rl" in others and text.endswith("## Next\n\nkept\n")
