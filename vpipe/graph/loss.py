"""The module that is captured: the user's model with the loss as its only output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from vpipe.errors import CaptureError
from vpipe.graph.batch import BatchLayout


class LossModule(nn.Module):
    """Model and loss function as one module from the batch's tensors to a scalar."""

    def __init__(self, model: nn.Module, layout: BatchLayout, loss_fn: Callable[..., Tensor] | None) -> None:
        super().__init__()
        if isinstance(loss_fn, nn.Module) and any(p.requires_grad for p in loss_fn.parameters()):
            raise CaptureError(
                f"loss_fn is a {type(loss_fn).__name__} with parameters, which would not be trained: put it into the "
                "model, and let forward return the loss"
            )
        self.model = model
        self.layout = layout
        self.loss_fn = loss_fn

    def forward(self, tensors: list[Tensor]) -> Tensor:
        return self.loss_and_output(tensors)[0]

    def loss_and_output(self, tensors: list[Tensor]) -> tuple[Tensor, Any]:
        values = dict(zip(self.layout.tensors, tensors, strict=True)) | dict(self.layout.constants)
        entries = self.layout.nested(values)
        taken = self.layout.model_names
        if self.layout.kind is Mapping:
            output = self.model(**{name: entries[name] for name in taken})
        else:
            output = self.model(*(entries[name] for name in taken))
        rest = [entries[name] for name in self.layout.names if name not in taken]
        return find_loss(output, rest, self.loss_fn, type(self.model).__name__), output


def find_loss(output: Any, rest: list[Any], loss_fn: Callable[..., Tensor] | None, model: str) -> Tensor:
    """The scalar that training minimises, from the model's output and the fields that it did not take."""
    loss = _contained_loss(output) if loss_fn is None else loss_fn(output, *rest)
    if isinstance(loss, Tensor) and not loss.ndim:
        return loss
    if loss_fn is not None:
        got = _describe(loss) if isinstance(loss, Tensor) else repr(loss)
        raise CaptureError(f"loss_fn returned {got}, expected a scalar tensor; reduce it, e.g. with .mean()")
    raise CaptureError(
        f"the output of {model} holds no loss ({_describe(output)}); give capture a loss_fn,"
        " or give the batch the field (labels) from which the model computes its loss"
    )


def _contained_loss(output: Any) -> Any:
    if isinstance(output, Mapping):
        return output.get("loss")
    if isinstance(output, Tensor):
        return output
    if getattr(output, "loss", None) is not None:
        return output.loss
    if isinstance(output, tuple | list) and output:
        return output[0]
    return None


def _describe(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {[int(size) for size in output.shape]}"
    if isinstance(output, Mapping):
        return f"{type(output).__name__} with {list(output)}"
    return type(output).__name__
