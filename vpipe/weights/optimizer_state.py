"""The state of a base optimizer by the names of its parameters, so that it fits any other partition.

Tensors (momenta) go by `<parameter>.<key>`. What is plain goes into a record that JSON can hold:

    {"optimizer": "AdamW",
     "groups": [{"parameters": ["a.weight", ...], "numbers": {"lr": 0.001, "betas": [0.9, 0.999], ...}}],
     "values": {"a.weight": {"trust_ratio": 1.0}},
     "scheduler": {"last_epoch": 5, ...}}

A stage of another partition has parameters of several records. What belongs to a group or to a scheduler
it then takes from the record of the group's first parameter.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vpipe.errors import VPipeError

Record = dict[str, Any]
Names = Mapping[nn.Parameter, str]


class _Saved(NamedTuple):
    """What the records say of one parameter."""

    optimizer: str
    numbers: dict[str, Any]
    values: dict[str, Any]
    scheduler: dict[str, Any] | None


def read_state(optimizer: Optimizer, scheduler: Any, names: Names) -> tuple[dict[str, Tensor], Record]:
    """The state as tensors by `<parameter>.<key>`, and as a record."""
    kind = type(optimizer).__name__
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        name = names[parameter]
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}.{key}"] = value.detach()
            elif _is_plain(value):
                values.setdefault(name, {})[key] = value
            else:
                raise VPipeError(
                    f"optimizer {kind} keeps a {type(value).__name__} as {key!r} of parameter {name!r}: "
                    "only tensors, numbers and text can be saved; choose another optimizer"
                )
    groups = [
        {"parameters": [names[p] for p in group["params"]], "numbers": _numbers(group)}
        for group in optimizer.param_groups
    ]
    state = None if scheduler is None else _plain_part(scheduler.state_dict())
    return tensors, {"optimizer": kind, "groups": groups, "values": values, "scheduler": state}


def write_state(
    optimizer: Optimizer,
    scheduler: Any,
    names: Names,
    tensors: Mapping[str, Tensor],
    records: Iterable[Record],
) -> None:
    """Set the state from what `read_state` returned, here or for any other set of parameters."""
    saved = _by_parameter(records)
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition(".")
        by_parameter.setdefault(name, {})[key] = tensor
    if lost := sorted(by_parameter.keys() & set(names.values()) - saved.keys()):
        raise VPipeError(f"the optimizer's state of parameter {lost[0]!r} belongs to no group of any record")
    packed = optimizer.state_dict()
    packed["state"] = {}
    scheduler_state = None
    for group, packed_group in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        known = [(n, names[p]) for n, p in zip(packed_group["params"], group["params"], strict=True)]
        known = [(number, name) for number, name in known if name in saved]
        for number, name in known:
            _check_kind(optimizer, name, saved[name].optimizer)
            # A copy: what was read may be a view of a file.
            momenta = {key: tensor.clone() for key, tensor in by_parameter.get(name, {}).items()}
            if both := sorted(momenta.keys() & saved[name].values.keys()):
                raise VPipeError(f"{both[0]!r} of parameter {name!r} is a tensor and a number at once")
            packed["state"][number] = momenta | saved[name].values
        if known:
            first = saved[known[0][1]]
            told = {k: _like(group[k], value, k) for k, value in first.numbers.items() if k in group}
            # Some keep a counter in the group from their first step on.
            told |= {k: value for k, value in first.numbers.items() if k not in group and _is_number(value)}
            packed_group.update(told)
            _check_numbers(optimizer, {k: value for k, value in told.items() if k in optimizer.defaults})
            scheduler_state = scheduler_state or first.scheduler
    optimizer.load_state_dict(packed)
    if scheduler is not None and scheduler_state is not None:
        own = scheduler.state_dict()
        told = {k: _like(own[k], value, k) for k, value in scheduler_state.items() if k in own}
        scheduler.load_state_dict(own | told)


def _by_parameter(records: Iterable[Record]) -> dict[str, _Saved]:
    return {
        name: _Saved(
            record["optimizer"], group["numbers"], record["values"].get(name, {}), record["scheduler"]
        )
        for record in records
        for group in record["groups"]
        for name in group["parameters"]
    }


def _check_kind(optimizer: Optimizer, name: str, saved: str) -> None:
    if type(optimizer).__name__ != saved:
        raise VPipeError(
            f"the state of parameter {name!r} was saved by optimizer {saved} and this run has "
            f"{type(optimizer).__name__}: go on with {saved}"
        )


def _check_numbers(optimizer: Optimizer, numbers: dict[str, Any]) -> None:
    """The optimizer itself knows which it takes, and says so when it is made."""
    try:
        type(optimizer)([nn.Parameter(torch.zeros(1))], **numbers)
    except ValueError as error:
        raise VPipeError(
            f"optimizer {type(optimizer).__name__} does not take what was saved: {error}"
        ) from None
    except TypeError:
        return  # one that is not made this way


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """The group's numbers: rates, counters, coefficients. Its flags are the run's own business."""
    found = {}
    for key, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            found[key] = value.item()
        elif _is_number(value) or (isinstance(value, list | tuple) and value and all(map(_is_number, value))):
            found[key] = value
    return found


def _like(current: Any, value: Any, key: str) -> Any:
    """The value in the form that the optimizer has it in: JSON knows neither tuples nor tensors."""
    if isinstance(current, Tensor) and _is_number(value):
        return torch.full_like(current, value)
    if isinstance(current, list | tuple) and isinstance(value, list) and len(current) == len(value):
        return type(current)(_like(old, new, key) for old, new in zip(current, value, strict=True))
    if _is_number(current) != _is_number(value) or isinstance(current, list | tuple | Tensor):
        raise VPipeError(
            f"{key!r} of an optimizer is {str(value)[:60]!r}, which is not of the kind of {current!r}"
        )
    return value


def _plain_part(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if _is_plain(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_plain(value: Any) -> bool:
    """Whether JSON gives the value back as it is, but for tuples."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(entry) for key, entry in value.items())
    return value is None or isinstance(value, bool | int | float | str)
