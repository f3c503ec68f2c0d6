"""The optimizer of one stage: a minibatch's backward reads the weights that its forward read.

    F3 reads version 1      the newest                      queue: [v1]
    STEP2 makes version 2   v1 is kept: B3 will read it     queue: [v1, v2]
    B3 reads version 1      v1 is freed                     queue: [v2]

Parameters are pointed at a version (`p.data = tensor`). The base optimizers never step the parameters
themselves: that would raise autograd's version counters, and pending backwards would fail. They step
*master* tensors, which share the newest version's storage or, under mixed precision, are the float32
originals from which each version is cast. If no backward needs the newest version (the last stage,
every synchronous schedule), the step is made in place and nothing is copied.

With `predict` a forward reads weights that are predicted for its own update (`vpipe.weights.prediction`). A version is
then written when a forward first reads it, and masters always have storage of their own.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vpipe.weights.casting import hand_over_gradients
from vpipe.weights.muon import Muon
from vpipe.weights.named_optimizers import RATE_FACTOR
from vpipe.weights.optimizer_state import Changes, Record, read_state, write_state
from vpipe.weights.optimizers import NamedParameters, OptimizerFactory, make_optimizers
from vpipe.weights.prediction import Delay, PreviousWeights, write_predicted
from vpipe.weights.schedulers import SchedulerFactory, driven_by_metric, make_scheduler
from vpipe.weights.versions import Version, flat_tensors

NO_DELAY = Delay()
LATE = ".late_gradient"
"""Behind a parameter's name, among the tensors of the optimizers' state."""


class OptimizerWithWeightStashing:
    """Owns the weights of a stage: their versions, their masters, the base optimizers.

    `tied` names parameters that other stages hold too. Their updates may be applied some updates later
    than the stage's own (`vpipe.runtime.gradients` says why), so each has a base optimizer, and with it
    a learning rate, of its own. `model_names` are the trained parameters of the whole model.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: OptimizerFactory,
        *,
        tied: Sequence[str] = (),
        master_values: Mapping[str, Tensor] | None = None,
        lr_scheduler: SchedulerFactory | None = None,
        versions: int = 1,
        model_names: Collection[str] | None = None,
        predict: bool = False,
    ) -> None:
        """`versions`: how many to allocate now; more are allocated when they are needed."""
        self.names = [name for name, p in parameters.items() if p.requires_grad]
        self.model_parameters = [parameters[name] for name in self.names]
        first = self._new_version()
        for tensor, parameter in zip(first.tensors, self.model_parameters, strict=True):
            tensor.copy_(parameter.data)
        self._spare = [self._new_version() for _ in range(versions - 1)]  # before memory is fragmented
        self.queue: deque[Version] = deque([first])
        self._read: dict[int, Version] = {}
        self._pointed_at: Version | None = None
        self.predicts = predict
        self._made = 0
        self._previous = PreviousWeights() if predict else None
        self._late: dict[str, Tensor] = {}
        self.mixed = any(p.dtype in (torch.float16, torch.bfloat16) for p in self.model_parameters)
        self.separate_masters = self.mixed or predict  # else they share the newest version's storage
        self.master_parameters = self._make_masters(first, master_values)
        self._master = dict(zip(self.names, self.master_parameters, strict=True))
        self._name_of = dict(zip(self.master_parameters, self.names, strict=True))

        def made(names: Iterable[str]) -> list[Optimizer]:
            named = NamedParameters(((name, self._master[name]) for name in names), model_names)
            return make_optimizers(optimizer, named)

        self.base_optimizers = made(name for name in self.names if name not in set(tied))
        self.tied_optimizers = {name: made([name])[0] for name in tied}
        self.lr_schedulers = (
            {} if lr_scheduler is None else {id(o): make_scheduler(lr_scheduler, o) for o in self.optimizers}
        )
        self.load_new_params()

    @property
    def latest_version(self) -> int:
        """The number of updates made so far."""
        return self._made

    @property
    def current(self) -> Version:
        """The version that the parameters point at."""
        assert self._pointed_at is not None
        return self._pointed_at

    @property
    def current_version(self) -> int:
        return self.current.number

    @property
    def learning_rate(self) -> float | None:
        if not self.optimizers:
            return None
        group = self.optimizers[0].param_groups[0]
        return group["lr"] / group.get(RATE_FACTOR, 1.0)

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those of the stage's own parameters, and one for each tied parameter."""
        return [*self.base_optimizers, *self.tied_optimizers.values()]

    @property
    def num_versions(self) -> int:
        return len(self.queue)

    def load_new_params(self, minibatch: int | None = None, delay: Delay = NO_DELAY) -> None:
        """Point the parameters at the newest version; keep it for this minibatch's backward, if given.

        `delay` is that of the minibatch, where its weights are predicted.
        """
        newest = self._predicted(delay) if self.predicts else self.queue[-1]
        self._point_at(newest)
        if minibatch is not None:
            newest.users += 1
            self._read[minibatch] = newest

    def load_old_params(self, minibatch: int) -> None:
        """Point the parameters at the version that this minibatch's forward saw."""
        self._point_at(self._read[minibatch])

    def release(self, minibatch: int) -> None:
        """This minibatch's backward is done: recycle its version if no other needs it."""
        version = self._read.pop(minibatch)
        version.users -= 1
        if not version.users and version is not self.queue[-1]:
            self._recycle(version)

    def values(self) -> dict[str, Tensor]:
        """The newest weights by name; the float32 masters under mixed precision."""
        return {name: master.detach() for name, master in self._master.items()}

    @torch.no_grad()
    def load_values(self, values: Mapping[str, Tensor]) -> None:
        """Set the newest weights, by name; others stay as they are."""
        for name in self._master.keys() & values.keys():
            self._master[name].copy_(values[name])
        self._publish()

    def optimizer_state(self, besides: Collection[str] = ()) -> tuple[dict[str, Tensor], list[Record]]:
        """The base optimizers' state by parameter, without the tied parameters in `besides`."""
        tensors: dict[str, Tensor] = {}
        records = []
        tied = [optimizer for name, optimizer in self.tied_optimizers.items() if name not in besides]
        for optimizer in (*self.base_optimizers, *tied):
            own, record = read_state(optimizer, self.lr_schedulers.get(id(optimizer)), self._name_of)
            tensors |= own
            records.append(record)
        late = {name + LATE: gradient for name, gradient in self._late.items() if name not in besides}
        return tensors | late, records

    def load_optimizer_state(self, tensors: Mapping[str, Tensor], records: Sequence[Record]) -> Changes:
        """Set the base optimizers' state, tied ones included, from records of any partition."""
        changes: Changes = {}
        self._late = {
            name: tensors[name + LATE].to(master.device, master.dtype, copy=True)
            for name, master in self._master.items()
            if name + LATE in tensors
        }
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(LATE)}
        for optimizer in self.optimizers:
            scheduler = self.lr_schedulers.get(id(optimizer))
            changes = write_state(optimizer, scheduler, self._name_of, tensors, records) | changes
        return changes

    @property
    def skips_by_flag(self) -> bool:
        """Whether `step` takes flags: fused optimizers and Muon read them, once they have a state."""
        return all(
            (isinstance(optimizer, Muon) or all(group.get("fused") for group in optimizer.param_groups))
            and all(optimizer.state.get(p) for group in optimizer.param_groups for p in group["params"])
            for optimizer in self.optimizers
        )

    def step(
        self,
        tied_gradients: Mapping[str, Tensor] | None = None,
        flag: Tensor | None = None,
        tied_flags: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Make the next version: own parameters from their `.grad`, tied ones from the gradients given.

        A flag is a tensor on the device; 1 leaves weights and state as they are.
        """
        self._make_writable()
        parameters = zip(self.names, self.model_parameters, strict=True)
        hand_over_gradients(
            (p, self._master[name]) for name, p in parameters if name not in self.tied_optimizers
        )
        for parameter in self.model_parameters:
            parameter.grad = None
        for name in self._late.keys() - self.tied_optimizers.keys():  # it was tied when it was saved
            master, late = self._master[name], self._late.pop(name)
            master.grad = late if master.grad is None else master.grad.add_(late)
        for optimizer in self.base_optimizers:
            self._apply(optimizer, flag)
        self._apply_tied(tied_gradients or {}, tied_flags or {})
        self._publish()

    def keep_late(self, name: str, gradient: Tensor) -> None:
        """Keep a part of a gradient that came too late for its own update: the next one has it, also after a resume."""
        self._late[name] = gradient

    def take_late(self, name: str) -> Tensor | None:
        return self._late.pop(name, None)

    def step_tied(self, gradients: Mapping[str, Tensor]) -> None:
        """Apply updates of tied parameters that were pending when the pipeline was drained."""
        self._apply_tied(gradients, {})
        self._publish()

    def step_by_metric(self, metric: float) -> bool:
        """Step the schedulers that wait for a metric; whether there are any."""
        waiting = [scheduler for scheduler in self.lr_schedulers.values() if driven_by_metric(scheduler)]
        for scheduler in waiting:
            scheduler.step(metric)
        return bool(waiting)

    def skip(self) -> None:
        """Drop the gradients: this update is not made."""
        for parameter in self.model_parameters:
            parameter.grad = None

    def _make_masters(self, first: Version, values: Mapping[str, Tensor] | None) -> list[nn.Parameter]:
        masters = []
        for name, tensor in zip(self.names, first.tensors, strict=True):
            if self.separate_masters:
                original = tensor if values is None else values[name]
                dtype = torch.float32 if self.mixed else tensor.dtype
                masters.append(nn.Parameter(original.detach().to(tensor.device, dtype, copy=True)))
            else:
                masters.append(nn.Parameter(tensor))
        return masters

    def _new_version(self) -> Version:
        return Version(0, *flat_tensors(self.model_parameters))

    def _point_at(self, version: Version) -> None:
        if version is not self._pointed_at:
            for parameter, tensor in zip(self.model_parameters, version.tensors, strict=True):
                parameter.data = tensor
            self._pointed_at = version

    def _make_writable(self) -> None:
        """Make the newest version writable: a new one if a backward still needs it."""
        self._made += 1
        if self.predicts:
            return
        newest = self.queue[-1]
        if not newest.users:
            newest.number = self._made
            return
        version = self._take_storage(self._made)
        if not self.mixed:  # else `_publish` sets it
            for target, flat in zip(version.flats, newest.flats, strict=True):
                target.copy_(flat)
            for master, tensor in zip(self.master_parameters, version.tensors, strict=True):
                master.data = tensor

    def _predicted(self, delay: Delay) -> Version:
        """The newest weights as they will be so many updates later; written when they are first read."""
        wanted = (self._made, delay.own)
        for version in self.queue:
            if (version.number, version.ahead) == wanted:
                return version
        self._recycle_unused()
        version = self._take_storage(*wanted)
        targets: dict[nn.Parameter, Tensor] = dict(zip(self.master_parameters, version.tensors, strict=True))
        for optimizer in self.base_optimizers:
            write_predicted(optimizer, delay.own, targets)
        for name, optimizer in self.tied_optimizers.items():
            write_predicted(optimizer, delay.tied.get(name, 0), targets)
        return version

    def _take_storage(self, number: int, ahead: int = 0) -> Version:
        version = self._spare.pop() if self._spare else self._new_version()
        version.number, version.ahead = number, ahead
        self.queue.append(version)
        return version

    def _recycle(self, version: Version) -> None:
        self.queue.remove(version)
        self._spare.append(version)

    def _recycle_unused(self) -> None:
        for version in [version for version in self.queue if not version.users]:
            self._recycle(version)

    def _apply(self, optimizer: Optimizer, flag: Tensor | None = None) -> None:
        if flag is not None:
            optimizer.found_inf = flag  # type: ignore[attr-defined] # where torch's gradient scaler puts it
        if self._previous is not None:
            self._previous.begin(optimizer, flag)
        optimizer.step()
        if self._previous is not None:
            self._previous.end(optimizer)
        if flag is not None:
            del optimizer.found_inf  # type: ignore[attr-defined]
        optimizer.zero_grad(set_to_none=True)
        scheduler = self.lr_schedulers.get(id(optimizer))
        if scheduler is not None and not driven_by_metric(scheduler):
            scheduler.step()

    def _apply_tied(self, gradients: Mapping[str, Tensor], flags: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            self._master[name].grad = gradient.to(self._master[name].dtype)
            self._apply(self.tied_optimizers[name], flags.get(name))

    @torch.no_grad()
    def _publish(self) -> None:
        """The masters have changed: so does the version that the next forward reads."""
        if self.predicts:  # it is written when it is read
            self._recycle_unused()
            return
        if self.mixed:
            torch._foreach_copy_(self.queue[-1].tensors, list(self.master_parameters))
        self.load_new_params()
