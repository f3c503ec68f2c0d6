r"""Learning-rate policies by name: a linear warm-up, then polynomial, step, cosine or constant.

    polynomial           step                 cosine               constant
      /\                  /--.                 /-.                   /--------
     /   \               /   '--.             /    \                /
    /      \            /        '--         /       '-            /

A policy is a pure function from the number of updates made so far to a factor of the learning rate. With a
warm-up of W updates the factor rises as 1/(W+1), 2/(W+1), ... and is 1 for update W, so that not even the
first update is made with a rate of 0; the polynomial and the cosine reach 0 after the last update.
"""

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from vpipe.errors import VPipeError, meant

POLICIES = ("polynomial", "step", "cosine", "constant")
STEP_FACTOR = 0.1

Factor = Callable[[int], float]


def learning_rate_policy(
    name: str, warmup: int, total: int, *, power: float = 1.0, step_size: int | None = None
) -> Callable[[Optimizer], LambdaLR]:
    """The `lr_scheduler` of a Pipeline: the policy of this name for a run of `total` updates."""
    factor = learning_rate_factor(name, warmup, total, power=power, step_size=step_size)
    return lambda optimizer: LambdaLR(optimizer, factor)


def learning_rate_factor(
    name: str, warmup: int, total: int, *, power: float = 1.0, step_size: int | None = None
) -> Factor:
    """The policy as a function of the update.

    `power` is the polynomial's (1: a straight line, as BERT has it). The policy 'step' multiplies by 0.1
    every `step_size` updates after the warm-up; by default after each third of them.
    """
    if not 0 <= warmup <= total:
        raise VPipeError(
            f"the warm-up has {warmup} updates and the whole run {total}: "
            "give a warm-up of at least 0 and at most as many updates as the run has"
        )
    falling = max(1, total - warmup)
    size = -(-falling // 3) if step_size is None else step_size
    if size < 1:
        raise VPipeError(f"step_size is {step_size}: it must be at least one update")
    after_warmup: dict[str, Factor] = {
        "polynomial": lambda made: max(0.0, 1 - made / falling) ** power,
        "step": lambda made: STEP_FACTOR ** (made // size),
        "cosine": lambda made: (1 + math.cos(math.pi * min(1.0, made / falling))) / 2,
        "constant": lambda made: 1.0,
    }
    if name not in after_warmup:
        raise VPipeError(f"unknown learning-rate policy {name!r}: {meant(name, POLICIES)}")
    fall = after_warmup[name]

    def factor(update: int) -> float:
        return (update + 1) / (warmup + 1) if update < warmup else fall(update - warmup)

    return factor
