"""A user's own samples as a data set: collated like torch's loader does, read the same way on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from vpipe.data.dataset import Use, stream
from vpipe.errors import ConfigError, VPipeError


class Samples(Protocol):
    """What `__getitem__` returns is a dict, a tuple or a tensor."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class OwnSamples:
    """Samples by number. If the user's object has `collate_fn(samples)`, that makes a batch; else torch's default.

    torch's random numbers inside a sample (an augmentation) depend on the seed, the epoch and the sample alone, so that
    every rank, and a run that resumes, sees the same.
    """

    def __init__(
        self,
        samples: Samples,
        seed: int,
        explain: Callable[[BaseException], str] = repr,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """`explain` puts an error of the user's code into words."""
        self._samples, self._seed, self._explain = samples, seed, explain
        self._collate = collate_fn or getattr(samples, "collate_fn", None) or default_collate

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, indices: Sequence[int], epoch: int) -> Any:
        rows = [self._sample(int(index), epoch) for index in indices]
        try:
            return self._collate(rows)
        except Exception as error:
            raise VPipeError(
                f"samples {list(indices)[:8]} of {type(self._samples).__name__} cannot be made into a batch: "
                f"{self._explain(error)}: give samples of equal shapes, or a method collate_fn(samples)"
            ) from error

    def _sample(self, index: int, epoch: int) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(
                int(stream(Use.OWN, self._seed, epoch, index).integers(2**62))
            )
            try:
                return self._samples[index]
            except Exception as error:
                raise VPipeError(
                    f"sample {index} of {type(self._samples).__name__} cannot be read: {self._explain(error)}"
                ) from error


def check_samples(value: Any, place: str) -> None:
    """Raise unless it has a length and can be indexed."""
    for method in ("__len__", "__getitem__"):
        if not hasattr(type(value), method) or isinstance(value, str | dict):
            raise ConfigError(
                f"{place} is of type {type(value).__name__}: return a data set with __len__ and __getitem__ (such as a "
                "torch.utils.data.Dataset or a list of samples), or a pair (training, validation) of them; a loader "
                "without an end cannot be resumed"
            )
