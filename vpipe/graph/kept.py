"""Exported graphs that are kept for all runs of a user, by content: a model of transformers is exported once.

The exporter takes seconds, and the same configuration gives the same graph. It is written as JSON: operations by name,
sizes as expressions. A graph that holds anything else (a large constant) is not kept, and one that cannot be read is
exported again.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import platform
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, cast

import sympy
import torch
from torch import Tensor, fx, nn
from torch.utils._sympy import functions

from vpipe.errors import ConfigError
from vpipe.graph.loss import LossModule
from vpipe.graph.outputs import OutputForm
from vpipe.graph.trace import Input, Kind, Size, Spec, Trace
from vpipe.system import user_cache
from vpipe.system.files import read_json, write_json

GRAPHS = "graphs"
"""Where they are kept."""
LARGEST_CONSTANT = 256
LARGEST_FILE = 64 << 20
_PATH = "name_or_path"
"""An attribute of models: where its configuration was read from, as it was written."""
_PLAIN = (bool, int, float, str, type(None))
_TORCH_TYPES = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_ARITHMETIC = {
    "getitem", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "eq", "ne", "lt", "le", "gt", "ge",
}  # fmt: skip
"""Of Python's `operator`."""
_SYMBOLS = {"integer": True, "positive": True}
_EXPRESSIONS = {
    kind.__name__: kind
    for kind in (sympy.Add, sympy.Mul, sympy.Pow, functions.FloorDiv, functions.Mod, functions.PythonMod)
}


class Exported(NamedTuple):
    """What the exporter gives: the trace, the values that the output is made of, and its form."""

    trace: Trace
    leaves: list[fx.Node]
    form: OutputForm


class _NotKeptError(Exception):
    """It holds something that has no name in the file."""


def graph_key(module: LossModule, fields: Mapping[str, Tensor]) -> str | None:
    """A hash of all that the graph depends on; None where that is not known: models of a user's own, and losses."""
    if module.loss_fn is not None or not type(module.model).__module__.startswith("transformers."):
        return None
    code = [file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))]
    facts: list[Any] = [platform.python_version(), torch.__version__, version("transformers")]
    facts += [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in fields.items()]
    facts.append({name: repr(value) for name, value in module.layout.constants.items()})
    for name, part in module.model.named_modules():
        if not type(part).__module__.startswith(("transformers.", "torch.nn.")) or "forward" in vars(part):
            return None
        if part._forward_hooks or part._forward_pre_hooks:
            return None
        plain = sorted(
            (key, value) for key, value in vars(part).items() if isinstance(value, _PLAIN) and key != _PATH
        )
        facts.append((name, type(part).__module__, type(part).__qualname__, plain))
    for name, tensor in [*module.model.named_parameters(), *module.model.named_buffers()]:
        facts.append((name, list(tensor.shape), str(tensor.dtype), tensor.device.type, tensor.requires_grad))
    config: Any = module.model.config
    settings = json.loads(config.to_json_string(use_diff=False))
    settings.pop(f"_{_PATH}", None)
    facts += [settings, getattr(config, "_attn_implementation", None)]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for text in code:
        digest.update(text)
    return digest.hexdigest()[:32]


def find_graph(key: str) -> Exported | None:
    file = user_cache.find(GRAPHS, f"{key}.json")
    if file is None:
        return None
    with suppress(ConfigError, KeyError, ValueError, TypeError, AttributeError, IndexError):
        return _read(read_json(file, most=LARGEST_FILE))
    return None


def making_graph(key: str) -> AbstractContextManager[None]:
    """Around an export whose result will be kept, of one process at a time."""
    return user_cache.making(GRAPHS, f"{key}.json")


def keep_graph(key: str, exported: Exported) -> None:
    # torch says NotImplementedError of a structure of the output that has no name to be written by.
    with suppress(_NotKeptError, NotImplementedError):
        values = _written(exported)
        user_cache.keep(GRAPHS, f"{key}.json", lambda path: write_json(path, values))


def _written(exported: Exported) -> dict[str, Any]:
    trace, leaves, form = exported
    if trace.boundaries is not None or trace.unrolled:
        raise _NotKeptError
    number = _numbers(trace.graph)
    values = _written_graph(trace.graph, trace.root)
    for node, entry in zip(trace.graph.nodes, values["nodes"], strict=True):
        entry["path"] = list(node.meta["module_path"])
        if node in trace.specs:
            shape, dtype = trace.specs[node]
            entry["spec"] = [list(map(_written_size, shape)), _written_value(dtype, number)]
        if node in trace.inputs:
            entry["input"] = [trace.inputs[node].kind.value, trace.inputs[node].name]
    return values | {
        "loss": number[trace.loss],
        "leaves": [number[leaf] for leaf in leaves],
        "form": form.written(),
        "constants": {name: _written_constant(tensor) for name, tensor in trace.constants.items()},
        "symbols": [
            [_written_size(symbol), *place, trace.hints[symbol]] for symbol, place in trace.symbols.items()
        ],
        "bounds": [[_written_size(symbol), low, high] for symbol, (low, high) in trace.bounds.items()],
    }


def _numbers(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: place for place, node in enumerate(graph.nodes)}


def _written_graph(graph: fx.Graph, root: nn.Module) -> dict[str, Any]:
    """Its operations, and the graphs that no_grad and autocast wrap."""
    number = _numbers(graph)
    nodes, bodies = [], {}
    for node in graph.nodes:
        target = str(node.target)
        if node.op == "get_attr":
            body = root.get_submodule(target)
            if not isinstance(body, fx.GraphModule) or "." in target:
                raise _NotKeptError
            bodies[target] = _written_graph(body.graph, body)
            _add_shapes(body.graph, bodies[target])
        elif node.op == "call_function":
            target = _name(node.target)
        elif node.op not in ("placeholder", "output"):
            raise _NotKeptError
        nodes.append(
            {
                "name": node.name,
                "op": node.op,
                "target": target,
                "args": [_written_value(value, number) for value in node.args],
                "kwargs": {key: _written_value(value, number) for key, value in node.kwargs.items()},
            }
        )
    return {"nodes": nodes, "bodies": bodies}


def _add_shapes(graph: fx.Graph, values: dict[str, Any]) -> None:
    """Of results in a body, by which flops are estimated: 1 for a size that is not fixed."""
    for node, entry in zip(graph.nodes, values["nodes"], strict=True):
        if isinstance(node.meta.get("val"), Tensor):
            entry["shape"] = [size if isinstance(size, int) else 1 for size in node.meta["val"].shape]


def _written_size(value: Size) -> Any:
    if isinstance(value, int | sympy.Integer):
        return int(value)
    if isinstance(value, sympy.Symbol):
        return str(value)
    name = type(value).__name__
    if _EXPRESSIONS.get(name) is not type(value):
        raise _NotKeptError
    return [name, *map(_written_size, value.args)]


def _written_value(value: Any, number: Mapping[fx.Node, int]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):  # for which JSON has no word
        return {"float": str(value)}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, fx.Node):
        return {"node": number[value]}
    if isinstance(value, list | tuple):
        made = [_written_value(each, number) for each in value]
        return {"list" if isinstance(value, list) else "tuple": made}
    if isinstance(value, slice):
        return {"slice": [_written_value(each, number) for each in (value.start, value.stop, value.step)]}
    if isinstance(value, _TORCH_TYPES):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    raise _NotKeptError


def _written_constant(tensor: Tensor) -> Any:
    if tensor.device.type != "cpu" or tensor.numel() > LARGEST_CONSTANT or not tensor.isfinite().all():
        raise _NotKeptError
    return [tensor.tolist(), _written_value(tensor.dtype, {})]


def _name(target: Any) -> str:
    """Of an operation that `_target` finds again."""
    name = getattr(target, "__name__", "")
    if isinstance(target, torch._ops.OpOverload):
        name = str(target)
    elif isinstance(target, torch._ops.HigherOrderOperator):
        name = f"higher_order.{name}"
    with suppress(KeyError, AttributeError, ValueError):
        if _target(name) is target:
            return name
    raise _NotKeptError


def _target(name: str) -> Callable[..., Any]:
    """An operator, or a function of sizes."""
    if name in _ARITHMETIC:
        return cast(Callable[..., Any], getattr(operator, name))
    if name.startswith("sym_") and "." not in name:
        return cast(Callable[..., Any], getattr(torch, name))
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    if not isinstance(found, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        raise KeyError(name)
    return found


def _read(values: Any) -> Exported:
    graph, nodes = _read_graph(values)
    root = nn.Module()
    for name, body in values["bodies"].items():
        root.add_module(name, _read_body(body))
    trace = Trace(graph, root, {}, nodes[values["loss"]])
    symbols: dict[str, sympy.Symbol] = {}

    def size(value: Any) -> Size:
        if isinstance(value, int):
            return value
        if isinstance(value, str):
            return symbols.setdefault(value, sympy.Symbol(value, **_SYMBOLS))
        name, *args = value
        return _EXPRESSIONS[name](*map(size, args))

    for node, entry in zip(nodes, values["nodes"], strict=True):
        node.meta["module_path"] = tuple(entry["path"])
        if "spec" in entry:
            shape, dtype = entry["spec"]
            trace.specs[node] = Spec(tuple(map(size, shape)), _read_value(dtype, nodes))
        if "input" in entry:
            kind, name = entry["input"]
            trace.inputs[node] = Input(Kind(kind), name)
    trace.constants = {
        name: torch.tensor(numbers, dtype=_read_value(dtype, nodes))
        for name, (numbers, dtype) in values["constants"].items()
    }
    for symbol, field, dimension, hint in values["symbols"]:
        known = size(symbol)
        trace.symbols[known] = (field, dimension)
        trace.hints[known] = hint
    trace.bounds = {size(symbol): (low, high) for symbol, low, high in values["bounds"]}
    return Exported(trace, [nodes[leaf] for leaf in values["leaves"]], OutputForm.read(values["form"]))


def _read_graph(values: Any) -> tuple[fx.Graph, list[fx.Node]]:
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for entry in values["nodes"]:
        target = _target(entry["target"]) if entry["op"] == "call_function" else entry["target"]
        args = tuple(_read_value(value, nodes) for value in entry["args"])
        kwargs = {key: _read_value(value, nodes) for key, value in entry["kwargs"].items()}
        nodes.append(graph.create_node(entry["op"], target, args, kwargs, name=entry["name"]))
        # torch makes Python code of a graph, in which names stand as they are.
        words = [entry["name"], *kwargs, *([target] if isinstance(target, str) else [])]
        if nodes[-1].name != entry["name"] or not all(word.isidentifier() for word in words):
            raise ValueError(entry["name"])
    return graph, nodes


def _read_body(values: Any) -> fx.GraphModule:
    graph, nodes = _read_graph(values)
    for node, entry in zip(nodes, values["nodes"], strict=True):
        if "shape" in entry:
            node.meta["val"] = torch.empty(entry["shape"], device="meta")
    root = nn.Module()
    for name, body in values["bodies"].items():
        root.add_module(name, _read_body(body))
    return fx.GraphModule(root, graph)


def _read_value(value: Any, nodes: list[fx.Node]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind == "node":
        return nodes[inside]
    if kind in ("list", "tuple", "slice"):
        made = [_read_value(each, nodes) for each in inside]
        return made if kind == "list" else tuple(made) if kind == "tuple" else slice(*made)
    if kind == "float":
        return float(inside)
    if kind == "device":
        return torch.device(inside)
    found = getattr(torch, inside)
    if not isinstance(found, _TORCH_TYPES):
        raise KeyError(inside)
    return found
