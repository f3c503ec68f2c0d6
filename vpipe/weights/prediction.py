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

LAST_UPDATE = "last_update"
"""Key in an optimizer's state, so that it is saved and restored with the moments."""
AT_ONCE = 64 * 2**20
"""Bytes of parameters that are predicted together: few calls, and little memory in passing."""

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
            if delay and all(states):
                values = _expected(optimizer, group, states, values, delay)
            torch._foreach_copy_([targets[parameter] for parameter in parameters], values)


class LastUpdates:
    """Notes what an update adds where no moments say it: `begin` before the update, `end` after it."""

    def __init__(self) -> None:
        self._before: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def begin(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            if not (_is_adam(optimizer) or _is_momentum(optimizer, group)):
                given = (parameter for parameter in group["params"] if parameter.grad is not None)
                self._before |= {parameter: parameter.detach().clone() for parameter in given}

    @torch.no_grad()
    def end(self, optimizer: Optimizer) -> None:
        for parameter, before in self._before.items():
            optimizer.state[parameter][LAST_UPDATE] = before.sub_(parameter).neg_()
        self._before = {}


def _expected(
    optimizer: Optimizer, group: State, states: Sequence[State], values: list[Tensor], delay: int
) -> list[Tensor]:
    rate = -float(group["lr"]) * delay
    if _is_adam(optimizer):
        return _expected_of_adam(group, states, values, rate)
    if _is_momentum(optimizer, group):
        return list(torch._foreach_add(values, [state["momentum_buffer"] for state in states], alpha=rate))
    if all(LAST_UPDATE in state for state in states):
        return list(torch._foreach_add(values, [state[LAST_UPDATE] for state in states], alpha=delay))
    return values


def _expected_of_adam(
    group: State, states: Sequence[State], values: list[Tensor], rate: float
) -> list[Tensor]:
    beta1, beta2 = group["betas"]
    # A tensor, on a GPU one there: the host does not wait for it. In float32 its powers would be coarse.
    step = torch.as_tensor(states[0]["step"]).double()
    scales = torch._foreach_sqrt([state["exp_avg_sq"] for state in states])
    torch._foreach_div_(scales, (1 - beta2**step) ** 0.5)
    torch._foreach_add_(scales, group["eps"])
    updates = torch._foreach_div([state["exp_avg"] for state in states], scales)
    torch._foreach_mul_(updates, rate / (1 - beta1**step))
    torch._foreach_add_(updates, values)
    return list(updates)


def _is_adam(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW | torch.optim.NAdam)


def _is_momentum(optimizer: Optimizer, group: State) -> bool:
    return isinstance(optimizer, torch.optim.SGD) and group["momentum"] > 0


def _pieces(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    piece: list[nn.Parameter] = []
    for parameter in parameters:
        if piece and sum(p.nbytes for p in piece) + parameter.nbytes > AT_ONCE:
            yield piece
            piece = []
        piece.append(parameter)
    if piece:
        yield piece
