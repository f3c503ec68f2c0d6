"""A trace from a program of `torch.export`: the model's own names, symbolic sizes, no assertions."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from vpipe.errors import CaptureError
from vpipe.graph.loss import LossModule
from vpipe.graph.trace import Input, Kind, Spec, Trace, as_size, free_symbols

_KINDS = {
    InputKind.PARAMETER: Kind.PARAMETER,
    InputKind.BUFFER: Kind.BUFFER,
    InputKind.CONSTANT_TENSOR: Kind.CONSTANT,
    InputKind.USER_INPUT: Kind.FIELD,
}
_ASSERTIONS = ("_assert", "sym_constrain_range", "_check")
_SIZES = {
    torch.ops.aten.sym_size.int,
    torch.ops.aten.sym_numel.default,
    torch.ops.aten.sym_stride.int,
}


def trace_exported(program: ExportedProgram, module: LossModule, fields: dict[str, Tensor]) -> Trace:
    """The exported graph with named inputs and without what only the exporter needs."""
    graph = program.graph_module.graph
    output = next(iter(reversed(graph.nodes)))
    inputs = _named_inputs(program, module.model, list(fields))
    constants = {e.name: program.constants[e.name] for e in inputs.values() if e.kind is Kind.CONSTANT}
    trace = Trace(
        graph, program.graph_module, inputs, output.args[0][0], constants, bounds=_size_bounds(program)
    )
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            value = node.meta["val"]
            trace.specs[node] = Spec(tuple(map(as_size, value.shape)), value.dtype)
        node.meta["module_path"] = _path(node)
    _bind_symbols(trace, fields)
    _merge_ties(trace)
    _drop_assertions(trace.root)
    _read_sizes_from_fields(trace)
    return trace


def check_constants(trace: Trace, model: nn.Module) -> None:
    """Raise for a constant that is read and has no values, in a graph without what nobody reads."""
    for entry in trace.inputs.values():
        constant = trace.constants[entry.name] if entry.kind is Kind.CONSTANT else None
        if constant is not None and constant.is_meta and constant.numel():
            raise CaptureError(
                f"cannot capture {type(model).__name__} on the meta device: its constant "
                f"{entry.name.removeprefix('model.')!r} has no values there: make it a buffer that reset_parameters() "
                "sets, or build the model on the cpu"
            )


def _named_inputs(program: ExportedProgram, model: nn.Module, fields: list[str]) -> dict[fx.Node, Input]:
    canonical = canonical_names(model)
    placeholders = [node for node in program.graph_module.graph.nodes if node.op == "placeholder"]
    remaining = iter(fields)
    inputs: dict[fx.Node, Input] = {}
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        kind = _KINDS[spec.kind]
        if kind is Kind.FIELD:
            name = next(remaining)
        elif kind is Kind.CONSTANT:
            name = str(spec.target)
        else:
            name = canonical[str(spec.target).removeprefix("model.")]
        inputs[node] = Input(kind, name)
    return inputs


def canonical_names(model: nn.Module) -> dict[str, str]:
    """The first name of the same tensor, for each name of a parameter or buffer."""
    first: dict[int, str] = {}
    result: dict[str, str] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        result[name] = first.setdefault(id(tensor), name)
    return result


def _path(node: fx.Node) -> tuple[str, ...]:
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    parts = tuple(part.split("@")[0] for part in path.split(".")) if path else ()
    return parts[1:] if parts and parts[0] == "model" else ()


def _bind_symbols(trace: Trace, fields: dict[str, Tensor]) -> None:
    for node, entry in trace.inputs.items():
        if entry.kind is not Kind.FIELD:
            continue
        for dimension, size in enumerate(trace.specs[node].shape):
            if isinstance(size, sympy.Symbol) and size not in trace.symbols:
                trace.symbols[size] = (entry.name, dimension)
                trace.hints[size] = fields[entry.name].shape[dimension]


def _merge_ties(trace: Trace) -> None:
    """One placeholder for all names of a tensor."""
    first: dict[Input, fx.Node] = {}
    for node, entry in trace.inputs.items():
        kept = first.setdefault(entry, node)
        if kept is not node:
            node.replace_all_uses_with(kept)


def _drop_assertions(root: nn.Module) -> None:
    """Erase runtime checks, here and in the graphs that no_grad and autocast wrap."""
    for module in root.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in reversed(list(module.graph.nodes)):
            name = getattr(node.target, "__name__", "")
            if node.op == "call_function" and not node.users and name.startswith(_ASSERTIONS):
                module.graph.erase_node(node)


def _read_sizes_from_fields(trace: Trace) -> None:
    """Compute sizes of intermediate values from the batch's sizes, so that no value is kept for its size."""
    graph = trace.graph
    by_name = {entry.name: node for node, entry in trace.inputs.items() if entry.kind is Kind.FIELD}
    first = next(trace.nodes())
    sources: dict[sympy.Symbol, fx.Proxy] = {}

    def source(symbol: sympy.Symbol) -> fx.Proxy:
        if symbol not in sources:
            name, dimension = trace.symbols[symbol]
            with graph.inserting_before(first):
                node = graph.call_function(torch.ops.aten.sym_size.int, (by_name[name], dimension))
            sources[symbol] = fx.Proxy(node)
        return sources[symbol]

    for node in list(trace.nodes()):
        if node.target not in _SIZES or trace.kind(node.all_input_nodes[0]) is Kind.FIELD:
            continue
        size = as_size(node.meta["val"])
        if not free_symbols(size) <= trace.symbols.keys():
            continue
        with graph.inserting_before(node):
            value: Any = size
            if not isinstance(size, int):
                bound = {symbol: source(symbol) for symbol in free_symbols(size)}
                value = sympy_interp(PythonReferenceAnalysis, bound, size)
        _replace(node, value.node if isinstance(value, fx.Proxy) else value)
        graph.erase_node(node)


def _replace(node: fx.Node, value: Any) -> None:
    """Give the node's users another node or a plain number in its place."""
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda arg: value if arg is node else arg)
        user.kwargs = fx.map_arg(user.kwargs, lambda arg: value if arg is node else arg)


def _size_bounds(program: ExportedProgram) -> dict[Any, tuple[int, int | None]]:
    """Smallest and largest value of each symbolic size.

    The exporter assumes sizes of at least 2; like its own runtime check, we accept 1.
    """
    bounds: dict[Any, tuple[int, int | None]] = {}
    for symbol, limits in program.range_constraints.items():
        low = int(limits.lower)
        high = int(limits.upper) if limits.upper.is_finite and limits.upper < 2**31 else None
        bounds[symbol] = (low if low > 2 else 1, high)
    return bounds
