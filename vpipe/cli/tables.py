"""What `vpipe blocks` and `vpipe verify` print: plain data, and tables of it; and how any table is shown."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from vpipe.config import RunConfig
    from vpipe.verify import Verification


def describe_blocks(config: RunConfig) -> dict[str, Any]:
    """The blocks of the configured model, from a model on `meta`: it takes no memory."""
    from vpipe.graph import capture
    from vpipe.stage.precision import compute_dtype
    from vpipe.train.models import build_model

    model, batch, loss_fn = build_model(config, "meta")
    dtype = compute_dtype(config.precision)
    graph = capture(model if dtype is None else model.to(dtype), batch, loss_fn)
    return {
        "model": type(model).__name__,
        "batch_size": config.batch_size,
        "sequence_length": config.sequence_length,
        "parameters": sum(info.shape.numel() for info in graph.parameters.values()),
        "blocks": [
            {
                "index": block.index,
                "name": block.name,
                "parameters": block.num_parameters,
                "flops": block.flops,
                "cut_bytes": block.cut_bytes,
            }
            for block in graph.blocks
        ],
    }


def block_table(described: dict[str, Any]) -> Table:
    found = described["blocks"]
    minibatch = f"{described['batch_size']} x {described['sequence_length']} tokens"
    table = Table(title=f"{described['model']}: {len(found)} blocks, minibatches of {minibatch}")
    table.add_column("block", justify="right")
    table.add_column("name", overflow="fold")
    table.add_column("parameters", justify="right")
    table.add_column("flops", justify="right")
    table.add_column("bytes behind it", justify="right")
    for block in found:
        numbers = (block["parameters"], block["flops"], block["cut_bytes"])
        table.add_row(str(block["index"]), block["name"], *(f"{number:,}" for number in numbers))
    table.caption = (
        f"{described['parameters']:,} parameters; one that several blocks use counts in each of them"
    )
    return table


def describe_verification(result: Verification) -> dict[str, Any]:
    return {**asdict(result), "ok": result.ok}


def verification_table(result: Verification) -> Table:
    run = f"{result.updates} updates of {result.minibatches // result.updates} minibatches"
    title = f"schedule {result.schedule}, partition {list(result.partition)}, {result.ranks} ranks, {run}"
    table = Table(title=title)
    table.add_column("compared")
    table.add_column("largest relative difference", justify="right")
    table.add_column("where", overflow="fold")
    for what, difference in result.differences.items():
        wrong = not difference.largest <= result.bound
        number = f"{difference.largest:.1e}"
        table.add_row(what, f"[bold red]{number}[/]" if wrong else number, difference.where)
    return table


def verdict(result: Verification) -> str:
    """One line: equal or not, and where it is worst."""
    bound = f"{result.bound:g} ({result.dtype})"
    wrong = {what: d for what, d in result.differences.items() if not d.largest <= result.bound}
    if not wrong:
        return f"equal: the pipeline trains as the plain model does, within {bound}"
    what, worst = max(wrong.items(), key=lambda item: item[1].largest)
    return f"DIFFERENT: {what} by {worst.largest:.1e} at {worst.where}, more than {bound}"
