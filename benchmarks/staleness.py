"""Remedies for stale weights, compared by the losses of a small GPT or BERT whose pipeline is emulated on one device.

    python benchmarks/staleness.py --updates 900 "stages=1" "stages=8 predict=last" "stages=8 predict=momentum"
    python benchmarks/staleness.py --seeds 3 --rates 5e-4,1e-3,2e-3 "stages=1" "stages=8 predict=last tied=split"

Stage s of P reads the weights of P - 1 - s updates before, as `schedule: vpipe` has it, forward and backward the same
ones; the copy of a tied embedding in the last stage waits for the first one. Everything that an update does is one CUDA
graph, so that many rows can be tried in little time; with `--compile` in less, after a minute of compiling (sums of an
embedding's gradients then differ in their last bits from run to run on a GPU). What is worth it goes into vpipe;
`benchmarks/convergence.py` then measures vpipe itself. Each row is a text of settings (`Row`); all rows see the same
data in the same order; a seed is that of the first weights. The table at the end has one line for rows that differ in
their seed only, and says how far each is behind the synchronous rows (`stages=1`) of the same model and optimizer at
their best rate. With `--merge` it has the rows of earlier calls too:

    python benchmarks/staleness.py --seconds 500 --json 1.json "stages=1" "stages=8 predict=last"
    python benchmarks/staleness.py --json 2.json "stages=1" "stages=8 predict=last" --merge 1.json
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from small_gpt import Sizes, guessed_places, initial_weights, kind_of, loss_of, read_tokens, sample_places
from stale_reading import groups_of, kept_versions, make_plan, reach_of, read_all
from stale_rows import Found, Row, last, read_row, read_rows, report, settings_of, write_rows
from stale_update import initial_state, rotate, rule_of, settings_table, step, totals
from torch import Tensor

from vpipe.cost import write_convergence

AHEAD = 20
"""Updates that the host is ahead of a GPU at most: one that is stopped meanwhile leaves the GPU to others soon."""
ROTATED_EVERY = 10
"""Updates between two steps towards the eigenbasis."""
WARM_UPDATES = 2
"""Made before the graph is captured: they compile, and let libraries allocate what they keep."""


class Calls(NamedTuple):
    """What an update consists of; the same functions for all rows."""

    loss_of: Callable[..., Tensor]
    read_all: Callable[..., dict[str, Tensor]]
    totals: Callable[..., dict[str, Tensor]]
    step: Callable[..., Tensor]


@cache
def calls(compiled: bool) -> Calls:
    plain = Calls(loss_of, read_all, totals, step)
    if not compiled:
        return plain
    # Each shape and each kind of row is compiled for itself; beyond the limits torch would go back to eager.
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 4096
    torch._dynamo.config.suppress_errors = True  # what cannot be compiled is said, and done all the same
    return Calls(*(torch.compile(function, dynamic=False) for function in plain))


class Emulation:
    """A run of `updates` updates; `update` makes the next one."""

    def __init__(self, row: Row, sizes: Sizes, tokens: Tensor, updates: int, compiled: bool = False) -> None:
        self.row, self.sizes, self.tokens, self.updates = row, sizes, tokens, updates
        self.call = calls(compiled)
        device = tokens.device
        self.compute = torch.bfloat16 if tokens.is_cuda else torch.float32
        self.weights = {k: w.clone() for k, w in initial_weights(sizes, row.seed, device).items()}
        if row.tied == "no":
            self.weights["head"] = self.weights["tokens"].clone()
        self.states = {k: initial_state(row, k, w) for k, w in self.weights.items()}
        self.made = torch.zeros(1, dtype=torch.int64, device=device)
        self.losses = torch.zeros(updates, device=device)
        self.samples = sample_places(len(tokens), sizes, updates, device)
        self.stretch = torch.arange(sizes.length + 1, device=device)
        self.guessed = guessed_places(sizes, updates, device) if row.model == "bert" else None
        delays = self._delays()
        tables = [settings_table(row, k, late, updates, sizes.layers) for k, late in delays.items()]
        self.settings = torch.stack(tables, 1).to(device)  # (updates, parameters, ...)
        self._keep_versions(delays, device)

    def _delays(self) -> dict[str, Tensor]:
        """Of each layer, in minibatches."""
        row, layers = self.row, self.sizes.layers
        found = {}
        for name, weight in self.weights.items():
            if len(weight) == layers:
                late = [row.stages - 1 - layer * row.stages // layers for layer in range(layers)]
            else:
                late = [0 if name.startswith(("final", "head")) else row.stages - 1]
            if kind_of(name) in row.fresh.split(","):
                late = [0] * len(late)
            found[name] = torch.tensor(late)
        return found

    def _keep_versions(self, delays: dict[str, Tensor], device: torch.device) -> None:
        row = self.row
        self.groups = groups_of(row, self.sizes.batch)
        kept = kept_versions(row, delays, self.groups[0])
        self.plans = [make_plan(row, delays, group, kept, self.updates, device) for group in self.groups]
        self.versions = {k: torch.stack([w] * kept[k]) for k, w in self.weights.items() if kept[k] > 1}
        self.steps = {k: torch.zeros_like(v) for k, v in self.versions.items() if reach_of(row, k)}
        after = torch.arange(1, self.updates + 1)
        self.next_places = {len(v): (after % len(v)).to(device) for v in self.versions.values()}
        if row.tied == "split":
            count = 1 - (-row.stages // row.interval)
            self.parts = self.weights["tokens"].new_zeros(count, *self.weights["tokens"].shape[1:])
            self.part_written, self.part_read = ((after - 1) % count).to(device), (after % count).to(device)

    def update(self) -> None:
        total_loss = torch.zeros_like(self.losses[:1])
        parts: dict[str, list[Tensor]] = {}
        for number, (batch, guessed) in enumerate(self._batches()):
            leaves = self._read(number)
            read = {k: value[:, -1] for k, value in leaves.items()} if self.row.compensate else {}
            leaves = {k: value.to(self.compute).requires_grad_() for k, value in leaves.items()}
            share = self.groups[number].samples / self.sizes.batch
            loss = share * self.call.loss_of(leaves, batch, self.sizes.heads, guessed)
            for name, found in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
                parts.setdefault(name, []).append(found)
            total_loss += loss.detach()
        with torch.no_grad():
            self.losses.index_copy_(0, self.made, total_loss)
            self._step_all(self._gradients(parts), read)
            self.made += 1

    def _now(self, table: Tensor) -> Tensor:
        """What a table with a row for each update has for this one."""
        return table.index_select(0, self.made)

    def _batches(self) -> list[tuple[Tensor, Tensor | None]]:
        """The tokens of each group, and the places that are guessed: (minibatches, samples, ...)."""
        samples = self.tokens[self._now(self.samples).view(-1, 1) + self.stretch].long()
        sizes = [group.samples for group in self.groups]
        guessed: tuple[Tensor | None, ...] = (None,) * len(sizes)
        if self.guessed is not None:
            guessed = self._now(self.guessed)[0].long().split(sizes)
        shapes = [(group.minibatches, -1) for group in self.groups]
        return [
            (batch.unflatten(0, shape), None if places is None else places.unflatten(0, shape))
            for batch, places, shape in zip(samples.split(sizes), guessed, shapes, strict=True)
        ]

    @torch.no_grad()
    def _read(self, group: int) -> dict[str, Tensor]:
        """The weights that the minibatches of this group read."""
        sources, layers, which, places, reaches = self.plans[group]
        held = self.weights, self.versions, self.steps
        dtype = torch.float32 if self.row.compensate else self.compute
        now = self._now(places)[0], self._now(reaches)[0]
        return self.call.read_all(sources, *held, layers, which, *now, dtype)

    def _gradients(self, parts: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        """Of all holders: a tied embedding's first stage's part comes later if it is split."""
        if self.row.tied == "late":
            parts["tokens"] += parts.pop("head")
        found = self.call.totals(parts)
        if self.row.tied == "split":
            self.parts.index_copy_(0, self._now(self.part_written), found["tokens"])
            found["tokens"] = found.pop("head") + self.parts.index_select(0, self._now(self.part_read))
        return found

    def _step_all(self, gradients: dict[str, Tensor], read: dict[str, Tensor]) -> None:
        settings, ahead = self._now(self.settings)[0], self.row.predict == "momentum"
        places = {count: self._now(table) for count, table in self.next_places.items()}
        for number, (name, state) in enumerate(self.states.items()):
            given = gradients[name], state, settings[number], read.get(name)
            expected = self.call.step(rule_of(self.row, name), ahead, *given)
            for kept, newest in ((self.versions, state["weight"]), (self.steps, expected)):
                if name in kept:
                    kept[name].index_copy_(0, places[len(kept[name])], newest[None])

    def after_update(self, number: int) -> None:
        """What is done now and then, outside of the graph."""
        if self.row.optimizer == "soap" and number % ROTATED_EVERY == 0:
            for state in self.states.values():
                if "basis" in state:
                    rotate(state)


def train(
    rows: list[Row], sizes: Sizes, tokens: Tensor, updates: int, compiled: bool = False
) -> list[list[float]]:
    """The losses of each row; on a GPU they are trained at the same time, each by a stream of its own."""
    runs = [Emulation(row, sizes, tokens, updates, compiled) for row in rows]
    if not tokens.is_cuda:
        for run in runs:
            for number in range(updates):
                run.update()
                run.after_update(number)
        return [run.losses.tolist() for run in runs]
    captured = [(run, *capture(run)) for run in runs]
    for number in range(WARM_UPDATES, updates):
        if number % AHEAD == 0:
            torch.cuda.synchronize()
        for run, graph, stream in captured:
            with torch.cuda.stream(stream):
                graph.replay()
                run.after_update(number)
    torch.cuda.synchronize()
    return [run.losses.tolist() for run in runs]


def capture(run: Emulation) -> tuple[torch.cuda.CUDAGraph, torch.cuda.Stream]:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPDATES):
            run.update()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        run.update()
    return graph, stream


def text_tokens(arguments: argparse.Namespace, vocabulary: int) -> torch.Tensor:
    """Read from the file of `--tokens` if there is one, else made, and kept there."""
    if arguments.tokens is not None and arguments.tokens.exists():
        return torch.load(arguments.tokens)
    tokens = read_tokens(arguments.characters, vocabulary)
    if arguments.tokens is not None:
        torch.save(tokens, arguments.tokens)
    return tokens


def arguments_of_call() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", help='settings of a row, such as "stages=8 predict=momentum"')
    parser.add_argument("--updates", type=int, default=900)
    parser.add_argument("--seeds", type=int, default=1, help="each row with so many seeds")
    parser.add_argument("--rates", help="each row with each of these rates, such as 5e-4,1e-3,2e-3")
    for name, default in (
        ("layers", 8), ("width", 512), ("heads", 8), ("vocabulary", 8192), ("length", 256), ("batch", 32),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--characters", type=int, default=30_000_000, help="of text; about 3.9 are a token")
    parser.add_argument("--tokens", type=Path, help="a file that keeps the tokens for the next call")
    parser.add_argument("--side-by-side", type=int, default=2)
    parser.add_argument("--seconds", type=float, help="after so many, no further rows are begun")
    parser.add_argument("--compile", action="store_true", help="by torch.compile: faster once it is compiled")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="all rows, written after each group of rows side by side")
    parser.add_argument(
        "--merge", type=Path, nargs="+", default=[], metavar="FILE",
        help="of --json, by earlier calls: their rows are not trained again, but reported; give it after the rows",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, help="the factors `to equal loss`, for `vpipe plan --convergence`"
    )
    arguments = parser.parse_intermixed_args()
    if not arguments.rows and not arguments.merge:
        parser.error('give rows, such as "stages=8 predict=last", or files to --merge')
    return arguments


def rows_of_call(arguments: argparse.Namespace) -> list[Row]:
    given = [read_row(text) for text in arguments.rows]
    rates = [float(rate) for rate in arguments.rates.split(",")] if arguments.rates else [None]
    return [
        replace(row, rate=row.rate if rate is None else rate, seed=row.seed + seed)
        for row, rate, seed in product(given, rates, range(arguments.seeds))
    ]


def train_all(
    rows: list[Row], found: Found, sizes: Sizes, tokens: Tensor, arguments: argparse.Namespace, begun: float
) -> None:
    """Adds the rows to those that are found already, a group of rows side by side after the other."""
    for first in range(0, len(rows), arguments.side_by_side):
        start, together = time.monotonic(), rows[first : first + arguments.side_by_side]
        if arguments.seconds is not None and start - begun > arguments.seconds:
            print(f"after {start - begun:.0f} s, {len(rows) - first} rows are left out:")
            for row in rows[first:]:
                print(f"  seed={row.seed} {settings_of(row)}", flush=True)
            return
        trained = train(together, sizes, tokens, arguments.updates, arguments.compile)
        seconds = time.monotonic() - start
        for row, losses in zip(together, trained, strict=True):
            print(f"{last(losses):.4f} {seconds:5.1f} s  seed={row.seed} {settings_of(row)}", flush=True)
            found.append((row, losses))
        if arguments.json:
            write_rows(found, sizes, arguments.json)


def main() -> None:
    begun, arguments = time.monotonic(), arguments_of_call()
    sizes = Sizes(**{field.name: getattr(arguments, field.name) for field in fields(Sizes)})
    found = read_rows(arguments.merge, sizes, arguments.updates)
    known = {row for row, _ in found}
    rows = [row for row in rows_of_call(arguments) if row not in known]
    if rows:
        tokens = text_tokens(arguments, sizes.vocabulary).to(arguments.device)
        needed = arguments.updates * sizes.batch * sizes.length
        print(
            f"{len(tokens):,} tokens in {time.monotonic() - begun:.0f} s; {needed / len(tokens):.2f} epochs a row",
            flush=True,
        )
        train_all(rows, found, sizes, tokens, arguments, begun)
    slowdowns = report(found)
    if arguments.output:
        write_convergence([], slowdowns, arguments.output)


if __name__ == "__main__":
    main()
