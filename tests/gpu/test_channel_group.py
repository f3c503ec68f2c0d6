"""torch's own pipelines over the CUDA IPC channel, several ranks on one GPU."""

import pytest

from tests.gpu.tasks import GPU
from tests.multiprocess.pool import Pool
from tests.multiprocess.test_channel_group import STAGES, train_as_torch_does, train_plainly


@pytest.mark.parametrize("schedule", STAGES)
def test_torchs_pipelines_train_as_the_plain_model(pool: Pool, schedule: str) -> None:
    reported = [losses for losses in pool.run(2, train_as_torch_does, schedule, GPU, timeout=120) if losses]
    assert reported[0] == pytest.approx(train_plainly(), rel=1e-10)
