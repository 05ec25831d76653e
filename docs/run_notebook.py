"""Runs the code cells of a notebook in order, in one namespace. Jupyter is not needed.

    python docs/run_notebook.py docs/learn/tour.ipynb          # compare with what is kept
    python docs/run_notebook.py docs/learn/tour.ipynb --write  # keep the outputs of this run

An output is the text that a cell prints, and the figures that it draws. The text must be equal. A
cell whose numbers depend on the processor has "tolerance" in its metadata: there the words must be
equal, and each number within this tolerance. Of figures only the number is compared, because
their pixels depend on fonts. A cell must not print times, paths or other things that change.
"""
import base64
import io
import json
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

NUMBER = r"-?\d+\.\d+"


def same(kept: str, printed: str, tolerance: float) -> bool:
    """Equal; or, with a tolerance, equal words and numbers that are near each other."""
    if not tolerance:
        return kept == printed
    if re.sub(NUMBER, "#", kept).split() != re.sub(NUMBER, "#", printed).split():
        return False
    pairs = zip(re.findall(NUMBER, kept), re.findall(NUMBER, printed), strict=True)
    return all(abs(float(a) - float(b)) <= tolerance for a, b in pairs)


def figures() -> list[bytes]:
    """The open figures of pyplot, as PNG. They are closed, as Jupyter does after a cell."""
    plt = sys.modules.get("matplotlib.pyplot")
    found = []
    for number in plt.get_fignums() if plt else []:
        plt.figure(number).savefig(file := io.BytesIO(), format="png", dpi=80)
        found.append(file.getvalue())
    if plt:
        plt.close("all")
    return found


def run_cell(cell: dict, names: dict, place: str) -> list[dict]:
    """Runs the cell in `names` → its outputs, as nbformat 4 has them."""
    with redirect_stdout(text := io.StringIO()):
        exec(compile("".join(cell["source"]), place, "exec"), names)
    outputs = [{"output_type": "display_data", "metadata": {}, "data": {
        "image/png": base64.b64encode(png).decode(), "text/plain": ["a figure"]}}
        for png in figures()]
    if text.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout",
                        "text": text.getvalue().splitlines(keepends=True)})
    return outputs


def text_of(outputs: list[dict]) -> str:
    return "".join("".join(one["text"]) for one in outputs if one["output_type"] == "stream")


def differs(cell: dict, outputs: list[dict]) -> str:
    """What the cell gives now and what it gave, if they are not the same. Else nothing."""
    kept, tolerance = cell["outputs"], cell["metadata"].get("tolerance", 0)
    count, kept_count = (sum(one["output_type"] == "display_data" for one in some)
                         for some in (outputs, kept))
    if count == kept_count and same(text_of(kept), text_of(outputs), tolerance):
        return ""
    return (f"gives {count} figures and\n{text_of(outputs)}"
            f"and the notebook keeps {kept_count} figures and\n{text_of(kept)}")


def run(path: Path, write: bool) -> bool:
    """Whether every cell gives what the notebook keeps. With write: what it gives is kept."""
    notebook, names, right = json.loads(path.read_text()), {"__name__": "__main__"}, True
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, 1):
        outputs = run_cell(cell, names, f"{path.name}, code cell {number}")
        if write:
            cell["outputs"], cell["execution_count"] = outputs, number
        elif difference := differs(cell, outputs):
            right = False
            print(f"{path.name}: code cell {number} {difference}", file=sys.stderr)
    if write:
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    return right


if __name__ == "__main__":
    import matplotlib
    matplotlib.use("agg")  # no window
    right = run(Path(sys.argv[1]), "--write" in sys.argv)
    if right:
        print(f"{sys.argv[1]}: every cell gives what the notebook keeps")
    sys.exit(not right)
