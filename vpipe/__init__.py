"""vpipe: pipeline-parallel training for any PyTorch module, with every schedule as data."""

from typing import TYPE_CHECKING, Any

from vpipe.errors import VPipeError

if TYPE_CHECKING:
    from vpipe.graph import capture
    from vpipe.pipeline import Pipeline
    from vpipe.schedule import Schedule
    from vpipe.weights import optimizer_groups

__version__ = "0.1.0"
__all__ = ["Pipeline", "Schedule", "VPipeError", "capture", "optimizer_groups"]

# Imported on first use: `vpipe --help` and `vpipe schedule` must not wait for torch.
_HOMES = {
    "Pipeline": "vpipe.pipeline",
    "Schedule": "vpipe.schedule",
    "capture": "vpipe.graph",
    "optimizer_groups": "vpipe.weights",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'vpipe' has no attribute {name!r}")
