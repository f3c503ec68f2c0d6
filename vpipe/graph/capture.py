"""Capture of a model as a graph, from an example batch.

`torch.export` runs the model once on fake tensors, in training mode, with all sizes of the batch symbolic (of images
only their number); if that fails, with only the number of samples symbolic, then with none. Of an `nn.Sequential` that
cannot be exported at all, each child becomes one operation (`opaque.py`).
"""

from __future__ import annotations

import contextlib
import io
import logging
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vpipe.errors import CaptureError, VPipeError
from vpipe.graph.attention import simplify_attention
from vpipe.graph.batch import Batch, BatchLayout, FieldCheck, for_tracing
from vpipe.graph.capture_mode import CaptureMode
from vpipe.graph.exported import check_constants, trace_exported
from vpipe.graph.head import find_heads
from vpipe.graph.inplace import functionalise, protect_fields, prune
from vpipe.graph.kept import Exported, find_graph, graph_key, keep_graph, making_graph
from vpipe.graph.lengths import free_lengths
from vpipe.graph.loss import LossModule
from vpipe.graph.model_graph import ModelGraph
from vpipe.graph.opaque import trace_sequential
from vpipe.graph.outputs import ModelOutput, OutputForm
from vpipe.graph.trace import Trace
from vpipe.system.start import collector_off

_LOG = logging.getLogger(__name__)
"""At DEBUG it has torch's own traceback of a capture that fails; the error that users see is one line."""

# `_quiet` changes the logging of the whole process: one export at a time.
_EXPORTING = threading.Lock()


def capture(
    model: nn.Module,
    example_batch: Batch,
    loss_fn: Callable[..., Tensor] | None = None,
    *,
    chunked_loss: bool = True,
    keep: bool = False,
) -> ModelGraph:
    """The model as a graph from the batch to its loss, with the blocks at which it can be cut.

    Args:
        model: Any module that `torch.export` can capture; it may be on the `meta` device.
        example_batch: A minibatch: a dict (keys: parameters of `forward`), a sequence or one tensor.
        loss_fn: `loss_fn(output, *rest)` gets the fields that `forward` does not take. Without it the output has to
            contain the loss.
        chunked_loss: Whether stages compute the head and the loss of a large vocabulary in pieces.
        keep: Whether what is exported of a model of transformers is kept for other processes, which do not export it
            again. Only where no code of a user has changed these models.
    """
    layout = BatchLayout(model, example_batch, loss_fn)
    entries = layout.entries(example_batch)
    fields = {name: entries[name] for name in layout.tensors}
    with _training(model), collector_off():
        module, traced = LossModule(model, layout, loss_fn), for_tracing(fields, model)
        key = graph_key(module, traced) if keep else None
        trace = _trace(module, traced) if key is None else _kept_trace(module, traced, key)
        if trace.boundaries is None:
            images = {name: _is_image(tensor) for name, tensor in traced.items()}
            free_lengths(trace, traced, images, lambda others: _trace_export(module, others))
    check = FieldCheck(layout, fields, trace)
    simplify_attention(trace)
    prune(trace)
    check_constants(trace, model)
    trace.heads = find_heads(trace) if chunked_loss else ()
    return ModelGraph(model, trace, check)


def _kept_trace(module: LossModule, fields: dict[str, Tensor], key: str) -> Trace:
    """Of processes that start at the same time one exports, the others wait and read what it has kept."""
    found = find_graph(key)
    if found is None:
        with making_graph(key):
            found = find_graph(key)
            if found is None:
                return _trace(module, fields, key)
    return _with_output(found)


def _trace(module: LossModule, fields: dict[str, Tensor], key: str | None = None) -> Trace:
    try:
        program, form = _export(module, list(fields.values()))
    except VPipeError:
        raise
    except Exception as error:
        plain = len(module.layout.model_names) == 1 and not module.layout.forms
        if isinstance(module.model, nn.Sequential) and plain:
            with contextlib.suppress(RuntimeError, TypeError, IndexError):
                trace = trace_sequential(module, fields)
                protect_fields(trace)
                return trace
        _LOG.debug("torch.export failed", exc_info=error)
        raise _explain(error, module.model) from None
    exported = _from_export(program, form, module, fields)
    if key is not None:
        keep_graph(key, exported)
    return _with_output(exported)


def _trace_export(module: LossModule, fields: dict[str, Tensor]) -> Trace:
    return _with_output(_from_export(*_export(module, list(fields.values())), module, fields))


def _from_export(
    program: ExportedProgram, form: OutputForm, module: LossModule, fields: dict[str, Tensor]
) -> Exported:
    trace = trace_exported(program, module, fields)
    functionalise(trace)
    protect_fields(trace)
    (end,) = trace.graph.find_nodes(op="output")
    (_, *leaves), *_ = end.args
    end.args = ((trace.loss,),)
    return Exported(trace, leaves, form)


def _with_output(exported: Exported) -> Trace:
    trace, leaves, form = exported
    trace.output = ModelOutput(trace, leaves, form)
    return trace


class _Capturing:
    """A run of the exporter: what is captured, and the form of the output that the model has returned.

    An object of its own, because the exporter restores the attributes of modules.
    """

    def __init__(self, module: LossModule) -> None:
        self.module = module
        self.form: OutputForm | None = None

    def run(self, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        loss, output = self.module.loss_and_output(tensors)
        self.form = OutputForm(output)
        return loss, self.form.take_tensors()


class _WithOutput(nn.Module):
    """The loss, and the tensors of the model's output."""

    def __init__(self, capturing: _Capturing) -> None:
        super().__init__()
        self.model = capturing.module.model  # the only submodule: tensors of a loss_fn are constants
        self._capturing = capturing

    def forward(self, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        return self._capturing.run(tensors)


def _export(module: LossModule, tensors: list[Tensor]) -> tuple[ExportedProgram, OutputForm]:
    """The first export that succeeds: all sizes symbolic, the number of samples only, none."""
    every = [dict.fromkeys(range(1 if _is_image(t) else t.ndim), Dim.AUTO) for t in tensors]
    samples = [{0: Dim.AUTO} if t.ndim else {} for t in tensors]
    first: Exception | None = None
    for dynamic in (every, samples, None):
        try:
            with _quiet(), CaptureMode():
                shapes = None if dynamic is None else (dynamic,)
                run = _Capturing(module)
                program = torch.export.export(
                    _WithOutput(run), (tensors,), dynamic_shapes=shapes, strict=False
                )
                assert run.form is not None
                return program, run.form
        except Exception as error:
            mistake = _own_error(error)
            if mistake is not None:
                raise mistake from None
            first = first or error
    assert first is not None
    raise first


def _is_image(tensor: Tensor) -> bool:
    """Samples, channels, height, width; or a video's, with frames.

    Height and width stay fixed: models divide them into patches and windows, which takes the exporter a minute and
    more with symbols.
    """
    return tensor.ndim in (4, 5) and tensor.is_floating_point()


@contextlib.contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Training mode; a model that is in it already keeps the modes of its modules (a frozen norm)."""
    modes = {module: module.training for module in model.modules()}
    if not model.training:
        model.train()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's output (graphs printed on failure, warnings)."""
    with _EXPORTING:
        level = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
                warnings.simplefilter("ignore")
                yield
        finally:
            logging.disable(level)


def _own_error(error: BaseException) -> VPipeError | None:
    """The VPipeError that caused an error of the exporter, if any."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, VPipeError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


def _explain(error: Exception, model: nn.Module) -> CaptureError:
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if "data-dependent" in str(error).lower():
        fix = (
            "rewrite that line without control flow that depends on the data (torch.where, torch.cond),"
            " or give the model as an nn.Sequential, whose children need not be captured"
        )
    elif any("numpy" in Path(frame.filename).parts for frame in traceback.extract_tb(error.__traceback__)):
        fix = (
            "that line computes with numpy, which a graph cannot hold: use torch there, or switch it off (masks of"
            " SpecAugment: mask_time_prob and mask_feature_prob 0)"
        )
    else:
        fix = "run the model once on the example batch to see whether they fit each other"
    name = type(error).__name__
    return CaptureError(
        f"cannot capture {type(model).__name__}: {name}: {reason.strip()}{_place(error)}; {fix}"
    )


def _place(error: BaseException) -> str:
    """The innermost line of the user's model in the error's traceback."""
    others = (Path(__file__).parent, Path(torch.__file__).parent, Path(numpy.__file__).parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(Path(frame.filename).is_relative_to(other) for other in others)
        and Path(frame.filename).exists()
    ]
    if not frames:
        return ""
    frame = frames[-1]
    return f" (at {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line})"
