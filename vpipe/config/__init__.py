"""The configuration of a run: its keys, and the files that hold them."""

from vpipe.config.keys import RunConfig

__all__ = ["RunConfig"]
