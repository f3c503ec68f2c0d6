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

from vpipe.weights.prediction_kernel import ADAM, LAST, MOMENTUM, Row, compiled_kernel

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
        known = _with_known_updates(optimizer, group) if delay else []
        if known:
            _write_expected(optimizer, group, known, delay, targets)
        among = set(known)
        others = [parameter for parameter in group["params"] if parameter not in among]
        if others:
            torch._foreach_copy_([targets[parameter] for parameter in others], others)


class PreviousWeights:
    """Keeps the weights before an update where no moments say what it adds: `begin` before it, `end` after it.

    An update that a flag on the device leaves out (`found_inf` of the optimizer) changes nothing here either.
    """

    def __init__(self) -> None:
        self._before: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def begin(self, optimizer: Optimizer, flag: Tensor | None = None) -> None:
        for group in optimizer.param_groups:
            if not (_is_adam(optimizer) or _is_momentum(optimizer, group)):
                for parameter in (given for given in group["params"] if given.grad is not None):
                    kept = optimizer.state.get(parameter, {}).get(PREVIOUS)
                    kept = parameter.detach().clone() if kept is None else kept
                    self._before[parameter] = kept
        if flag is not None:
            for parameter, kept in self._before.items():
                torch.where(flag > 0, kept, parameter, out=kept)
        elif self._before:
            torch._foreach_copy_(list(self._before.values()), list(self._before))

    def end(self, optimizer: Optimizer) -> None:
        for parameter, before in self._before.items():
            optimizer.state[parameter][PREVIOUS] = before
        self._before = {}


def _with_known_updates(optimizer: Optimizer, group: State) -> list[nn.Parameter]:
    """The parameters whose state says what the next update is expected to add."""
    having = [parameter for parameter in group["params"] if optimizer.state.get(parameter)]
    if _is_adam(optimizer) or _is_momentum(optimizer, group):
        return having
    return [parameter for parameter in having if PREVIOUS in optimizer.state[parameter]]


def _write_expected(
    optimizer: Optimizer,
    group: State,
    parameters: Sequence[nn.Parameter],
    delay: int,
    targets: Mapping[nn.Parameter, Tensor],
) -> None:
    kind, keys, rate = LAST, [PREVIOUS], -float(delay)  # the last update once more for each of the delay
    corrections = None
    if _is_adam(optimizer):
        kind, keys, rate = ADAM, ["exp_avg", "exp_avg_sq"], -float(group["lr"]) * delay
        corrections = _corrections_of_adam(group, optimizer.state[parameters[0]], rate)
    elif _is_momentum(optimizer, group):
        kind, keys, rate = MOMENTUM, ["momentum_buffer"], -float(group["lr"]) * delay
    rows = [(p, *(optimizer.state[p][key] for key in keys), targets[p]) for p in parameters]
    kernel = compiled_kernel() if parameters[0].is_cuda else None
    on_device = None if corrections is None else corrections.to(rows[0][0].device)
    if kernel is None or not kernel(rows, kind, on_device, rate):
        _write_by_operations(rows, kind, corrections, rate)


def _write_by_operations(rows: Sequence[Row], kind: int, corrections: Tensor | None, rate: float) -> None:
    """What the kernel does, by operations of torch."""
    for piece in _pieces(rows):
        weights, *operands, written = (list(column) for column in zip(*piece, strict=True))
        operation: Any
        operations: Any
        options: dict[str, float] = {}
        if corrections is not None:
            offset, factor = corrections.unbind()
            scales = torch._foreach_sqrt(operands.pop())
            torch._foreach_add_(scales, offset)
            torch._foreach_mul_(scales, factor)
            operation, operations = torch.addcdiv, torch._foreach_addcdiv
            operands.append(list(scales))
        elif kind == MOMENTUM:
            operation, operations, options = torch.add, torch._foreach_add, {"alpha": rate}
        else:
            operation, operations, options = torch.lerp, torch._foreach_lerp, {"weight": rate}
        if len(piece) == 1:
            operation(weights[0], *(operand[0] for operand in operands), **options, out=written[0])
        else:
            torch._foreach_copy_(written, operations(weights, *operands, **options))


def _corrections_of_adam(group: State, state: State, rate: float) -> Tensor:
    """Offset and factor: an update of this rate is the first moment / ((root of the second + offset) * factor).

    Parameters of a group have made equally many updates, so these numbers are computed once for all of them.
    """
    beta1, beta2 = group["betas"]
    # A tensor, on a GPU one there: the host does not wait for it. In float32 its powers would be coarse.
    step = torch.as_tensor(state["step"]).double()
    root = (1 - beta2**step) ** 0.5
    factor = (1 - beta1**step) / root / torch.full_like(step, rate)  # of a rate of 0: infinite
    dtype = state["exp_avg"].dtype
    return torch.stack([group["eps"] * root, factor]).to(dtype)


def _is_adam(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW | torch.optim.NAdam)


def _is_momentum(optimizer: Optimizer, group: State) -> bool:
    return isinstance(optimizer, torch.optim.SGD) and group["momentum"] > 0


def _pieces(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    small = [row for row in rows if row[0].numel() < LARGE]
    if small:
        yield small
    yield from ([row] for row in rows if row[0].numel() >= LARGE)
