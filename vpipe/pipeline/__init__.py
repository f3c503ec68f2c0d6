"""The pipeline that users hold: its layout, its assembly, its loop over the data."""

from vpipe.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
