"""The order of samples: a permutation in each epoch, resumed by number; the split: disjoint and complete."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vpipe.data import Batch, Batches, Sampler, split
from vpipe.errors import ConfigError

SIZES = st.integers(1, 60)
SEEDS = st.integers(0, 2**70)


@dataclass
class Numbered:
    """A data set whose samples are their own numbers, with the epoch beside them."""

    size: int

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        return {"sample": torch.tensor(indices), "epoch": torch.full((len(indices),), epoch)}


@given(size=SIZES, batch_size=st.integers(1, 70), seed=SEEDS, epoch=st.integers(0, 5))
def test_each_epoch_is_a_permutation(size: int, batch_size: int, seed: int, epoch: int) -> None:
    sampler = Sampler(size, batch_size, seed)
    count = sampler.minibatches_per_epoch
    minibatches = [sampler.minibatch(number) for number in range(epoch * count, (epoch + 1) * count)]
    assert {found for found, _ in minibatches} == {epoch}
    assert sorted(index for _, indices in minibatches for index in indices) == list(range(size))
    sizes = [len(indices) for _, indices in minibatches]
    assert sizes[:-1] == [batch_size] * (count - 1)
    assert 1 <= sizes[-1] <= batch_size


@given(size=SIZES, batch_size=st.integers(1, 20), seed=SEEDS, data=st.data())
def test_resuming_at_any_number_is_the_rest_of_the_run(
    size: int, batch_size: int, seed: int, data: st.DataObject
) -> None:
    stop = 3 * Sampler(size, batch_size, seed).minibatches_per_epoch
    start = data.draw(st.integers(0, stop))
    dataset = Numbered(size)
    whole = list(Batches(dataset, Sampler(size, batch_size, seed), 0, stop))
    rest = Batches(dataset, Sampler(size, batch_size, seed), start, stop)
    assert len(rest) == stop - start
    for _ in range(2):  # and once more from the beginning
        assert [batch["sample"].tolist() for batch in rest] == [b["sample"].tolist() for b in whole[start:]]
        assert [batch["epoch"].tolist() for batch in rest] == [b["epoch"].tolist() for b in whole[start:]]


@given(size=SIZES, seed=SEEDS, numbers=st.lists(st.integers(0, 100), max_size=10))
def test_numbers_may_come_in_any_order(size: int, seed: int, numbers: list[int]) -> None:
    sampler = Sampler(size, 4, seed)
    for number in numbers:
        assert sampler.minibatch(number) == Sampler(size, 4, seed).minibatch(number)
        assert sampler.epoch_of(number) == sampler.minibatch(number)[0]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    sampler = Sampler(100, 100, 0)
    orders = [
        sampler.minibatch(0)[1],
        sampler.minibatch(1)[1],
        Sampler(100, 100, 1).minibatch(0)[1],
    ]
    assert len({tuple(order) for order in [*orders, range(100)]}) == 4


@given(size=st.integers(2, 200), share=st.floats(0.001, 0.999), seed=SEEDS)
def test_split_is_disjoint_and_complete(size: int, share: float, seed: int) -> None:
    train, validation = split(Numbered(size), share, seed)
    samples = [part.batch(range(len(part)), 1)["sample"].tolist() for part in (train, validation)]
    assert sorted(samples[0] + samples[1]) == list(range(size))
    assert min(map(len, samples)) >= 1
    assert abs(len(validation) - share * size) <= 1
    again = split(Numbered(size), share, seed)
    assert [part.chosen.tolist() for part in again] == [train.chosen.tolist(), validation.chosen.tolist()]


def test_split_differs_with_the_seed() -> None:
    assert len({tuple(split(Numbered(100), 0.1, seed)[1].chosen.tolist()) for seed in range(5)}) == 5


def test_samples_of_a_part_are_those_of_the_whole() -> None:
    train, _ = split(Numbered(10), 0.5, 0)
    batch = train.batch([4, 0], epoch=3)
    assert batch["sample"].tolist() == [train.chosen[4], train.chosen[0]]
    assert batch["epoch"].tolist() == [3, 3]


def test_mistakes() -> None:
    with pytest.raises(
        ConfigError, match="the data set has 1 sample, but training and validation need one each"
    ):
        split(Numbered(1), 0.1, 0)
    for share in (0.0, 1.0, -0.5, float("nan")):
        with pytest.raises(ConfigError, match=r"validation_share is .*: give a number between 0 and 1"):
            split(Numbered(10), share, 0)
    with pytest.raises(ConfigError, match="the data set has no samples"):
        Sampler(0, 4, 0)
    with pytest.raises(ConfigError, match="batch_size is 0: give 1 or more"):
        Sampler(4, 0, 0)
