"""tools/report.py RUN [RUN ...]: parts/report/report.py, by its usual name."""
import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parents[1] / "parts/report/report.py"), run_name="__main__")
