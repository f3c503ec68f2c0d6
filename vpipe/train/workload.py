"""What a configuration trains: model, loss and minibatches, named ones or the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from vpipe.config.code import load_function
from vpipe.data import Sampler
from vpipe.train.datasets import check_named_data, named_batch, own_datasets
from vpipe.train.models import build_model, build_own_model
from vpipe.train.preload import prepared_model

if TYPE_CHECKING:
    from vpipe.config import RunConfig

LossFunction = Callable[..., Tensor]


class Workload(NamedTuple):
    model: nn.Module
    loss_fn: LossFunction | None
    make_batch: Callable[[int], Any]
    """The minibatch of a number: of the user's own data, or random ones of the same form."""

    @property
    def batch(self) -> Any:
        return self.make_batch(0)


def build_workload(config: RunConfig, device: str = "cpu") -> Workload:
    """For commands that look at a model without training it. A named model is built on `device`."""
    model = configured_model(config, device)
    if config.data is None:
        check_named_data(config, model)

        def make_batch(number: int) -> Any:
            return named_batch(config, model, config.batch_size, number)

        return Workload(model, configured_loss(config), make_batch)
    train = own_datasets(config).train
    sampler = Sampler(len(train), config.batch_size, config.seed)

    def read_batch(number: int) -> Any:
        epoch, indices = sampler.minibatch(number)
        return train.batch(indices, epoch)

    return Workload(model, configured_loss(config), read_batch)


def configured_model(config: RunConfig, device: str) -> nn.Module:
    if "model" in config.code:
        return build_own_model(config)
    ready = prepared_model(config) if device == "meta" else None
    return build_model(config, device).model if ready is None else ready


def configured_loss(config: RunConfig) -> LossFunction | None:
    return None if config.loss is None else load_function(config, "loss")


def configured_loss_weight(config: RunConfig) -> str | Callable[..., float]:
    return load_function(config, "loss_weight") if "loss_weight" in config.code else config.loss_weight
