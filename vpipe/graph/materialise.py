"""Tensors for a stage: copies of the model's own, or fresh ones where the model is on `meta`.

Each fresh tensor has its own seed, made from its name: its value does not depend on the partition.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from vpipe.errors import CaptureError

HOST = torch.device("cpu")


def materialise(
    model: nn.Module, names: Iterable[str], seed: int, device: torch.device = HOST
) -> dict[str, Tensor]:
    """Detached tensors on the device for the parameters and buffers of these names; the model stays as it is."""
    names = list(names)
    tensors = {name: _lookup(model, name) for name in names}
    result = {name: t.detach().to(device, copy=True) for name, t in tensors.items() if not t.is_meta}
    missing = [name for name in names if name not in result]
    if missing:
        skeleton = copy.deepcopy(model).to("meta")
        blanks = [tensors[name] for name in missing]
        take = _fresh if device == HOST else _Scratch(max(blank.nbytes for blank in blanks)).take
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for name in missing:
                made = _initialise(skeleton, name, seed, take)
                result[name] = made if take is _fresh else made.to(device, copy=True)
    return result


class _Scratch:
    """Memory of the host in which one tensor after the other is drawn: fresh memory costs more than drawing does."""

    def __init__(self, size: int) -> None:
        self._bytes = torch.empty(size, dtype=torch.uint8)

    def take(self, blank: Tensor) -> Tensor:
        return self._bytes[: blank.nbytes].view(blank.dtype).view(blank.shape)


def _fresh(blank: Tensor) -> Tensor:
    return torch.empty(blank.shape, dtype=blank.dtype)


def stable_seed(*parts: int | str) -> int:
    """A 63-bit number that is the same in every process and on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _lookup(model: nn.Module, name: str) -> Tensor:
    owner, _, own = name.rpartition(".")
    tensor = getattr(model.get_submodule(owner), own)
    assert isinstance(tensor, Tensor)
    return tensor


def _initialise(skeleton: nn.Module, name: str, seed: int, take: Callable[[Tensor], Tensor]) -> Tensor:
    """One real tensor in a model of meta tensors, in memory from `take`, set by the initialisers of the modules around.

    They run from the owner outwards, as the model's constructor runs them: an outer module (a GPT-2 block that scales
    its projection) sets the final value.
    """
    owner_name, _, own = name.rpartition(".")
    owner = skeleton.get_submodule(owner_name)
    store: dict[str, Tensor | None] = owner._parameters if own in owner._parameters else owner._buffers  # type: ignore[assignment]
    blank = store[own]
    assert blank is not None
    tensor = take(blank).fill_(_mark(blank.dtype))
    is_parameter = isinstance(blank, nn.Parameter)
    store[own] = nn.Parameter(tensor, requires_grad=blank.requires_grad) if is_parameter else tensor
    try:
        for path, initialise in _initialisers(skeleton, owner_name):
            torch.default_generator.manual_seed(stable_seed(seed, path, own))
            initialise()
        made = store[own]
        assert made is not None
        if made.is_meta or _has_marks(made):
            raise CaptureError(
                f"cannot materialise {name!r} of a model on the meta device: {type(owner).__name__} does not set"
                f" it; give {type(owner).__name__} a reset_parameters() that does, or build the model on the cpu"
            )
        return made.detach()
    finally:
        store[own] = blank


def _initialisers(model: nn.Module, owner: str) -> list[tuple[str, Callable[[], object]]]:
    """The functions that set a module's tensors: `reset_parameters`, or the rule of a Hugging Face model around it."""
    parts = owner.split(".") if owner else []
    paths = [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]  # from the owner outwards
    modules = [model.get_submodule(path) for path in paths]
    rules = [getattr(module, "_init_weights", None) for module in modules]
    result: list[tuple[str, Callable[[], object]]] = []
    for depth, (path, module) in enumerate(zip(paths, modules, strict=True)):
        own = (getattr(module, method, None) for method in ("reset_parameters", "_reset_parameters"))
        rule = next(filter(callable, rules[depth:]), None)  # of the innermost module around it that has one
        initialise = partial(rule, module) if rule is not None else next(filter(callable, own), None)
        if initialise is not None:
            result.append((path, initialise))
    return result


def _mark(dtype: torch.dtype) -> float | int:
    """A value that no initialiser sets, so that forgotten tensors are found; there is none for bool."""
    if dtype is torch.bool:
        return 0
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def _has_marks(tensor: Tensor) -> bool:
    if tensor.dtype is torch.bool:
        return False
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        # The sum takes far less time, and is a number unless there are marks, or infinities of both signs.
        return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())
    return bool((tensor == _mark(tensor.dtype)).any())
