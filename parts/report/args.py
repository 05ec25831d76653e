"""args.py: the flag of the page, and what writes it at the end of a run."""
from dataclasses import dataclass

from log import Log, write_whole


@dataclass
class ReportArgs:
    """The page of a run."""
    report: bool = True
    """Write runs/NAME/report.html at the end."""

    def write(self, log: Log):
        """The page of this run, by rank 0."""
        if self.report and log.writing:
            with log.decoration("report.html is not written"):
                from parts.report import report  # nothing else needs it
                text = report.page([log.folder], log.folder, most_read=report.AT_THE_END)
                write_whole(log.folder / "report.html", text)
