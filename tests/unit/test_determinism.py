"""The switch for determinism; `end_to_end/test_stop.py` has two runs that are equal to the bit under it."""

from collections.abc import Iterator

import pytest
import torch

from vpipe.system.device import make_deterministic


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    flags = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = flags


def test_what_has_no_deterministic_algorithm_is_an_error(as_before: None) -> None:
    values, index = torch.zeros(4), torch.tensor([1, 1])
    values.put_(index, torch.tensor([1.0, 2.0]))
    make_deterministic()
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        values.put_(index, torch.tensor([1.0, 2.0]))
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
