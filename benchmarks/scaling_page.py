"""The text of docs/scaling.md, from its rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

from scaling_layouts import HOST_MEMORY
from scaling_models import MODELS, Model, measured_samples
from scaling_pipeline import ALONE, HOST, INSIDE, LATENCY
from scaling_rows import BOUNDS, Row

from vpipe.cost import KEEP, RECOMPUTE, SWAP
from vpipe.schedule import kind_of

MARKS = {"compute": "c", "bubble": "b", "link": "l", "reduction": "r", "swap": "s"}
POLICIES = {KEEP: "keep", RECOMPUTE: "recompute", SWAP: "swap"}
CAPTION = """\
Of each schedule the best memory policy and layout. Where a point is missing nothing fits into
memory, or the batch has too few sequences.
"""
PAPER = (
    "Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, 2021"
)


def page(rows: Sequence[Row], card: Mapping[str, float | str], speed: float) -> str:
    """`speed`: operations a second of the card, of which shares are given."""
    parts = [
        opening(card, speed),
        "![Share of the card's speed by the number of GPUs](drawings/scaling.svg)\n",
        CAPTION,
        findings(rows),
        best(rows),
        method(card),
        *(every_point(model, rows) for model in present(rows)),
    ]
    return "\n".join(parts)


def opening(card: Mapping[str, float | str], speed: float) -> str:
    return f"""# Scaling on paper

How fast BERT-large and GPT-like models of 1.3, 13 and 175 billion parameters would train on 8 to
1,024 GPUs with vpipe. **Nothing on this page ran on more than one GPU.** The blocks of each model
were measured on one {card["device"]} (torch {card["torch"]}, {card["about"]}); the rest is simulated.
One command writes this page, its plot and [all points](measured/scaling.csv):
```
python benchmarks/scaling.py             # 5 minutes of processor time, on two cores; no GPU
python benchmarks/scaling_profile.py     # on the GPU: measures the blocks again
```
A share of the card is the arithmetic of the model (without what is recomputed) in relation to
{speed / 1e12:.0f} TFLOP/s, as for `mfu` of `vpipe train`.
"""


def findings(rows: Sequence[Row]) -> str:
    """Sentences whose figures are those of the rows."""
    lines = ["## What it says"]
    for model in present(rows):
        lines += wrapped(sentence(model, rows), "- ", "  ")
    for text in (
        "These are synchronous schedules, which train like the plain model. Asynchronous ones (`2bw`, `pipedream`) "
        "have no bubble, but need more samples for the same loss ([convergence.md](convergence.md)).",
        small_minibatches(rows),
        plausibility(rows),
    ):
        lines += ["", *wrapped(text)] if text else []
    return "\n".join(lines) + "\n"


def sentence(model: Model, rows: Sequence[Row]) -> str:
    own = [row for row in rows if row.model == model.name and is_synchronous(row)]
    said = []
    for gigabits in sorted({row.gigabits for row in own}, reverse=True):
        tops = []
        for gpus in (min(row.gpus for row in own if row.tokens_per_second), max(row.gpus for row in own)):
            top = best_of(row for row in own if row.gpus == gpus and row.gigabits == gigabits)
            if top is not None:
                tops.append(
                    f"{top.of_card:.2f} of the card on {gpus:,} GPUs ({named(top)}, bound by {top.bound})"
                )
        said.append(f"with {gigabits} Gbit/s {' and '.join(dict.fromkeys(tops))}")
    return f"{model.name}: {'; '.join(said)}."


def small_minibatches(rows: Sequence[Row]) -> str:
    if {row.samples for row in rows if row.model == "BERT-large"} != {4}:
        return ""
    return (
        "BERT-large was measured with minibatches of 4 samples only. There the host takes several times as long to "
        "launch the kernels as the GPU to run them: *computing* is that of the host, and larger minibatches or "
        "`cuda_graphs` would be faster. With profiles of 16 and 64 samples, which the second command above measures "
        "too (`--models BERT`), the first one would use the best of them."
    )


def plausibility(rows: Sequence[Row]) -> str:
    big = [row for row in rows if (row.model, row.gpus, row.gigabits) == ("GPT 175B", 1024, 400)]
    top = best_of(filter(is_synchronous, big))
    if top is None:
        return ""
    return (
        f"Is that plausible? For GPT 175B on 1,024 GPUs with 400 Gbit/s the page has {top.tflops:.0f} TFLOP/s a GPU. "
        f"Megatron-LM reported about 140 on 1,024 A100 ({PAPER}), with tensor parallelism and faster networks: 0.45 of "
        f"the 312 TFLOP/s of that card, beside {top.tflops / 989:.2f} of the 989 that an H200 has on its data sheet."
    )


def best(rows: Sequence[Row]) -> str:
    lines = [
        "## The best schedule",
        *wrapped(
            "For each number of GPUs the fastest synchronous schedule with its memory policy and layout. A layout is "
            "written as stages x pipelines, and the samples of a minibatch. Next to what bounds the point stand the "
            "shares of the time that are not computing, the largest first; how much time the fastest layout would save "
            "that does not fit into memory; and the fastest asynchronous schedule with its TFLOP/s."
        ),
        "",
        "| model | GPUs | Gbit/s | schedule | policy | layout | tokens/s | TFLOP/s a GPU | of the card | memory, GiB "
        "| bound by | not computing | more memory saves | asynchronous |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model in present(rows):
        own = [row for row in rows if row.model == model.name]
        for gpus, gigabits in sorted({(row.gpus, row.gigabits) for row in own}):
            here = [row for row in own if (row.gpus, row.gigabits) == (gpus, gigabits)]
            top = best_of(filter(is_synchronous, here))
            other = best_of(row for row in here if not is_synchronous(row))
            stale = "" if other is None else f"{named(other)} {other.tflops:.0f}"
            if top is None:
                least = min(filter(is_synchronous, here), key=lambda row: row.gib)
                cells = [
                    "none fits",
                    "",
                    "",
                    "",
                    "",
                    "",
                    f"{least.gib:,.0f} at least",
                    "memory",
                    "",
                    "",
                    stale,
                ]
            else:
                cells = [
                    f"`{top.schedule}`" if top.schedule != ALONE else ALONE,
                    POLICIES[top.policy],
                    f"{top.stages} x {top.pipelines}, {top.samples}",
                    f"{top.tokens_per_second:,}",
                    f"{top.tflops:.0f}",
                    f"{top.of_card:.3f}",
                    f"{top.gib:.0f}",
                    top.bound,
                    losses(top),
                    f"{top.memory_gain:.0%}" if top.memory_gain >= 0.01 else "",
                    stale,
                ]
            lines.append("| " + " | ".join([model.name, f"{gpus:,}", str(gigabits), *cells]) + " |")
    return "\n".join(lines) + "\n"


def losses(row: Row) -> str:
    found = {name: getattr(row, name) for name in MARKS if name != "compute"}
    shown = sorted((name for name in found if found[name] >= 0.01), key=lambda name: -found[name])
    return ", ".join(f"{name} {found[name]:.0%}" for name in shown)


def method(card: Mapping[str, float | str]) -> str:
    lines = ["## How it was computed"]
    for text in (
        "Models: the table below. BERT-large has the batch of the LAMB paper. GPT-like ones have the sizes and batches "
        "of the GPT-3 paper, a head of its own, and no dropout; vocabularies are padded to a multiple of 128. "
        "Attention has no mask, so torch takes its fused kernels. bf16 with float32 masters, AdamW.",
        "Blocks: of each model two layers, the embedding and the head were built in their real width and measured "
        "with vpipe's profiler, eagerly, for each size of a minibatch. All other layers repeat them. At the limit of "
        "its power a card multiplies small or equal numbers faster, and the profiler's gradients are ones: in the same "
        f"run a product of random 8192 x 8192 matrices reached {float(card['matrix_flops']) / 1e12:.0f} TFLOP/s, "
        "less than some blocks.",
        f"Assumed, not measured: GPUs of a host are connected with {INSIDE.bandwidth / 1e9:.0f} GB/s each way (0.8 of "
        f"NVLink 4) and {INSIDE.latency * 1e6:.0f} µs. Hosts have {HOST} GPUs, one network card of 100 or 400 Gbit/s "
        f"each way that all of them share, {LATENCY * 1e6:.0f} µs, and {HOST_MEMORY / 2**40:.0f} TiB of memory. Each "
        "GPU has its own link to host memory, as fast as the measured one.",
        "Partition: the slowest stage is as fast as it can be. All blocks have the same policy: kept, recomputed or "
        "swapped.",
        "Layouts: 2 to 64 stages (powers of two, with the chunks of a rank at most one for each layer), and as many "
        "equal pipelines as there are GPUs for. A host holds either as much of a pipeline as it can, or as many "
        "replicas of a stage. All of these are simulated with all measured minibatches, unless they "
        "cannot be faster than the best so far; the fastest that fits counts. "
        f"*{ALONE.capitalize()}* has the whole model on each GPU.",
        "One pipeline is simulated with `vpipe.simulate`, since all are equal. A message has the whole network card, "
        "and the card is then busy with those of the other pipelines that share it. Beyond three minibatches for each "
        "stage a step goes on at the pace of the third. A simulation of all pipelines gives the same within 1 %, in "
        "the worst case 5 % (`tests/unit/test_scaling.py`).",
        "Gradients are added up in bf16: inside each host, between hosts, and inside again, beginning during the last "
        "backward. The card of a host carries those of its stages one after the other; messages between stages are "
        "not held up by that. In `vpipe simulate` they wait for the part of a bucket that is under way "
        "([many_machines.md](many_machines.md#links-beside-computing)).",
        "An update has the batch of the table, in every schedule but `pipedream` (and `vpipe`, which has the same "
        "order): there it is one minibatch of each pipeline, and gradients are added up as often.",
        "Bound: gradients are made free, then links, then copies to the host, and the point is computed again each "
        "time. What the update gets shorter by is the share of that thing. What is left beyond the work of the busiest "
        "rank is the bubble. The largest share bounds the point.",
    ):
        lines += wrapped(text, "- ", "  ")
    lines += [
        "",
        "| model | layers | width | heads | vocabulary | sequence | batch, sequences | samples of a minibatch |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        cells = (
            model.name,
            model.layers,
            f"{model.width:,}",
            model.heads,
            f"{model.vocabulary:,}",
            f"{model.sequence:,}",
            f"{model.batch:,}",
            ", ".join(map(str, measured_samples(model))),
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    marks = "; ".join(f"{mark} {name}: {BOUNDS[name]}" for name, mark in MARKS.items())
    lines += [
        "",
        "## Every point",
        *wrapped(
            "TFLOP/s a GPU, and what bounds the point: "
            + marks
            + ". A number of GiB in brackets is the memory that the smallest layout needs, which a GPU does not have; "
            "(host): what is swapped does not fit into host memory. An empty cell: the batch has too few sequences for "
            "any layout."
        ),
    ]
    return "\n".join(lines) + "\n"


def every_point(model: Model, rows: Sequence[Row]) -> str:
    own = [row for row in rows if row.model == model.name]
    columns = list(product(sorted({row.gigabits for row in own}), POLICIES))
    heads = [f"{POLICIES[policy]}, {gigabits} Gbit/s" for gigabits, policy in columns]
    lines = [
        f"### {model.name}",
        "| GPUs | schedule | " + " | ".join(heads) + " |",
        "|---|---|" + "---|" * len(heads),
    ]
    schedules = list(dict.fromkeys(row.schedule for row in rows))
    cells = {(row.gpus, row.schedule, row.gigabits, row.policy): cell(row) for row in own}
    for gpus in sorted({row.gpus for row in own}):
        for schedule in schedules:
            found = [cells.get((gpus, schedule, *column), "") for column in columns]
            if any(found):
                shown = schedule if schedule == ALONE else f"`{schedule}`"
                lines.append("| " + " | ".join([str(gpus), shown, *found]) + " |")
    return "\n".join(lines) + "\n"


def cell(row: Row) -> str:
    if row.tokens_per_second:
        return f"{row.tflops:.0f} {MARKS[row.bound]}"
    return "(host)" if row.bound == "host memory" else f"({row.gib:,.0f})"


def present(rows: Sequence[Row]) -> list[Model]:
    return [model for model in MODELS if any(row.model == model.name for row in rows)]


def is_synchronous(row: Row) -> bool:
    return row.schedule == ALONE or kind_of(row.schedule).synchronous


def named(row: Row) -> str:
    policy = "" if row.policy == KEEP else f" with {row.policy}"
    return (row.schedule if row.schedule == ALONE else f"`{row.schedule}`") + policy


def best_of(rows: Iterable[Row]) -> Row | None:
    return max(
        (row for row in rows if row.tokens_per_second), key=lambda row: row.tokens_per_second, default=None
    )


def wrapped(text: str, first: str = "", following: str = "") -> Iterator[str]:
    """Lines of at most 100 characters."""
    line = first
    for number, word in enumerate(text.split()):
        if number and len(line) + 1 + len(word) > 100:
            yield line
            line = following + word
        else:
            line += (" " if number else "") + word
    yield line
