"""Out of memory: how much there was, and the command that plans for it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vpipe.config.file import check_values
from vpipe.cost import Plan, write_plan
from vpipe.errors import OutOfMemoryError
from vpipe.runtime.failures import explain
from vpipe.train.memory_advice import advise, memory_advice, memory_for_tensors

OTHER = 500_000_000


def memory(held: int, free: int, wanted: int = 1_000_000, **keys: Any) -> int | None:
    """What the tensors of a rank could have when it ran out of memory."""
    error = OutOfMemoryError("full", wanted=wanted, held=OTHER + held, free=free)
    return memory_for_tensors(error, check_values(keys, Path("run.yml")), OTHER)


def test_memory_is_what_tensors_held_and_what_was_free() -> None:
    assert memory(held=4_000_000, free=500_000) == 4_500_000


def test_fragmented_memory_is_not_counted() -> None:
    assert memory(held=4_000_000, free=9_000_000) == 4_000_000


def test_the_configured_memory_is_the_most() -> None:
    assert memory(held=4_000_000, free=500_000, gpu_memory="3MB") == 3_000_000


def test_ranks_of_one_host_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert memory(held=4_000_000, free=1_000_000) == 4_500_000


def test_the_advice_is_a_command_for_that_memory() -> None:
    config = check_values({}, Path("run.yml"))
    config._source = Path("run.yml")
    text = advise(config, 4_500_000)
    assert text.startswith(
        "it had about 4,500,000 bytes for tensors: `vpipe plan run.yml --memory 4500000 -o fits.json`"
    )
    assert "`--set partition=fits.json`" in text
    assert "\n" not in text
    assert advise(config, None).startswith("`vpipe plan run.yml --memory BYTES -o fits.json`")
    assert memory_for_tensors(OutOfMemoryError("full"), config, OTHER) is None


@pytest.mark.parametrize(
    ("peaks", "said"),
    [
        ([1_000, 2_000], "full; the plan had predicted 2,000 bytes; "),
        ([1_000], "full; no plan had predicted its memory; "),  # of other positions
        (None, "full; no plan had predicted its memory; "),
    ],
)
def test_the_error_names_the_prediction_of_the_rank(
    tmp_path: Path, peaks: list[int] | None, said: str
) -> None:
    """Rank 2 is at the second position, which it shares with rank 1; the first has two stages."""
    if peaks is not None:
        write_plan(Plan((1, 1), ("keep",) * 2, prediction={"peak_memory": peaks}), tmp_path / "plan.json")
    schedule = SimpleNamespace(placement=[[0], [1, 2], [0]])
    runtime = SimpleNamespace(stages={})
    pipe: Any = SimpleNamespace(rank=2, schedule=schedule, runtime=runtime, device=torch.device("cpu"))
    with (
        pytest.raises(OutOfMemoryError) as caught,
        memory_advice(check_values({}, Path("run.yml")), tmp_path, pipe),
    ):
        raise OutOfMemoryError("full")
    assert str(caught.value).startswith(said + "`vpipe plan ")


@pytest.mark.parametrize(("share", "free"), [(1.0, 20), (0.5, 10), (0.3, 0)])
def test_what_a_rank_may_still_have_of_its_gpu(
    monkeypatch: pytest.MonkeyPatch, share: float, free: int
) -> None:
    """50 of 100 are reserved by the process, 10 of them for nothing, and 10 are free: its share may be less."""
    figures = {
        "is_initialized": True,
        "mem_get_info": (10, 100),
        "memory_allocated": 40,
        "memory_reserved": 50,
        "get_per_process_memory_fraction": share,
    }
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    error = explain(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0"), 1, None)
    assert isinstance(error, OutOfMemoryError)
    assert (error.wanted, error.held, error.free) == (2**31, 40, free)
    assert "it tried to allocate 2.00 GiB; it holds 40 bytes of the GPU, of which 10 of 100 are free" in str(
        error
    )


def test_other_errors_are_not_about_memory() -> None:
    assert explain(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), 0, None) is None
    error = explain(
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: tried 0 bytes"), 0, None
    )
    assert isinstance(error, OutOfMemoryError)
    assert error.wanted is None
