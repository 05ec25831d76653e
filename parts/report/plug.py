"""A run as a page: runs/NAME/report.html (README.md)."""
from dataclasses import dataclass

from files import write_whole
from settings import Flags as Base


@dataclass
class Flags(Base):
    """The page of a run."""
    report: bool = True
    """Write runs/NAME/report.html at the end."""


def end(run):
    """Writes the page, on rank 0."""
    log = run.log
    if run.args.parts.report.report and log.writing:
        with log.decoration("report.html is not written"):
            from parts.report import report  # nothing else needs it
            text = report.page([log.folder], log.folder, most_read=report.AT_THE_END)
            write_whole(log.folder / "report.html", text)
