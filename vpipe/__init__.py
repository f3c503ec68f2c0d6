"""vpipe: pipeline-parallel training for any PyTorch module, with every schedule as data."""

from typing import TYPE_CHECKING, Any

from vpipe.errors import VPipeError

if TYPE_CHECKING:
    from vpipe.api import Loader, Run
    from vpipe.api import UserPipeline as Pipeline
    from vpipe.graph import capture
    from vpipe.pipeline.threads import run_ranks
    from vpipe.plan import plan
    from vpipe.profile import profile
    from vpipe.schedule import Schedule
    from vpipe.simulate import simulate
    from vpipe.verify import verify
    from vpipe.weights import optimizer_groups

__version__ = "0.1.0"
__all__ = [
    "Loader",
    "Pipeline",
    "Run",
    "Schedule",
    "VPipeError",
    "capture",
    "optimizer_groups",
    "plan",
    "profile",
    "run_ranks",
    "simulate",
    "verify",
]

# Imported on first use: `vpipe --help` and `vpipe schedule` must not wait for torch. The packages of plan, profile,
# simulate and verify can be called: each is its main function.
_HOMES = {
    "Loader": "vpipe.api:Loader",
    "Pipeline": "vpipe.api:UserPipeline",
    "Run": "vpipe.api:Run",
    "Schedule": "vpipe.schedule:Schedule",
    "capture": "vpipe.graph:capture",
    "optimizer_groups": "vpipe.weights:optimizer_groups",
    "run_ranks": "vpipe.pipeline.threads:run_ranks",
    **{name: f"vpipe.{name}" for name in ("plan", "profile", "simulate", "verify")},
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        module, _, attribute = _HOMES[name].partition(":")
        home = import_module(module)
        return getattr(home, attribute) if attribute else home
    raise AttributeError(f"module 'vpipe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
