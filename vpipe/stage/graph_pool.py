"""Which minibatches of a stage are played from tape, and from which.

    minibatch   0    1    2     3      4      5
    place       -    -    a     b      a      b        -: issued as it stands, until one has run to its end
    weights     v0   v0   v1    v2     v0     v1       where a version lies: storage is used again
    tape                  a1*   b2*    a0*    b1*      *: recorded, then played; from then on only played

A minibatch has a place from its forward to the end of its backward. Of the places that are free one is taken that has
a tape for these weights, so that there are few of them. A minibatch of another shape than the first one's is issued
as it stands.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vpipe.errors import VPipeError
from vpipe.stage import StageModule
from vpipe.stage.cuda_graphs import CaptureContext, SlotMemory, StageCudaGraphs
from vpipe.weights import OptimizerWithWeightStashing
from vpipe.weights.versions import flat_tensors

Storage = tuple[int, ...]
"""Where a version of the weights lies."""
Shapes = dict[str, tuple[torch.Size, torch.dtype]]


@dataclass(eq=False)
class GraphSlot:
    """A place, the tapes that were recorded for it, and the one that is in: that of the minibatch which has it."""

    place: SlotMemory
    tapes: dict[Storage, StageCudaGraphs] = field(default_factory=dict)
    tape: StageCudaGraphs | None = None

    def forward(self, minibatch: int) -> dict[str, Tensor]:
        assert self.tape is not None
        return self.tape.forward(minibatch)

    def backward(
        self, minibatch: int, gradients: Mapping[str, Tensor], seed_gradient: float
    ) -> dict[str, Tensor]:
        """Gradients of the inputs by name, given those of the outputs; that of a loss is `seed_gradient`."""
        assert self.tape is not None
        for name, place in self.place.gradients.items():
            if name in gradients:
                place.copy_(gradients[name])
            else:
                place.fill_(seed_gradient if name == "loss" else 0.0)
        return self.tape.backward(minibatch)

    def weight_gradients(self) -> None:
        assert self.tape is not None
        self.tape.weight_gradients()


class GraphPool:
    """Those of one stage on a GPU."""

    def __init__(self, module: StageModule, weights: OptimizerWithWeightStashing, seed: int) -> None:
        self._deck = CaptureContext(module, seed)
        self._weights = weights
        self._free: list[GraphSlot] = []
        self._shapes: Shapes | None = None
        self._warm = False
        self._flats, self._places = flat_tensors(weights.model_parameters)
        self._graded: list[
            tuple[nn.Parameter, Tensor]
        ] = []  # whose gradient is not always None, and its place
        self.recorded = 0

    def gather_gradients(self) -> None:
        """Before a backward, on tape or not: gradients are added up where the tapes add theirs."""
        if all(parameter.grad is None for parameter, _ in self._graded):
            if self._graded:
                for flat in self._flats:
                    flat.zero_()
        else:
            for parameter, place in self._graded:
                if parameter.grad is None:
                    place.zero_()
                elif parameter.grad.data_ptr() != place.data_ptr():  # of one that came before all tapes
                    place.copy_(parameter.grad)
        for parameter, place in self._graded:
            parameter.grad = place

    def seat(self, inputs: Mapping[str, Tensor], fields: Mapping[str, Tensor]) -> GraphSlot | None:
        """Where a minibatch is played, laid there already; None: it is issued as it stands."""
        fields = {name: fields[name] for name in self._deck.module.stage.fields}
        shapes = {name: (t.shape, t.dtype) for name, t in [*inputs.items(), *fields.items()]}
        if self._shapes is None:
            self._shapes = shapes
        if not self._warm or shapes != self._shapes:
            return None
        version = self._weights.newest
        storage = tuple(flat.data_ptr() for flat in version.flats)
        seat = next((seat for seat in self._free if storage in seat.tapes), None)
        if seat is not None:
            self._free.remove(seat)
        else:
            seat = self._free.pop() if self._free else self._new_seat(inputs, fields)
            weights = dict(zip(self._weights.names, version.tensors, strict=True))
            seat.tapes[storage] = self._record(seat.place, weights)
        seat.tape = seat.tapes[storage]
        seat.place.lay(inputs, fields)
        return seat

    def finished(self, seat: GraphSlot | None) -> None:
        """A minibatch has run to its end, there or as it stands; its gradients are there.

        After the first one libraries have what they make at first, and it is known which parameters have gradients: an
        optimizer passes over those that have none.
        """
        if not self._warm:
            pairs = zip(self._weights.model_parameters, self._places, strict=True)
            self._graded = [(parameter, place) for parameter, place in pairs if parameter.grad is not None]
            self._warm = True
        if seat is not None:
            self._free.append(seat)

    def _new_seat(self, inputs: Mapping[str, Tensor], fields: Mapping[str, Tensor]) -> GraphSlot:
        # While something is recorded no memory can be given back to the device: what nobody uses goes before.
        gc.collect()
        torch.cuda.empty_cache()
        return GraphSlot(SlotMemory(_clones(inputs), _clones(fields)))

    def _record(self, place: SlotMemory, weights: Mapping[str, Tensor]) -> StageCudaGraphs:
        try:
            gradients = dict(zip(self._weights.names, self._places, strict=True))
            tape = StageCudaGraphs(self._deck, place, weights, gradients)
        except RuntimeError as error:
            if "captur" not in str(error):
                raise
            raise VPipeError(
                f"stage {self._deck.module.stage.index} cannot be recorded as CUDA graphs: "
                f"{str(error).splitlines()[0]}; leave cuda_graphs out"
            ) from error
        self.recorded += 1
        return tape


def _clones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
