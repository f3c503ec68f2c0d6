"""The report of one or several runs: one HTML file that needs nothing else."""

from vpipe.observe.report.page import write_report

__all__ = ["write_report"]
