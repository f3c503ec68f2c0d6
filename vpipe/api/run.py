"""A run's folder, read in a script or a notebook."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rich.table import Table

from vpipe.observe.picture import draw_loss, draw_timeline
from vpipe.observe.report import curves
from vpipe.observe.results import REPORT, SUMMARY
from vpipe.observe.screen import summary_table
from vpipe.record.events import read_events
from vpipe.record.run_folder import check_run_folder, read_object
from vpipe.schedule.picture import image
from vpipe.system.html import html_table


class Run:
    """A run that `vpipe train`, or a `Pipeline` with a `run_dir`, has written; in a notebook it shows itself.

        run = vpipe.Run("runs/mine")
        run.summary["samples_per_s"]
        run.losses[-1]

    Args:
        folder: The folder of the run.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        check_run_folder(self.folder)

    @property
    def summary(self) -> dict[str, Any]:
        """The contents of `summary.json`; empty as long as the run has not ended."""
        return read_object(self.folder / SUMMARY)

    @property
    def losses(self) -> list[list[float]]:
        """Pairs of the number of updates made and the loss; of a long run some of them, evenly spaced."""
        return curves(self.folder, self.summary)["losses"]

    @property
    def report(self) -> Path:
        """The path of the report, which a browser opens."""
        return self.folder / REPORT

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    def _repr_html_(self) -> str:
        """A few updates of its timeline, its loss and its figures, as far as it has them."""
        summary = self.summary
        found = curves(self.folder, summary)
        pictures = {
            "timeline": draw_timeline(read_events(self.folder)),
            "loss": draw_loss(found["losses"], found["evaluations"]),
        }
        shown = [image(picture, name) for name, picture in pictures.items() if picture is not None]
        if "ranks" in summary:
            table = summary_table(summary)
        else:  # of a run that has failed, or is not over
            table = Table(title=self.folder.name, show_header=False)
            for key in ("ended", "error", "updates", "loss"):
                if key in summary:
                    table.add_row(key, str(summary[key]))
        return "".join(shown) + html_table(table)
