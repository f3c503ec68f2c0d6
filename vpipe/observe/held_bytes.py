"""The bytes of a stage: of its first minibatch, of its weights and of its optimizer.

Counting what autograd saves is too expensive to be always on (`vpipe.stage.held`). All minibatches of a stage hold
about the same, so only the first forward is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from vpipe.schedule import Op
from vpipe.stage.held import Held

if TYPE_CHECKING:
    from vpipe.pipeline import Pipeline
    from vpipe.runtime.prefetch import Work
    from vpipe.stage import Stage


def count_first_forwards(pipe: Pipeline) -> dict[int, int]:
    """For each stage of the rank the bytes that its first minibatch keeps for backward; filled as training begins."""
    found: dict[int, int] = {}

    def count(work: Work) -> Callable[[], None] | None:
        stage = work.stage
        if work.evaluation or stage.index in found:
            return None
        stage.held = held = Held()

        def counted() -> None:
            stage.held = None
            found[stage.index] = held.now
            if len(found) == len(pipe.runtime.stages):
                remove()

        return counted

    remove = pipe.on_action(count, (Op.F,))
    return found


def weights_of(stage: Stage) -> int:
    """One version of the weights, trained or not, and the buffers."""
    return sum(tensor.nbytes for tensor in stage.module.tensors_by_name.values())


def optimizer_of(stage: Stage) -> int:
    """The masters, where they are not the weights themselves, and the base optimizers' state."""
    optimizer = stage.optimizer
    states = [values for base in optimizer.optimizers for values in base.state.values()]
    state = [value for values in states for value in values.values()]
    masters = optimizer.master_parameters if optimizer.separate_masters else []
    return sum(value.nbytes for value in (*masters, *state) if isinstance(value, Tensor))
