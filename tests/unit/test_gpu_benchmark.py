"""The parts of the GPU benchmark that need no GPU: the search for the largest size, profiles of other depths."""

import sys
from pathlib import Path
from typing import Any

import pytest

from vpipe.cost import BlockCost, DeviceCost, LinkCost, Profile, Tie

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from gpu_bench import Case, with_layers
from gpu_largest import search
from gpu_settings import even_stages, hand_made


class Pretended:
    """A bench on which sizes up to `largest` fit, and which predicts that those up to `predicted_largest` do."""

    def __init__(self, largest: int, predicted_largest: int, tries: int = 100) -> None:
        self.largest, self.predicted_largest, self.tries = largest, predicted_largest, tries
        self.tried: list[int] = []

    def run(self, case: Case, *_: Any) -> float | None:
        self.tried.append(case.batch)
        return 0.0 if case.batch <= self.largest else None

    def prediction(self, case: Case, *_: Any) -> dict[str, Any]:
        return {"predicted_bytes": [case.batch * 100 // self.predicted_largest]}

    def in_time(self, deadline: float) -> bool:
        return len(self.tried) < self.tries


def find(bench: Any, sizes: range) -> tuple[int | None, bool]:
    return search(bench, None, sizes, lambda size: Case("", "gpipe", size, cap=100), "", 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("predicted", [4, 16, 20, 24, 28, 40, 100, 1000])
def test_the_largest_size_that_fits_is_found(predicted: int) -> None:
    bench = Pretended(24, predicted)
    assert find(bench, range(4, 401, 4)) == (24, True)
    assert len(set(bench.tried)) == len(bench.tried), "no size is tried twice"


def test_a_right_prediction_takes_two_tries() -> None:
    bench = Pretended(24, 24)
    find(bench, range(4, 401, 4))
    assert bench.tried == [24, 28]


def test_nothing_fits_or_everything_does() -> None:
    assert find(Pretended(1, 24), range(4, 41, 4)) == (None, True)
    assert find(Pretended(99, 24), range(4, 41, 4)) == (40, True)


def test_without_time_the_largest_so_far_is_reported_as_such() -> None:
    assert find(Pretended(24, 12, tries=2), range(4, 401, 4)) == (16, False)


def test_the_guides_partitions() -> None:
    assert even_stages(49) == (13, 13, 13, 10)
    assert hand_made(49) == (12, 13, 13, 11)
    for blocks in range(9, 120):
        for made in (even_stages(blocks), hand_made(blocks)):
            assert sum(made) == blocks
            assert min(made) > 0


def test_a_profile_of_another_depth() -> None:
    names = ["embedding and attention", "first feed", "attention", "feed", "attention", "feed", "head"]
    blocks = tuple(BlockCost(name, 1.0, 1.0, 1.0, 1.0, 1, 1, 1) for name in names)
    profile = Profile(blocks, DeviceCost(1, 1.0, 1.0), LinkCost(1.0, 0.0), 4, tied=(Tie(8, (0, 6)),))
    deeper = with_layers(profile, 4)
    assert [block.name for block in deeper.blocks] == [*names[:2], *names[2:4] * 3, "head"]
    assert deeper.tied == (Tie(8, (0, 8)),)
    assert with_layers(profile, 3) == profile
