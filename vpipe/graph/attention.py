"""Attention as torch's fused kernels want it: no mask where a flag says the same, heads that share keys not copied.

Under the exporter models make masks that they leave out otherwise, and repeat the keys and values of grouped heads to
go with them:

    attention(query, repeated key, repeated value, mask)  ──▶  attention(query, key, value, causal, grouped)

A mask is left out if it is proven that it is causal, or masks nothing, for batches of any size and content.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from vpipe.graph.inplace import find_clusters, operator_name
from vpipe.graph.ownership import Clusters, bound_arguments
from vpipe.graph.targets import program_of_fields
from vpipe.graph.trace import Size, Trace, evaluate

LARGEST = 1024
"""A mask that depends on larger numbers (the window of local attention) is not looked at."""
SAMPLES = 3
WIDEST = 256
"""Largest size of a head for which kernels take grouped heads."""
EVERYTHING = torch.iinfo(torch.int64).max
"""The end of a slice that takes everything."""
_PLAIN_VIEWS = {"slice", "contiguous", "alias"}


def simplify_attention(trace: Trace) -> None:
    """Change the calls in place; what nobody reads any more is left to be pruned."""
    kinds: dict[tuple[fx.Node, tuple[Size, Size]], str | None] = {}
    clusters = find_clusters(trace.graph, trace.root)
    for node in trace.nodes():
        if operator_name(node) != "scaled_dot_product_attention":
            continue
        given = bound_arguments(node)
        query, key, mask = (given[name] for name in ("query", "key", "attn_mask"))
        if isinstance(mask, fx.Node):
            lengths = trace.specs[query].shape[-2], trace.specs[key].shape[-2]
            if (mask, lengths) not in kinds:
                kinds[mask, lengths] = _kind(mask, lengths, trace, clusters)
            kind = kinds[mask, lengths]
            if kind is None:
                continue
            given |= {"attn_mask": None, "is_causal": kind == "causal"}
        _group(given, trace)
        node.args = tuple(
            given[name] for name in ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        )
        node.kwargs = {name: given[name] for name in ("scale", "enable_gqa")}


def _group(given: dict[str, Any], trace: Trace) -> None:
    """Take keys and values before they are repeated for the heads of a group."""
    sources = [_before_repetition(given[name], trace) for name in ("key", "value")]
    sizes = {trace.specs[node].shape[-1] for node in sources if node is not None}
    heads = {trace.specs[node].shape[1] for node in sources if node is not None}
    wide = any(not isinstance(size, int) or size > WIDEST for size in sizes)
    if None not in sources and len(sizes) == len(heads) == 1 and not wide:
        given |= {"key": sources[0], "value": sources[1], "enable_gqa": True}


def _before_repetition(node: fx.Node, trace: Trace) -> fx.Node | None:
    """[samples, heads, length, size] of which `node` repeats each head, one after the other; None: of nothing."""
    if operator_name(node) not in ("reshape", "view", "_unsafe_view", "clone"):
        return None
    expanded = _source(node)
    if operator_name(expanded) != "expand":
        return None
    single = _source(expanded)
    if operator_name(single) != "unsqueeze" or single.args[1] not in (2, -3):
        return None
    found = _source(single)
    shapes = [trace.specs[each].shape for each in (found, expanded, node)]
    if len(shapes[0]) != 4 or len(shapes[2]) != 4:
        return None
    samples, heads, length, size = shapes[0]
    times = shapes[1][2]
    whole = shapes[1] == (samples, heads, times, length, size)
    return found if whole and shapes[2] == (samples, heads * times, length, size) else None


def _source(node: fx.Node) -> fx.Node:
    """What the node is a view of, without slices that take everything."""
    (source,) = node.all_input_nodes[:1]
    while operator_name(source) in _PLAIN_VIEWS and _takes_everything(source):
        source = source.all_input_nodes[0]
    return source


def _takes_everything(node: fx.Node) -> bool:
    if operator_name(node) != "slice":
        return True
    given = bound_arguments(node)
    return given["start"] in (None, 0) and given["step"] == 1 and given["end"] == EVERYTHING


def _kind(mask: fx.Node, lengths: tuple[Size, Size], trace: Trace, clusters: Clusters) -> str | None:
    """`causal`, or `nothing` that it masks; None if neither is proven.

    The mask may depend on the sizes of the batch, but not on its content. It is computed for some sizes, which are more
    than twice any number in that computation: a window or a block that is not causal would show.
    """
    program = program_of_fields(mask, trace)
    if program is None or _is_written(mask, clusters):
        return None
    fields, run = program
    sources = run.graph.find_nodes(op="placeholder")
    if any(user.target is not torch.ops.aten.sym_size.int for node in sources for user in node.users):
        return None
    values = pytree.tree_leaves([(node.args, node.kwargs) for node in run.graph.nodes])
    numbers = [abs(value) for value in values if isinstance(value, int) and abs(value) < EVERYTHING]
    largest = max(numbers, default=0)
    if sources and largest > LARGEST:
        return None
    many = 2 * largest + 8
    found = {
        _kind_of(run, fields, lengths, trace, samples, length)
        for samples, length in ((SAMPLES, many), (SAMPLES, many + 5), (many, many))
    }
    return found.pop() if len(found) == 1 else None


def _is_written(mask: fx.Node, clusters: Clusters) -> bool:
    """Whether something is written into the mask, or into what it is computed from."""
    seen, pending = {mask}, [mask]
    while pending:
        node = pending.pop()
        if clusters[node].writes:
            return True
        new = [source for source in node.all_input_nodes if source not in seen]
        seen.update(new)
        pending += new
    return False


def _kind_of(
    run: fx.GraphModule,
    fields: list[str],
    lengths: tuple[Size, Size],
    trace: Trace,
    samples: int,
    length: int,
) -> str | None:
    """The kind of the mask of a batch with these sizes."""
    sizes = {symbol: length if dimension else samples for symbol, (_, dimension) in trace.symbols.items()}
    shapes = {
        entry.name: trace.specs[node].shape for node, entry in trace.inputs.items() if node in trace.specs
    }
    empty = [torch.empty([evaluate(size, sizes) for size in shapes[name]]) for name in fields]
    try:
        with torch.no_grad():
            mask: Tensor = run(*empty)
        allowed = mask if mask.dtype is torch.bool else mask == 0
        if allowed.all():
            return "nothing"
        closed = ~mask if mask.dtype is torch.bool else mask <= torch.finfo(mask.dtype).min
        causal = torch.ones([evaluate(size, sizes) for size in lengths], dtype=torch.bool).tril()
        return "causal" if (allowed == causal).all() and (closed == ~causal).all() else None
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None  # the model takes no batch of these sizes
