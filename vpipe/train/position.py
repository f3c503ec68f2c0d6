"""The position of a run in its data: from updates to minibatches, over this run and those that it goes on from.

It is one number. What a minibatch holds follows from its number alone (`vpipe.data.dataset`), so that a resumed
run sees neither a sample twice nor misses one, as long as the order of the samples is the same.
"""

from __future__ import annotations

import hashlib
from typing import Any

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
        """The minibatches that so many updates have used."""
        return min(self.minibatches, self._offset + updates * self.interval)

    def epoch(self, updates: int) -> int:
        return self.sampler.epoch_of(self.after(updates))

    def batches(self, updates: int) -> Batches:
        """What is to be trained on after so many updates."""
        return Batches(self.samples, self.sampler, self.after(updates), self.minibatches)

    def told(self, updates: int) -> dict[str, Any]:
        """What a checkpoint tells of it."""
        return {"minibatch": self.after(updates), **self._order()}

    def go_on(self, told: dict[str, Any], updates: int, path: str) -> None:
        """Go on at the sample where the checkpoint was made, after so many updates."""
        for key, value in self._order().items():
            if told[key] != value:
                raise ConfigError(
                    f"{path} was made with {key} {told[key]} and this run has {value}: the order of the samples "
                    f"would be another; use the same {key} and data, or start from the weights alone with `pretrained`"
                )
        self.minibatches = self._last(updates, told["minibatch"])
        self._offset = told["minibatch"] - updates * self.interval
        self.updates = updates - (-(self.minibatches - told["minibatch"]) // self.interval)

    def _last(self, updates: int, minibatch: int) -> int:
        """Where training ends, if so many updates have used the minibatches before this one."""
        end = self.config.epochs * self.sampler.minibatches_per_epoch
        if self.config.max_updates is None:
            return end
        return min(end, minibatch + (self.config.max_updates - updates) * self.interval)

    def _order(self) -> dict[str, Any]:
        """All that the order of the samples follows from, and what the first of them looks like."""
        first = hashlib.sha256()
        for field in self.samples.batch([0], 0).values():
            first.update(field.numpy().tobytes())
        return {
            "batch_size": self.config.batch_size,
            "number of samples": len(self.samples),
            "seed": self.config.seed,
            "first sample": first.hexdigest()[:16],
        }
