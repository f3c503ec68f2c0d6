"""The memory that CUDA and NCCL take beside the allocator, measured with one rank."""

import torch

from tests.gpu.tasks import GPU
from vpipe.profile.outside import measure_outside

MIB = 2**20


def test_context_and_communicators_are_measured() -> None:
    found = measure_outside(torch.device(GPU))
    print(f"context {found.context / MIB:.0f} MiB, communicators {found.communicators / MIB:.0f} MiB")
    assert 50 * MIB < found.context < 2048 * MIB
    if torch.distributed.is_nccl_available():
        assert 0 < found.communicators < 4096 * MIB
