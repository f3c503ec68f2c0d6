"""Predicted weights: a forward reads the weights as they will be when its gradient is applied.

In an asynchronous schedule `delay` updates are made between the forward of a minibatch and its own update. Its forward
then reads, instead of the newest weights w,

    w + delay * d        d: what the next update is expected to add to w

d follows from the optimizer's own moments where it has them (Adam, NAdam, SGD with momentum), as the update of a
gradient that equals their mean; otherwise it is what the last update has added. The backward reads the same weights as
the forward, so the gradient belongs to one point.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

PREVIOUS = "previous_weights"
"""Key in an optimizer's state, so that it is saved and restored with the moments."""
LARGE = 2**16
"""Elements from which a parameter is predicted alone: what is computed on the way stays in the cache of a GPU, and the
last operation writes the version itself. Smaller ones are predicted together, by few calls."""

State = Mapping[str, Any]


class Delay(NamedTuple):
    """Updates between the weights that a forward reads and the update of its own gradient."""

    own: int = 0
    tied: Mapping[str, int] = {}
    """Of parameters that several stages hold, by name: later holders apply them later."""


@torch.no_grad()
def write_predicted(optimizer: Optimizer, delay: int, targets: Mapping[nn.Parameter, Tensor]) -> None:
    """Write each parameter into its target, as it is expected to be `delay` updates later."""
    for group in optimizer.param_groups:
        for parameters in _pieces(group["params"]):
            states = [optimizer.state.get(parameter, {}) for parameter in parameters]
            values: list[Tensor] = [parameter.detach() for parameter in parameters]
            written = [targets[parameter] for parameter in parameters]
            if not (
                delay and all(states) and _write_expected(optimizer, group, states, values, delay, written)
            ):
                torch._foreach_copy_(written, values)


class PreviousWeights:
    """Keeps the weights before an update where no moments say what it adds: `begin` before it, `end` after it."""

    def __init__(self) -> None:
        self._before: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def begin(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            if not (_is_adam(optimizer) or _is_momentum(optimizer, group)):
                for parameter in (given for given in group["params"] if given.grad is not None):
                    kept = optimizer.state.get(parameter, {}).get(PREVIOUS)
                    kept = torch.empty_like(parameter) if kept is None else kept
                    self._before[parameter] = kept
        if self._before:
            torch._foreach_copy_(list(self._before.values()), list(self._before))

    def end(self, optimizer: Optimizer) -> None:
        for parameter, before in self._before.items():
            optimizer.state[parameter][PREVIOUS] = before
        self._before = {}


def _write_expected(
    optimizer: Optimizer,
    group: State,
    states: Sequence[State],
    values: list[Tensor],
    delay: int,
    targets: list[Tensor],
) -> bool:
    """False: nothing is known of the next update."""

    def of(key: str) -> list[Tensor]:
        return [state[key] for state in states]

    alone = len(values) == 1
    rate = -float(group["lr"]) * delay
    if _is_adam(optimizer):
        means, scales = of("exp_avg"), _scales_of_adam(group, states, rate)
        if alone:
            torch.addcdiv(values[0], means[0], scales[0], out=targets[0])
        else:
            torch._foreach_copy_(targets, torch._foreach_addcdiv(values, means, scales))
    elif _is_momentum(optimizer, group):
        means = of("momentum_buffer")
        if alone:
            torch.add(values[0], means[0], alpha=rate, out=targets[0])
        else:
            torch._foreach_copy_(targets, torch._foreach_add(values, means, alpha=rate))
    elif all(PREVIOUS in state for state in states):
        before = of(PREVIOUS)
        if alone:
            torch.lerp(before[0], values[0], 1 + delay, out=targets[0])
        else:
            torch._foreach_copy_(targets, torch._foreach_lerp(before, values, 1 + delay))
    else:
        return False
    return True


def _scales_of_adam(group: State, states: Sequence[State], rate: float) -> list[Tensor]:
    """What a first moment is divided by to be an update of this rate, all corrections for the beginning included."""
    beta1, beta2 = group["betas"]
    # A tensor, on a GPU one there: the host does not wait for it. In float32 its powers would be coarse.
    step = torch.as_tensor(states[0]["step"]).double()
    root = (1 - beta2**step) ** 0.5
    factor = (1 - beta1**step) / root / torch.full_like(step, rate)  # of a rate of 0: infinite
    scales = torch._foreach_sqrt([state["exp_avg_sq"] for state in states])
    dtype = scales[0].dtype
    torch._foreach_add_(scales, (group["eps"] * root).to(dtype))
    torch._foreach_mul_(scales, factor.to(dtype))
    return list(scales)


def _is_adam(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW | torch.optim.NAdam)


def _is_momentum(optimizer: Optimizer, group: State) -> bool:
    return isinstance(optimizer, torch.optim.SGD) and group["momentum"] > 0


def _pieces(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    small = [parameter for parameter in parameters if parameter.numel() < LARGE]
    if small:
        yield small
    yield from ([parameter] for parameter in parameters if parameter.numel() >= LARGE)
