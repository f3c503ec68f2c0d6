"""The state of base optimizers by parameter name, so that it fits any other partition.

Tensors (momenta) go by `<parameter>.<key>`. Plain values go into a record, one for each optimizer, that JSON can hold:

    {"optimizer": "AdamW",
     "groups": [{"parameters": ["a.weight", ...], "numbers": {"lr": 0.001, "betas": [0.9, 0.999], ...}}],
     "values": {"a.weight": {"trust_ratio": 1.0}},
     "scheduler": {"last_epoch": 5, "base_lrs": [0.001], ...}}

An optimizer of another partition has parameters of several records. Each of its groups takes its counters, and its
entries in the scheduler's lists, from the record that holds the group's first parameter.

State is restored: momenta, counters, where a schedule is. Hyperparameters (rates, coefficients) are those of the run
that loads, which may give others than the run that saved: the records say what they were.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from vpipe.errors import VPipeError

Record = dict[str, Any]
Changes = dict[str, list[Any]]
"""Hyperparameters that a loaded state had other values of: by name the saved value, the one that holds, a parameter."""
SCHEDULED = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
"""Numbers that a scheduler writes into the groups when it is made."""
Names = Mapping[nn.Parameter, str]


class _Origin(NamedTuple):
    """Where the records hold a parameter."""

    record: Record
    group: int

    @property
    def numbers(self) -> dict[str, Any]:
        return self.record["groups"][self.group]["numbers"]


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
    schedule = None
    if scheduler is not None:
        schedule = {key: value for key, value in scheduler.state_dict().items() if _is_plain(value)}
    return tensors, {"optimizer": kind, "groups": groups, "values": values, "scheduler": schedule}


def write_state(
    optimizer: Optimizer,
    scheduler: Any,
    names: Names,
    tensors: Mapping[str, Tensor],
    records: Iterable[Record],
) -> Changes:
    """Set the state from what `read_state` returned, here or for any other set of parameters."""
    saved = {
        name: _Origin(record, index)
        for record in records
        for index, group in enumerate(record["groups"])
        for name in group["parameters"]
    }
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition(".")
        by_parameter.setdefault(name, {})[key] = tensor
    if lost := sorted(by_parameter.keys() & set(names.values()) - saved.keys()):
        raise VPipeError(f"the optimizer's state of parameter {lost[0]!r} belongs to no group of any record")
    origins = _origins(optimizer, names, saved)
    packed = optimizer.state_dict()
    packed["state"] = {}
    groups = zip(optimizer.param_groups, packed["param_groups"], origins, strict=True)
    for group, packed_group, origin in groups:
        for number, name in zip(packed_group["params"], (names[p] for p in group["params"]), strict=True):
            if name in saved:
                # A copy: what was read may be a view of a file.
                momenta = {key: tensor.clone() for key, tensor in by_parameter.get(name, {}).items()}
                values = saved[name].record["values"].get(name, {})
                if both := sorted(momenta.keys() & values.keys()):
                    raise VPipeError(f"{both[0]!r} of parameter {name!r} is a tensor and a number at once")
                packed["state"][number] = momenta | values
        if origin is not None:
            packed_group.update(_restored_numbers(optimizer, scheduler, group, origin.numbers))
    changes = _changes(optimizer, scheduler, names, saved)
    optimizer.load_state_dict(packed)
    if scheduler is not None:
        own = scheduler.state_dict()
        scheduler.load_state_dict(own | _restored_schedule(own, origins))
        _set_rates(optimizer, scheduler)
    return changes


def _origins(optimizer: Optimizer, names: Names, saved: Mapping[str, _Origin]) -> list[_Origin | None]:
    """For each group the saved one of its first parameter.

    A group that has no parameters here takes the same place in the record of another, if that has as many groups.
    """
    groups = optimizer.param_groups
    found: list[_Origin | None] = []
    for group in groups:
        members = [name for name in (names[p] for p in group["params"]) if name in saved]
        for name in members:
            _check_kind(optimizer, name, saved[name].record["optimizer"])
            _check_same_settings(members[0], name, saved, optimizer.defaults)
        found.append(saved[members[0]] if members else None)
    known = next((origin for origin in found if origin is not None), None)
    if known is None or len(known.record["groups"]) != len(groups):
        return found
    return [
        _Origin(known.record, index) if origin is None and not group["params"] else origin
        for index, (group, origin) in enumerate(zip(groups, found, strict=True))
    ]


def _check_same_settings(
    first: str, second: str, saved: Mapping[str, _Origin], defaults: Collection[str]
) -> None:
    """Raise if two parameters of one group were saved with other counters: a group has one of each."""
    one, other = (saved[name].numbers for name in (first, second))
    for key in sorted({*one, *other} - {*defaults, *SCHEDULED}):
        if one.get(key) != other.get(key):
            raise VPipeError(
                f"parameters {first!r} and {second!r} are in one optimizer group, but were saved with {key} "
                f"{one.get(key)} and {other.get(key)}: resume with the groups of the run that was saved"
            )


def _restored_numbers(
    optimizer: Optimizer, scheduler: Any, group: Mapping[str, Any], numbers: Mapping[str, Any]
) -> dict[str, Any]:
    """The counters of a group (some optimizers add one at their first step), and what its scheduler has reached."""
    restored = {
        key: _like(group[key], value, key) if key in group else value
        for key, value in numbers.items()
        if key not in optimizer.defaults and key not in SCHEDULED and (key in group or _is_number(value))
    }
    reached: dict[str, Any] = {}
    initial = numbers.get("initial_lr")
    if scheduler is not None and initial and "initial_lr" in group and "lr" in numbers:
        share = float(group["initial_lr"]) / initial
        reached["lr"] = numbers["lr"] if share == 1 else numbers["lr"] * share
    if "base_momentum" in group:
        reached |= {key: numbers[key] for key in ("momentum", "betas") if key in numbers}
    reached = {key: _like(group[key], value, key) for key, value in reached.items() if key in group}
    _check_numbers(optimizer, reached)
    return restored | reached


def _set_rates(optimizer: Optimizer, scheduler: Any) -> None:
    """The rates that a schedule by numbers of updates has now; others go on from the rates of the groups."""
    if isinstance(scheduler, LambdaLR):
        for group, base, factor in zip(
            optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = _like(group["lr"], base * factor(scheduler.last_epoch), "lr")
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    scheduler.load_state_dict(scheduler.state_dict() | {"_last_lr": rates})


def _changes(optimizer: Optimizer, scheduler: Any, names: Names, saved: Mapping[str, _Origin]) -> Changes:
    found: Changes = {}
    for group in optimizer.param_groups:
        now = _numbers(group)
        keys = [key for key in optimizer.defaults if key in now]
        if "base_momentum" in group:
            keys = [key for key in keys if key not in ("momentum", "betas")]
        for name in (names[p] for p in group["params"] if names[p] in saved):
            before = saved[name].numbers
            for key in keys:
                kept = "initial_lr" if key == "lr" and scheduler is not None else key
                if kept in before and kept in now and _plain(before[kept]) != _plain(now[kept]):
                    found.setdefault(key, [_plain(before[kept]), _plain(now[kept]), name])
    return found


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _restored_schedule(own: Mapping[str, Any], origins: Sequence[_Origin | None]) -> dict[str, Any]:
    """The scheduler's state: that of the first group's record, and each group's own entry of lists with one a group."""
    schedules = [origin.record["scheduler"] or {} if origin else {} for origin in origins]
    first = next((origin for origin in origins if origin and origin.record["scheduler"]), None)
    restored: dict[str, Any] = {}
    for key, value in (first.record["scheduler"] if first else {}).items():
        if key not in own or key == "base_lrs":  # they are hyperparameters
            continue
        if first and _one_each(own[key], origins) and _one_each(value, first.record["groups"]):
            value = [
                schedule[key][origin.group]
                if origin and _one_each(schedule.get(key), origin.record["groups"])
                else entry
                for entry, origin, schedule in zip(own[key], origins, schedules, strict=True)
            ]
        restored[key] = _like(own[key], value, key)
    return restored


def _one_each(value: Any, groups: Sequence[Any]) -> bool:
    return isinstance(value, list) and len(value) == len(groups)


def _check_kind(optimizer: Optimizer, name: str, saved: str) -> None:
    if type(optimizer).__name__ != saved:
        raise VPipeError(
            f"the state of parameter {name!r} was saved by optimizer {saved} and this run has "
            f"{type(optimizer).__name__}: go on with {saved}"
        )


def _check_numbers(optimizer: Optimizer, numbers: dict[str, Any]) -> None:
    """The optimizer itself checks them when it is made, here for a parameter with as many dimensions as its own."""
    own = next(p for group in optimizer.param_groups for p in group["params"])
    try:
        type(optimizer)([nn.Parameter(torch.zeros((1,) * own.dim()))], **numbers)
    except ValueError as error:
        raise VPipeError(
            f"optimizer {type(optimizer).__name__} does not take what was saved: {error}"
        ) from None
    except TypeError:
        return  # one that is not made this way


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """The group's numbers: rates, counters, coefficients. Flags are not saved: each run sets its own."""
    found = {}
    for key, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            found[key] = value.item()
        elif _is_number(value) or (isinstance(value, list | tuple) and value and all(map(_is_number, value))):
            found[key] = value
    return found


def _like(current: Any, value: Any, key: str) -> Any:
    """The value in the optimizer's own form: JSON has neither tuples nor tensors."""
    if isinstance(current, Tensor) and _is_number(value):
        return torch.full_like(current, value)
    if isinstance(current, list | tuple) and isinstance(value, list | tuple) and len(current) == len(value):
        return type(current)(_like(old, new, key) for old, new in zip(current, value, strict=True))
    if _is_number(current) != _is_number(value) or isinstance(current, list | tuple | Tensor):
        raise VPipeError(
            f"{key!r} of an optimizer is {str(value)[:60]!r}, which is not of the kind of {current!r}"
        )
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_plain(value: Any) -> bool:
    """Whether JSON keeps the value, except that tuples become lists."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(entry) for key, entry in value.items())
    return value is None or isinstance(value, bool | int | float | str)
