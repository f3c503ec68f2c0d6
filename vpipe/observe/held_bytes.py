"""What a stage holds, in bytes: counted for its first minibatch, and known of its weights.

Counting what autograd saves is too dear to be always on (`vpipe.stage.held`). All minibatches of a stage hold about the
same, so the first one's forward is counted and then the count is taken away again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from vpipe.schedule import Op
from vpipe.stage.held import Held

if TYPE_CHECKING:
    from vpipe.runtime import StageRuntime
    from vpipe.runtime.stage_runtime import Method
    from vpipe.stage import Stage


def count_first_forwards(runtime: StageRuntime) -> dict[int, int]:
    """For each stage of the rank what its first minibatch holds for backward; filled while training begins."""
    found: dict[int, int] = {}

    def wrapper(plain: Method) -> Method:
        def counted(stage: Stage, minibatch: int) -> None:
            if runtime.forward_only or stage.index in found:
                return plain(stage, minibatch)
            stage.held = held = Held()
            plain(stage, minibatch)
            stage.held = None
            found[stage.index] = held.now
            if len(found) == len(runtime.stages):
                runtime.wrap(Op.F, lambda current: plain if current is counted else current)
            return None

        return counted

    runtime.wrap(Op.F, wrapper)
    return found


def weights_of(stage: Stage) -> int:
    """One version of the weights, trained or not, and the buffers."""
    module = stage.module
    return _bytes((*module.parameters_by_name.values(), *module.buffers_by_name.values()))


def optimizer_of(stage: Stage) -> int:
    """The masters, where they are not the weights themselves, and the base optimizers' state."""
    optimizer = stage.optimizer
    states = [values for base in optimizer.optimizers for values in base.state.values()]
    state = [value for values in states for value in values.values()]
    masters = optimizer.master_parameters if optimizer.mixed else []
    return _bytes((*masters, *(value for value in state if isinstance(value, Tensor))))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
