"""A copy of the training state, in memory that is kept for it: training goes on while the copy is written."""

from collections.abc import Mapping

import torch
from torch import Tensor

from vpipe.stage.stage import StageState


class Snapshot:
    """The buffers of a rank's stages. The first copy allocates them, the next ones write into them again."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str], Tensor] = {}

    def take(self, stages: Mapping[int, StageState]) -> dict[int, StageState]:
        """The same states over buffers of our own, in host memory."""
        taken = {
            index: StageState(
                {name: self._copy((index, name), tensor) for name, tensor in stage.tensors.items()},
                stage.optimizers,
            )
            for index, stage in stages.items()
        }
        if any(t.is_cuda for stage in stages.values() for t in stage.tensors.values()):
            torch.cuda.current_stream().synchronize()
        return taken

    def _copy(self, key: tuple[int, str], tensor: Tensor) -> Tensor:
        kept = self._kept.get(key)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._kept[key] = kept
        return kept.copy_(tensor, non_blocking=tensor.is_cuda)
