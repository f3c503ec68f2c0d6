"""Architectures that vpipe was not built for: captured, cut and trained as the plain model is."""

from collections.abc import Iterator

import pytest

from tests.zoo import ZOO, check

SAMPLE = {"albert", "wav2vec2", "segformer"}


@pytest.fixture(autouse=True)
def _one_capture(capture_once: None) -> Iterator[None]:
    return


@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.long) for name in ZOO]
)
def test_a_model_of_transformers_trains_as_the_plain_model(name: str) -> None:
    found, blocks = check(name)
    assert found.ok, found.differences
    assert blocks >= 5
