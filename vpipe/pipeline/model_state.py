"""The names of a model's `state_dict`, and the values that no stage holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from vpipe.errors import CaptureError
from vpipe.graph.exported import canonical_names
from vpipe.graph.materialise import materialise


class ModelState:
    """What `model.state_dict()` has, so that `model.load_state_dict` takes the pipeline's weights strictly.

    All names of a tied tensor are there, buffers that are not persistent are not. Parameters and buffers that the
    captured graph does not use keep the values that they had; only rank 0 holds them. Under mixed precision stages hold
    what is not trained in the compute dtype: if it is still the model's own value, rounded, the model's own is given.
    """

    def __init__(
        self,
        model: nn.Module,
        held: Collection[str],
        seed: int,
        compute_dtype: torch.dtype | None,
        *,
        keep: bool,
    ) -> None:
        """`held` are the tensors of all stages, under their first names; `keep` the values of the others."""
        first = canonical_names(model)
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        self.dtypes: dict[str, torch.dtype] = {name: tensors[name].dtype for name in held}
        self._rounded_to = compute_dtype
        self._exact = {
            name: tensors[name].detach()
            for name in held
            if keep and compute_dtype is not None and _is_rounded(tensors[name])
        }
        self._sources: dict[str, str] = {}
        self._others: dict[str, Any] = {}
        for name, value in model.state_dict().items():
            if first.get(name) in self.dtypes:
                self._sources[name] = first[name]
            elif keep:
                self._keep(model, name, value, seed)
        self.needed = frozenset(self._sources.values())
        self._order = [name for name in model.state_dict() if name in self._sources or name in self._others]

    def arrange(self, values: Mapping[str, Tensor]) -> dict[str, Any]:
        """The `state_dict`, from what the stages hold."""
        exact = {name: self._unrounded(name, value) for name, value in values.items()}
        return {
            name: exact[self._sources[name]] if name in self._sources else self._others[name]
            for name in self._order
        }

    def _unrounded(self, name: str, value: Tensor) -> Tensor:
        own = self._exact.get(name)
        if own is None or not torch.equal(value, own.to("cpu", self._rounded_to).to(value.dtype)):
            return value
        return own.to("cpu", copy=True)

    def _keep(self, model: nn.Module, name: str, value: Any, seed: int) -> None:
        if not isinstance(value, Tensor):  # what a module's get_extra_state returns
            self._others[name] = value
        elif not value.is_meta:
            self._others[name] = value.detach().to("cpu", copy=True)
        else:
            with suppress(CaptureError):  # nothing initialises it, and no stage needs it
                self._others[name] = materialise(model, [name], seed)[name]


def _is_rounded(tensor: Tensor) -> bool:
    """Whether mixed precision rounds it: trained parameters have float32 masters."""
    return tensor.is_floating_point() and not tensor.requires_grad and not tensor.is_meta
