"""A run as a page: runs/NAME/report.html (README.md)."""
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
    """Writes the page, on rank 0."""
    log = run.log
    if run.args.report and log.writing:
        with log.decoration("report.html is not written"):
            from parts.report import report  # nothing else needs it
            text = report.page([log.folder], log.folder, most_read=report.AT_THE_END)
            write_whole(log.folder / "report.html", text)
