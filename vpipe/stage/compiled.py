"""Compiled segments: torch.compile for each stretch of a block that calls no Python of ours.

A segment's function does call some: a block that draws random numbers seeds the generators first, and a split
product puts its weight gradient off. No compiler looks through these, and masks must go on depending on
the block alone. So the function is cut there and where a block begins; each stretch between is compiled:

    plain      seed 0  embedding dropout norm   seed 1  linear gelu linear dropout add
    compiled   seed 0  [       stretch      ]   seed 1  [          stretch           ]

    with split products                         seed 1  linear [gelu] linear [dropout add]

Parameters are arguments, so equal layers are one stretch, compiled once in a process. Each stretch is one node of
autograd, whose saved tensors pass the same hooks as everybody's: recompute, swap and the count of bytes need not know.
"""

from __future__ import annotations

import importlib.util
import operator
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from vpipe.errors import VPipeError

BLOCK, SPEC = "block", "spec"
"""What is noted at each node of a function that is to be compiled: its block, and its shape and dtype."""
_WITHOUT_WORK = {"reshape", "contiguous", "clone", "sym_size", "flatten", "unflatten"}


_compiled: dict[tuple[str, str], Callable[..., Any]] = {}
"""Of this process, by backend and key: stages, pipelines and profiles of one model have most of them in common."""


class Compiler:
    """Compiles the stretches of a stage, equal ones once. `backend` is a name that torch.compile knows."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def compiled(self, function: fx.GraphModule) -> fx.GraphModule:
        """The same function, its stretches compiled when they are first run; nodes bear BLOCK and SPEC."""
        outer = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in function.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                copies[node] = outer.node_copy(node)
        for nodes in _runs(function.graph):
            if any(_works(node) for node in nodes) and not _calls_python(nodes[0]):
                stretch = _stretch(function, nodes)
                call = outer.call_function(self._compile(stretch), tuple(copies[n] for n in stretch.inputs))
                for number, node in enumerate(stretch.outputs):
                    copies[node] = outer.call_function(operator.getitem, (call, number))
            else:
                for node in nodes:
                    copies[node] = outer.node_copy(node, copies.__getitem__)
        (output,) = function.graph.find_nodes(op="output")
        outer.output(map_arg(output.args[0], copies.__getitem__))
        outer.eliminate_dead_code(lambda node: node.op != "get_attr")  # bodies that went into stretches
        return fx.GraphModule(function, outer)

    def _compile(self, stretch: _Stretch) -> Callable[..., Any]:
        key = (self._backend, stretch.key)
        if key not in _compiled:
            # Its sizes are fixed at first; those that then vary are made dynamic, once and for all.
            made = torch.compile(stretch.function.forward, backend=self._backend, fullgraph=True)
            made.__name__ = made.__qualname__ = "compiled_stretch"
            made.__module__ = __name__
            _compiled[key] = made
        return _compiled[key]


class _Stretch(NamedTuple):
    function: fx.GraphModule
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    key: str
    """Equal for stretches that compute the same from arguments of the same shapes."""


def _runs(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The operations in order: each that calls Python alone, the others of a block together."""
    run: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if run and (_calls_python(node) or _calls_python(run[-1]) or node.meta[BLOCK] != run[-1].meta[BLOCK]):
            yield run
            run = []
        run.append(node)
    if run:
        yield run


def _calls_python(node: fx.Node) -> bool:
    return any(arg.op == "placeholder" and arg.name == "context" for arg in node.all_input_nodes)


def _works(node: fx.Node) -> bool:
    """Whether it computes anything, or only looks at its input in another way."""
    if isinstance(node.target, torch._ops.OpOverload):
        return not node.target.is_view and node.target._opname not in _WITHOUT_WORK
    return getattr(node.target, "__module__", "") != "_operator"  # sizes and items of tuples


def _stretch(function: fx.GraphModule, nodes: Sequence[fx.Node]) -> _Stretch:
    """Operations as a function of their own, in which names say nothing of the layer that they are from."""
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
        copies[node] = graph.create_node(
            node.op,
            node.target,
            map_arg(node.args, copies.__getitem__),
            map_arg(node.kwargs, copies.__getitem__),
            name=f"value_{number}",
        )
    graph.output(tuple(copies[node] for node in outputs))
    made = fx.GraphModule(bodies, graph)
    codes = [module.code for module in made.modules() if isinstance(module, fx.GraphModule)]
    return _Stretch(made, inputs, outputs, "\n".join([*codes, *(str(node.meta[SPEC]) for node in inputs)]))


def check_compiler(backend: str, device: torch.device) -> None:
    """Whether what the backend calls is installed; inductor writes C++ for CPUs and Triton for GPUs."""
    if backend != "inductor":
        return
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise VPipeError(
            "compile is asked for on a GPU, which takes Triton: pip install triton, or leave it out"
        )
    wanted = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(wanted) is None:
        raise VPipeError(
            f"compile is asked for, and the C++ compiler {wanted!r} that it takes is not found: install it, name "
            "another one in the environment variable CXX, or leave compile out"
        )
