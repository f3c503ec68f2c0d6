"""The position of a run in its data: the minibatches that its updates, and those of runs before it, have used.

The samples of a minibatch follow from its number alone (`vpipe.data.dataset`), so a resumed run sees no sample twice
and misses none, as long as the order of the samples is the same.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from vpipe.config import RunConfig
from vpipe.data import Batches, Dataset, Sampler
from vpipe.errors import ConfigError


class Position:
    def __init__(self, config: RunConfig, samples: Dataset, interval: int) -> None:
        """`interval` minibatches make an update."""
        self.config = config
        self.samples = samples
        self.interval = interval
        self.sampler = Sampler(len(samples), config.batch_size, config.seed)
        self.minibatches = self._last(0, 0)
        self.updates = -(-self.minibatches // interval)
        # Minibatches of earlier runs beyond what this run's interval counts for their updates.
        self._offset = 0

    def after(self, updates: int) -> int:
        """How many minibatches the first `updates` have used."""
        return min(self.minibatches, self._offset + updates * self.interval)

    def epoch(self, updates: int) -> int:
        return self.sampler.epoch_of(self.after(updates))

    def batches(self, updates: int, end: int | None = None) -> Batches:
        """The batches that follow after so many updates, until `end` are made, or all."""
        last = self.after(self.updates if end is None else end)
        return Batches(self.samples, self.sampler, self.after(updates), last)

    def state(self, updates: int) -> dict[str, Any]:
        """What a checkpoint saves of it."""
        return {"minibatch": self.after(updates), **self._order()}

    def resume(self, saved: dict[str, Any], updates: int, path: str) -> None:
        """Go on at the sample where the checkpoint `path` was made, after so many updates."""
        if "minibatch" not in saved:
            raise ConfigError(
                f"{path} was saved by a script, with another position in the data: go on with that script, or start "
                "from its weights alone with `pretrained`"
            )
        for key, value in self._order().items():
            if saved[key] != value:
                raise ConfigError(
                    f"{path} was made with {key} {saved[key]} and this run has {value}: the order of the samples "
                    f"would be another; use the same {key} and data, or start from the weights alone with `pretrained`"
                )
        self.minibatches = self._last(updates, saved["minibatch"])
        self._offset = saved["minibatch"] - updates * self.interval
        self.updates = updates - (-(self.minibatches - saved["minibatch"]) // self.interval)

    def _last(self, updates: int, minibatch: int) -> int:
        """The end of training, if so many updates have used the minibatches before this one."""
        end = self.config.epochs * self.sampler.minibatches_per_epoch
        if self.config.max_updates is None:
            return end
        return min(end, minibatch + (self.config.max_updates - updates) * self.interval)

    def _order(self) -> dict[str, Any]:
        """Everything that the order of the samples depends on, and a hash of the first sample."""
        first = hashlib.sha256()
        for field in pytree.tree_leaves(self.samples.batch([0], 0)):
            tensor = field if isinstance(field, Tensor) else torch.tensor(list(repr(field).encode()))
            first.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return {
            "batch_size": self.config.batch_size,
            "number of samples": len(self.samples),
            "seed": self.config.seed,
            "first sample": first.hexdigest()[:16],
        }
