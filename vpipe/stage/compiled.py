"""torch.compile for the parts of a segment that call no Python of ours.

A segment calls some: a block that draws random numbers seeds the generators first, and a split product defers its
weight gradient. The compiler cannot look through these calls, and masks must depend on the block alone. Nor does it
look into operations of other libraries, whose backward it may not be able to trace (the experts of transformers). So
the segment is cut at all of these and where a block begins; each region between two cuts is compiled:

    plain      seed 0  embedding dropout norm   seed 1  linear gelu linear dropout add
    compiled   seed 0  [       region       ]   seed 1  [           region           ]

    with split products                         seed 1  linear [gelu] linear [dropout add]

Parameters are arguments, so equal layers share one region, which a process compiles once; of several ranks on a host
the first compiles it, and the others find it in torch's cache. A region is one autograd node whose saved tensors pass
the usual hooks: recompute, swap and the count of held bytes work unchanged.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import operator
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from vpipe.errors import VPipeError
from vpipe.system.ownership import COMPILER_CACHE, own_compiler_cache

BLOCK, SPEC = "block", "spec"
"""Keys in the `meta` of each node of a function to compile: its block, and its shape and dtype."""
_WITHOUT_WORK = {"reshape", "contiguous", "clone", "sym_size", "flatten", "unflatten"}

_OWN = {"aten", "prims", "vpipe"}
"""Namespaces of operations that regions may have."""

LOCKS = 64
"""Files in torch's cache by which ranks wait for each other: regions of the same number compile in turn."""

_compiled: dict[tuple[str, str], Callable[..., Any]] = {}
"""By backend and key, for the whole process: the stages and profiles of one model have most regions in common."""


def compile_regions(function: fx.GraphModule, backend: str) -> fx.GraphModule:
    """The same function with compiled regions; `backend` is a name that torch.compile knows."""
    outer = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in function.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            copies[node] = outer.node_copy(node)
    for nodes in _runs(function.graph):
        if any(_works(node) for node in nodes) and not _stands_alone(nodes[0]):
            region = _extract(function, nodes)
            call = outer.call_function(_compile(region, backend), tuple(copies[n] for n in region.inputs))
            for number, node in enumerate(region.outputs):
                copies[node] = outer.call_function(operator.getitem, (call, number))
        else:
            for node in nodes:
                copies[node] = outer.node_copy(node, copies.__getitem__)
    (output,) = function.graph.find_nodes(op="output")
    outer.output(map_arg(output.args[0], copies.__getitem__))
    outer.eliminate_dead_code(lambda node: node.op != "get_attr")  # bodies that moved into regions
    return fx.GraphModule(function, outer)


class _Region(NamedTuple):
    function: fx.GraphModule
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    key: str
    """Equal for regions that compute the same from arguments of the same shapes."""


def _compile(region: _Region, backend: str) -> Callable[..., Any]:
    key = (backend, region.key)
    if key not in _compiled:
        # Sizes are static at first; torch makes those that then vary dynamic.
        made = torch.compile(region.function.forward, backend=backend, fullgraph=True)
        _compiled[key] = first_alone(made, region.key)
    return _compiled[key]


def first_alone(made: Callable[..., Any], key: str) -> Callable[..., Any]:
    """The same function; processes of this host that call it for the first time do so one after the other."""
    called = False

    def compiled_region(*arguments: Any) -> Any:
        nonlocal called
        if called:
            return made(*arguments)
        with _alone(key):
            result = made(*arguments)
        called = True
        return result

    return compiled_region


@contextmanager
def _alone(key: str) -> Iterator[None]:
    """Wait until no other process compiles the same; without torch's cache on disk nobody has to wait."""
    with ExitStack() as held:
        folder = os.environ.get(COMPILER_CACHE)
        if folder is not None:
            number = int(hashlib.sha256(key.encode()).hexdigest(), 16) % LOCKS
            with suppress(OSError):
                file = held.enter_context(open(Path(folder, f"vpipe-{number}.lock"), "a"))
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _runs(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The operations in order: each that is not to be compiled alone, the others of a block together."""
    operations = (node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output"))
    runs = groupby(operations, lambda node: node if _stands_alone(node) else node.meta[BLOCK])
    return (list(run) for _, run in runs)


def _stands_alone(node: fx.Node) -> bool:
    """Whether it calls Python of ours, or an operation of another library."""
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in _OWN:
        return True
    return any(arg.op == "placeholder" and arg.name == "context" for arg in node.all_input_nodes)


def _works(node: fx.Node) -> bool:
    """Whether it computes anything; views and sizes do not."""
    if isinstance(node.target, torch._ops.OpOverload):
        return not node.target.is_view and node.target._opname not in _WITHOUT_WORK
    return getattr(node.target, "__module__", "") != "_operator"  # sizes and items of tuples


def _extract(function: fx.GraphModule, nodes: Sequence[fx.Node]) -> _Region:
    """Operations as a function of their own, with names that do not depend on the layer."""
    inside = set(nodes)
    read = dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes if arg not in inside)
    inputs = [arg for arg in read if arg.op != "get_attr"]
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"argument_{i}") for i, node in enumerate(inputs)}
    bodies: dict[str, nn.Module] = {}
    for node in (arg for arg in read if arg.op == "get_attr"):
        name = f"body_{len(bodies)}"
        bodies[name] = function.get_submodule(str(node.target))
        copies[node] = graph.get_attr(name)
    for number, node in enumerate(nodes):
        args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = graph.create_node(node.op, node.target, args, kwargs, name=f"value_{number}")
    graph.output(tuple(copies[node] for node in outputs))
    made = fx.GraphModule(bodies, graph)
    codes = [module.code for module in made.modules() if isinstance(module, fx.GraphModule)]
    return _Region(made, inputs, outputs, "\n".join([*codes, *(str(node.meta[SPEC]) for node in inputs)]))


def compile_seconds() -> float:
    """The time that torch.compile has taken in this process so far."""
    if not _compiled:
        return 0.0
    from torch._dynamo.utils import compilation_time_metrics

    return sum(compilation_time_metrics.get("_compile.compile_inner", ()))


def check_compiler(backend: str, device: torch.device) -> None:
    """Raise if inductor lacks what it calls: a folder of its own, a C++ compiler for CPUs, Triton for GPUs."""
    if backend != "inductor":
        return
    own_compiler_cache()
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise VPipeError("compile needs Triton on a GPU: pip install triton, or leave compile out")
    wanted = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(wanted) is None:
        raise VPipeError(
            f"compile needs the C++ compiler {wanted!r}, which is not found: install it, name another one in the "
            "environment variable CXX, or leave compile out"
        )
