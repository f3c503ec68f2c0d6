"""When memory has run out: the plan that is told is one that fits what there was, and telling it never fails."""

import re
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from vpipe.config.file import check_values
from vpipe.cost import BlockCost, DeviceCost, LinkCost, Plan, Profile, for_batch_size, write_profile
from vpipe.errors import OutOfMemoryError
from vpipe.runtime.out_of_memory import explain
from vpipe.simulate import simulate
from vpipe.train import fitting, planning
from vpipe.train.fitting import what_would_fit

BLOCK = BlockCost("block", 0.01, 0.01, 0.01, 0.0, 1_000_000, 1_000, 10_000)
PROFILE = Profile((BLOCK,) * 5, DeviceCost(2**30, 1e3, 1e3), LinkCost(1e10, 1e-5), 4, fingerprint="abc")
RUN = {
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "vocab_size": 64,
    "sequence_length": 8,
    "batch_size": 4,
    "stages": 2,
    "minibatches": 2,
    "schedule": "1f1b",
}
RUNNING = Plan((3, 2), ("keep",) * 5, "1f1b", minibatches=2, batch_size=4)
"""It needs 6.1 MB on rank 0, which has two minibatches in flight, and 2.1 MB on rank 1."""
BESIDE = 500_000_000
COMMAND = "`vpipe plan run.yml --memory {} -o fits.json`"


def told(
    cache: Path, held: int, free: int, wanted: int = 1_000_000, model: str = "abc", **keys: Any
) -> tuple[str, dict[str, Any]]:
    """What is said when rank 0 runs out of memory, without the keys, and the keys."""
    config = check_values(RUN | keys, Path("run.yml"))
    config._source = Path("run.yml")
    blocks: list[None] = [None] * 5
    graph = SimpleNamespace(plan_fingerprint=model, blocks=blocks)
    pipe: Any = SimpleNamespace(rank=0, world=SimpleNamespace(size=2), layout=SimpleNamespace(graph=graph))
    error = OutOfMemoryError("full", wanted=wanted, held=BESIDE + held, free=free)
    text = what_would_fit(error, config, pipe, RUNNING, cache, BESIDE)
    said, _, written = text.partition("\n")
    return said, yaml.safe_load(written) if written else {}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a profile of the run lies. Planning has time, on a busy machine too."""
    monkeypatch.setattr(fitting, "SECONDS", 100.0)
    config = check_values(RUN, Path("run.yml"))
    write_profile(PROFILE, tmp_path / f"profile-{planning._fingerprint(config)}.json")
    return tmp_path


def peak(keys: dict[str, Any]) -> int:
    """What a run with these keys in its file would need, on the rank that needs most."""
    config = check_values(RUN | keys, Path("run.yml"))
    assert isinstance(config.partition, list)
    assert config.policies is not None
    plan = Plan(
        tuple(config.partition),
        tuple(config.policies),
        config.chosen_schedule,
        tuple(config.replicas or ()),
        config.minibatches,
        batch_size=config.batch_size,
    )
    return max(rank.memory.total for rank in simulate(for_batch_size(PROFILE, 4), plan).ranks)


def test_the_keys_fit_what_there_was(cache: Path) -> None:
    assert peak({"partition": [3, 2], "policies": ["keep"] * 5}) > 6_000_000
    said, keys = told(cache, held=4_000_000, free=500_000)
    assert said == (
        "it had about 4,500,000 bytes for tensors: by its profile it would fit with these keys in run.yml:"
    )
    assert keys["batch_size"] == 4
    assert sum(keys["partition"]) == 5
    assert "recompute" in keys["policies"]
    assert 2_000_000 < peak(keys) <= 4_500_000


def test_what_is_free_in_pieces_is_not_counted(cache: Path) -> None:
    said, keys = told(cache, held=4_000_000, free=9_000_000)
    assert said.startswith("it had about 4,000,000 bytes")
    assert peak(keys) <= 4_000_000


def test_the_configured_memory_is_the_most(cache: Path) -> None:
    said, keys = told(cache, held=4_000_000, free=500_000, gpu_memory="3MB")
    assert said.startswith("it had about 3,000,000 bytes")
    assert peak(keys) <= 3_000_000


def test_ranks_of_one_host_share_what_is_free(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    said, _ = told(cache, held=4_000_000, free=1_000_000)
    assert said.startswith("it had about 4,500,000 bytes")


def test_a_profile_that_foresaw_too_little_is_trusted_less(cache: Path) -> None:
    foreseen = simulate(PROFILE, RUNNING).ranks[0].memory.total
    said, keys = told(cache, held=2 * foreseen, free=0, wanted=foreseen)
    assert "needed 3 times what its profile foresees, which is allowed for: " in said
    assert 3 * peak(keys) <= 2 * foreseen


def test_smaller_minibatches_where_nothing_else_fits(cache: Path) -> None:
    said, keys = told(cache, held=600_000, free=0)
    assert "it would fit with these keys" in said
    assert keys["batch_size"] < 4
    assert peak(keys) <= 600_000


def test_or_what_is_missing(cache: Path) -> None:
    said, keys = told(cache, held=30_000, free=0)
    assert not keys
    assert "nothing fits a memory of 30000 bytes" in said
    assert re.search(r"at best \d+ bytes \(.*\) are missing on stage \d", said)


def test_a_profile_of_another_model_does_not_count(cache: Path) -> None:
    said, keys = told(cache, held=4_000_000, free=500_000, model="another")
    assert not keys
    assert COMMAND.format(4_500_000) in said
    assert "`--set partition=fits.json`" in said


def test_the_profile_beside_the_plan_of_the_run_counts(tmp_path: Path) -> None:
    write_profile(PROFILE, tmp_path / "profile.json")
    config = check_values(RUN, Path("run.yml"))
    config._planned = (tmp_path / "plan.json", "abc")
    assert planning.known_profile(config, tmp_path / "none", "abc") == PROFILE
    assert planning.known_profile(config, tmp_path / "none", "another") is None
    (tmp_path / "profile.json").write_text("[")
    assert planning.known_profile(config, tmp_path / "none", "abc") is None


def test_what_is_not_known_is_not_planned_for(cache: Path) -> None:
    error = OutOfMemoryError("full")
    config: Any = check_values(RUN, Path("run.yml"))
    nobody: Any = None
    assert what_would_fit(error, config, nobody, RUNNING, cache, BESIDE).startswith("partition: auto with")


def test_a_planner_that_fails_does_not_hide_what_happened(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planner(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(fitting, "plan", planner)
    said, keys = told(cache, held=4_000_000, free=500_000)
    assert not keys
    assert COMMAND.format(4_500_000) in said


def test_nobody_waits_for_a_planner_without_an_end(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = Event()
    monkeypatch.setattr(fitting, "SECONDS", 0.1)
    monkeypatch.setattr(fitting, "plan", lambda *_: over.wait())
    said, keys = told(cache, held=4_000_000, free=500_000)
    over.set()
    assert not keys
    assert COMMAND.format(4_500_000) in said


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
    assert error is not None
    assert (error.wanted, error.held, error.free) == (2**31, 40, free)
    assert "it tried to allocate 2.00 GiB; it holds 40 bytes of the GPU, of which 10 of 100 are free" in str(
        error
    )


def test_other_errors_are_not_about_memory() -> None:
    assert explain(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), 0, None) is None
    error = explain(
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: tried 0 bytes"), 0, None
    )
    assert error is not None
    assert error.wanted is None
