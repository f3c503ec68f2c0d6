"""Learning-rate schedulers: made for an optimizer by the user's function, stepped at each update or by a metric."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from vpipe.errors import VPipeError

SchedulerFactory = Callable[[Optimizer], Any]
EXAMPLE = (
    "give a function of the optimizer, e.g. lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 100)"
)


def make_scheduler(factory: SchedulerFactory, optimizer: Optimizer) -> Any:
    if not callable(factory):
        raise VPipeError(f"lr_scheduler= is of type {type(factory).__name__}, not a function: {EXAMPLE}")
    try:
        scheduler = factory(optimizer)
    except TypeError as error:
        raise VPipeError(
            f"lr_scheduler= cannot be called with an optimizer alone: {error}; {EXAMPLE}"
        ) from error
    if not hasattr(scheduler, "step") or isinstance(scheduler, Optimizer):
        raise VPipeError(f"lr_scheduler= returned {type(scheduler).__name__}, not a scheduler: {EXAMPLE}")
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise VPipeError(
            f"lr_scheduler= returned a {type(scheduler).__name__} of another optimizer than the one that it was given: "
            f"{EXAMPLE}"
        )
    if driven_by_metric(scheduler):
        # Other schedulers note it themselves: so a resumed run knows what has become of it.
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))
    return scheduler


def driven_by_metric(scheduler: Any) -> bool:
    """Whether it is stepped with a value, after an evaluation, and not at each update."""
    return isinstance(scheduler, ReduceLROnPlateau)
