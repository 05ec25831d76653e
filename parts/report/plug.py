"""A run as a picture and as a page: runs/NAME/curve.png and report.html (README.md)."""
import io
from dataclasses import dataclass

import settings
from files import write_whole


@dataclass
class ReportArgs(settings.Flags):
    """The page of a run."""
    report: bool = True
    """Write runs/NAME/report.html at the end."""


Flags = ReportArgs


def end(run):
    """Draws curve.png and writes the page, on rank 0."""
    log = run.log
    if not log.writing:
        return
    with log.decoration("curve.png is not written"):
        draw(log)
    if run.args.report:
        with log.decoration("report.html is not written"):
            from parts.report import report  # nothing else needs it
            text = report.page([log.folder], log.folder, most_read=report.AT_THE_END)
            write_whole(log.folder / "report.html", text)


def draw(log) -> None:
    """Draws runs/NAME/curve.png, if the run has rewards."""
    if any(row.get("reward/mean") is not None for row in log.rows):
        from tools import plot
        picture = io.BytesIO()
        plot.draw([plot.runs_in(log.folder)], picture)
        write_whole(log.folder / "curve.png", picture.getvalue())
