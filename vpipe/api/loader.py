"""A loader whose position can be saved and restored: the next minibatch's number is all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vpipe.data import OwnSamples, Sampler, check_samples
from vpipe.data.own import Samples
from vpipe.errors import VPipeError

Collate = Callable[[list[Any]], Any]


class Loader:
    """Minibatches of a data set in a shuffled order that depends on `seed` and the epoch alone, so on every rank alike.

        loader = vpipe.Loader(dataset, batch_size=16)
        pipe.resume(loader)
        for epoch in range(loader.epoch, 3):
            for update, loss in pipe.train(loader):
                ...

    A pass over it is the rest of the epoch that `loader.epoch` names. `pipe.save` keeps its position, and
    `pipe.load` or `pipe.resume` set it to the minibatch after the last that was trained on.

    Args:
        dataset: An object with `__len__` and `__getitem__`; a sample is a dict, a tuple or a tensor. torch's random
            numbers inside `__getitem__` depend on the seed, the epoch and the sample alone.
        batch_size: Samples of a minibatch.
        seed: Seed of the order of the samples.
        collate_fn: Makes a batch of a list of samples; by default the data set's own `collate_fn`, or torch's.
    """

    def __init__(
        self, dataset: Samples, batch_size: int, *, seed: int = 0, collate_fn: Collate | None = None
    ) -> None:
        check_samples(dataset, "the data set of a Loader")
        self._samples = OwnSamples(dataset, seed, collate_fn=collate_fn)
        self._sampler = Sampler(len(dataset), batch_size, seed)
        self._next = 0  # the number of the next minibatch, counted over all epochs

    @property
    def epoch(self) -> int:
        """The epoch of the next minibatch, from 0."""
        return self._sampler.epoch_of(self._next)

    def __len__(self) -> int:
        """The minibatches that are left of this epoch."""
        return (self.epoch + 1) * self._sampler.minibatches_per_epoch - self._next

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            epoch, indices = self._sampler.minibatch(self._next)
            self._next += 1
            yield self._samples.batch(indices, epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, as JSON can hold it."""
        return {"minibatch": self._next, **self._order()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position in the data.

        Args:
            state: What `state_dict` has returned, for the same data set, batch size and seed.
        """
        for key, value in self._order().items():
            if state.get(key) != value:
                raise VPipeError(
                    f"the position in the data was saved with {key} {state.get(key)}, this loader has {value}: the "
                    f"order of the samples would be another; use the same {key}, or load with data=False"
                )
        self._next = int(state["minibatch"])

    def _order(self) -> dict[str, int]:
        """Everything that the order of the samples depends on."""
        sampler = self._sampler
        return {"samples": sampler.size, "batch_size": sampler.batch_size, "seed": sampler.seed}
