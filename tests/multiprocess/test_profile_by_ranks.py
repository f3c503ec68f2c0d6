"""A device that ranks share is measured by as many processes at once, started as ranks are."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.captures import capture_unknown
from tests.end_to_end.forked import ForkedRank
from tests.end_to_end.tiny import MODEL
from tests.fake_clock import FakeClock
from tests.multiprocess.pool import Pool
from vpipe.config import RunConfig
from vpipe.config.file import read_config
from vpipe.cost import DeviceCost, LinkCost, Profile
from vpipe.pipeline import captured
from vpipe.profile import contention
from vpipe.train.profiling import profile_by_ranks

LAP = 0.25
"""Seconds that everything takes by the clock of these ranks, alone and with the others."""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    path = tmp_path / "run.yml"
    path.write_text(yaml.safe_dump(MODEL | {"stages": 2, "partition": "auto"}))
    return read_config(path)


def measure(config: RunConfig, device: str | None) -> Profile:
    """In a moment: device and link are tested elsewhere. The ranks are forked from this process, which has never
    trained: torch would refuse to train in the fork of one that has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", ForkedRank)
        patch.setattr(captured, "capture", capture_unknown)
        patch.setattr("vpipe.profile.measured_stage.clock_of", lambda device: FakeClock(step=LAP))
        patch.setattr(contention, "MARGIN", 0.1)
        patch.setattr(contention.profile_shared_device, "__defaults__", (0.4,))
        patch.setattr(contention, "measure_device", lambda place, nccl: DeviceCost(2**34, 1e10, 1e10))
        patch.setattr(contention, "measure_link", lambda place: LinkCost(1e10, 1e-5))
        if device is not None:
            patch.setenv("VPIPE_DEVICE", device)
        return profile_by_ranks(config, 2, None)


def test_one_rank_measures_alone_and_all_at_once(own_pool: Pool, config: RunConfig) -> None:
    (profile,) = own_pool.run(1, measure, config, None)
    assert len(profile.blocks) == 5
    assert profile.batch_size == 4
    assert all(block.forward == block.backward == LAP for block in profile.blocks)
    assert profile.device.shared_by == 2
    assert profile.device.crowding == 1


def test_a_rank_that_fails_ends_the_others_and_is_reported(own_pool: Pool, config: RunConfig) -> None:
    (outcome,) = own_pool.outcomes(1, measure, config, "tpu")
    assert outcome.error == "VPipeError"
    assert "device is 'tpu'" in outcome.text
