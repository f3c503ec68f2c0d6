"""Observation of a run: figures, progress, report, trace, `vpipe top`, hangs, diagnosis, debugging."""
