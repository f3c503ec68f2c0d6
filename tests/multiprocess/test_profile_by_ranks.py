"""A device that ranks share is measured by as many processes at once, started as ranks are."""

from pathlib import Path

import pytest

from vpipe.config import RunConfig
from vpipe.config_file import read_config
from vpipe.errors import VPipeError
from vpipe.profile.by_ranks import profile_by_ranks

CONFIG = """
hidden_size: 32
num_layers: 2
num_heads: 2
vocab_size: 64
sequence_length: 16
batch_size: 4
stages: 2
partition: auto
"""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    path = tmp_path / "run.yml"
    path.write_text(CONFIG)
    return read_config(path)


@pytest.mark.timeout(120)
def test_ranks_measure_alone_and_together(config: RunConfig) -> None:
    profile = profile_by_ranks(config, 2, None)
    assert len(profile.blocks) == 5
    assert profile.batch_size == 4
    assert all(block.forward > 0 and block.backward > 0 for block in profile.blocks)
    assert profile.device.shared_by == 2
    assert profile.device.crowding >= 1


@pytest.mark.timeout(120)
def test_a_rank_that_fails_ends_the_others_and_is_told(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VPIPE_DEVICE", "tpu")
    with pytest.raises(VPipeError, match="device is 'tpu'"):
        profile_by_ranks(config, 2, None)
