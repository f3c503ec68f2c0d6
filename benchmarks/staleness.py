"""Remedies for stale weights, compared by the losses of a small GPT whose pipeline is emulated on one device.

    python benchmarks/staleness.py --updates 900 "stages=1" "stages=8 predict=last" "stages=8 predict=momentum"

Stage s of P reads the weights of P - 1 - s updates before, as `schedule: vpipe` has it, forward and backward the same
ones; a tied embedding is as old as the first stage's weights. Everything that an update does is one CUDA graph, so that
many rows can be tried in little time. What is worth it goes into vpipe; `benchmarks/convergence.py` then measures
vpipe itself. Each row is a text of settings (`Row`); all rows see the same data in the same order.
"""

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from small_gpt import Sizes, initial_weights, kind_of, loss_of, read_tokens, sample_places
from torch import Tensor

MEAN = 0.8
"""Share of the past in the mean of updates."""
ROTATED_EVERY = 10
"""Updates between two steps towards the eigenbasis."""
EPS = 1e-8


@dataclass(frozen=True)
class Row:
    """A run."""

    stages: int = 8
    interval: int = 1
    """Minibatches of an update; `stages` or more: as `schedule: 2bw` has it."""
    optimizer: str = "muon"
    """muon, adamw, soap: of the matrices between embedding and head; the rest has AdamW."""
    rate: float = 1e-3
    warmup: int = 100
    momentum: float = 0.95
    nesterov: float = 1.0
    """Muon's update is made of m + nesterov * (1 - momentum) * (g - m)."""
    lead: float = 0.0
    """So much more of `nesterov` for each update of delay: a gradient extrapolated in time."""
    beta1: float = 0.9
    beta2: float = 0.95
    predict: str = "none"
    """Of the matrices: none, last (update), momentum (orthogonalised), mean (of the updates)."""
    reach: float = 1.0
    """Share of the delay that is predicted, of the matrices."""
    adam_reach: float = 1.0
    """The same of the other parameters; 0: they are not predicted."""
    adam_lead: float = 0.0
    """As `lead`, of the other parameters."""
    adam_rate: float = 0.0
    """The rate of the other parameters is divided by 1 + adam_rate * delay."""
    delay_rate: float = 0.0
    """The rate of all is divided by 1 + delay_rate * delay, which fades out over the first half of the run."""
    compensate: float = 0.0
    """DC-ASGD: g + compensate * g * g / sqrt(v) * (weights now - weights read); v: the mean square of g."""
    async_after: int = 0
    fresh: str = ""
    """Parameters without delay, to see where the loss comes from: hidden, tokens, vectors, or several of them."""
    embedding: str = "adamw"
    """The optimizer of the embedding of tokens: adamw, muon, soap."""
    tied: str = "late"
    """late: the head's copy of the embedding is as old as the first stage's; split: it is the newest one, and the
    first stage's gradient is added to it as many updates later; no: the head has weights of its own."""
    decay: float = 0.01
    seed: int = 0


class Emulation:
    """A run of `updates` updates; `update` makes the next one."""

    def __init__(self, row: Row, sizes: Sizes, tokens: Tensor, updates: int) -> None:
        self.row, self.sizes, self.tokens, self.updates = row, sizes, tokens, updates
        device = tokens.device
        self.weights = {k: w.clone() for k, w in initial_weights(sizes, row.seed, device).items()}
        if row.tied == "no":
            self.weights["head"] = self.weights["tokens"].clone()
        self.delays = self._delays()
        self.versions = {k: torch.stack([w] * (row.stages + 1)) for k, w in self.weights.items()}
        self.steps = {k: torch.zeros_like(v) for k, v in self.versions.items()}
        self.means = {k: torch.zeros_like(w) for k, w in self.weights.items()}
        self.squares = {k: torch.zeros_like(w) for k, w in self.weights.items()}
        self.mean_steps = {k: torch.zeros_like(w) for k, w in self.weights.items()}
        self.made = torch.zeros((), dtype=torch.int64, device=device)
        self.losses = torch.zeros(updates, device=device)
        warm = torch.arange(1, updates + 1, device=device)
        fallen = ((warm - row.warmup) / max(1, updates - row.warmup)).clamp(0, 1)
        self.rates = (
            row.rate * (warm / max(1, row.warmup)).clamp(max=1) * (1 + torch.cos(math.pi * fallen)) / 2
        )
        self.places = sample_places(len(tokens), sizes, updates, device)
        sides = [(k, min(w.shape[1:]), w) for k, w in self.weights.items() if self._rule(k) == "soap"]
        self.grams = {k: w.new_zeros(len(w), n, n) for k, n, w in sides}
        self.late = 0 if row.stages == 1 or "tokens" in row.fresh else 1
        self.parts = self.weights["tokens"].new_zeros(row.stages + 1, *self.weights["tokens"].shape[1:])
        self.bases = {k: torch.eye(n, device=device).repeat(len(w), 1, 1) for k, n, w in sides}

    def _rule(self, name: str) -> str:
        """The optimizer of these parameters."""
        rules = {"hidden": self.row.optimizer, "tokens": self.row.embedding}
        return rules.get(kind_of(name), "adamw")

    def _delays(self) -> dict[str, Tensor]:
        row, layers = self.row, self.sizes.layers
        found = {}
        for name, weight in self.weights.items():
            if len(weight) == layers:
                late = [row.stages - 1 - layer * row.stages // layers for layer in range(layers)]
            else:
                late = [0 if name.startswith(("final", "head")) else row.stages - 1]
            if kind_of(name) in row.fresh.split(","):
                late = [0] * len(late)
            found[name] = torch.tensor(late, device=weight.device)
        return found

    def update(self) -> None:
        row, made = self.row, self.made
        places = self.places.index_select(0, made.view(1)).view(-1, 1)
        batch = self.tokens[places + torch.arange(self.sizes.length + 1, device=made.device)].long()
        gradients: dict[str, Tensor] = {}
        total = torch.zeros_like(self.losses[:1])
        for number, minibatch in enumerate(batch.chunk(row.interval)):
            read = self._read_all(number)
            compute = torch.bfloat16 if made.is_cuda else torch.float32
            leaves = {k: value.to(compute).requires_grad_() for k, value in read.items()}
            loss = loss_of(leaves, minibatch, self.sizes.heads) / row.interval
            for name, found in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
                gradients[name] = found.float() + gradients.get(name, 0)
            total += loss.detach()
        with torch.no_grad():
            self.losses.index_copy_(0, made.view(1), total)
            if row.tied != "no":
                gradients["tokens"] = self._add_holders(gradients["tokens"], gradients.pop("head"))
            for name, gradient in gradients.items():
                self._step(name, gradient, read[name])
            self.made += 1

    @torch.no_grad()
    def _read_all(self, number: int) -> dict[str, Tensor]:
        """The weights that the minibatch of this number in the update reads."""
        row = self.row
        delays = {k: (-((number - late) // row.interval)).clamp(min=0) for k, late in self.delays.items()}
        read = {k: self._read(k, late) for k, late in delays.items()}
        if row.tied == "late":
            # The last stage applies an update of the embedding when the first one's part has come.
            read["head"] = self._read("tokens", -(-(self.delays["tokens"] + self.late) // row.interval))
        elif row.tied == "split":
            read["head"] = self.weights["tokens"].clone()
        return read

    def _add_holders(self, first: Tensor, last: Tensor) -> Tensor:
        """The gradient of the embedding, of which the first stage's part comes later if it is split."""
        if self.row.tied != "split":
            return first + last
        count = -(-self.row.stages // self.row.interval)
        self.parts.index_copy_(0, (self.made % (count + 1)).view(1), first)
        return last + self.parts.index_select(0, ((self.made + 1) % (count + 1)).view(1))

    def _read(self, name: str, delay: Tensor) -> Tensor:
        """The version that is `delay` updates old, predicted for its own update; for each layer its own."""
        delay = torch.minimum(delay, (self.made - self.row.async_after).clamp(min=0))
        place = (self.made - delay) % len(self.versions[name])
        each = torch.arange(len(delay), device=delay.device)
        value = self.versions[name][place, each]
        reach = self.row.adam_reach if self._rule(name) == "adamw" else self.row.reach
        if self.row.predict == "none" or not reach:
            return value
        return value + reach * spread(delay, value) * self.steps[name][place, each]

    def _step(self, name: str, gradient: Tensor, read: Tensor) -> None:
        row, weight = self.row, self.weights[name]
        late = spread(self.delays[name] / row.interval, weight)
        number = (self.made + 1).double()
        part = self.made / self.updates
        rate = self.rates.index_select(0, self.made.view(1))
        rate = rate / (1 + row.delay_rate * late * (1 - 2 * part).clamp(min=0))
        rule = self._rule(name)
        if rule == "adamw":
            rate = rate / (1 + row.adam_rate * late)
        mean, square = self.means[name], self.squares[name]
        if row.compensate:
            seen = (square / (1 - row.beta2 ** number.clamp(min=1))).sqrt() + EPS
            gradient = gradient + row.compensate * gradient * gradient / seen * (weight - read)
        if rule == "muon":
            mean.lerp_(gradient, 1 - row.momentum)
            if row.compensate:
                square.lerp_(gradient * gradient, 1 - row.beta2)
            more = (row.nesterov + row.lead * late) * (1 - row.momentum)
            size = 0.2 * math.sqrt(max(weight.shape[1:])) * rate
            added = -size * orthogonal(mean + more * (gradient - mean))
            expected = -size * orthogonal(mean) if row.predict == "momentum" else added
        else:
            rotated = rule == "soap"
            first = row.momentum if rotated else row.beta1
            mean.lerp_(gradient, 1 - first)
            seen = (mean + row.adam_lead * late * (1 - first) * (gradient - mean)) / (
                1 - first**number
            ).float()
            if rotated:
                wide = weight.shape[1] <= weight.shape[2]
                gradient, seen = (x if wide else x.mT for x in (gradient, seen))
                self.grams[name].lerp_(gradient @ gradient.mT, 1 - row.beta2)
                basis = self.bases[name]
                gradient, seen = basis.mT @ gradient, basis.mT @ seen
                square = square.view_as(gradient)
            square.lerp_(gradient * gradient, 1 - row.beta2)
            seen = seen / ((square / (1 - row.beta2**number).float()).sqrt() + EPS)
            if rotated:
                seen = basis @ seen
                seen = seen if wide else seen.mT
            added = expected = -rate * seen
        if row.predict == "mean" and rule == "muon":
            expected = self.mean_steps[name].lerp_(added, 1 - MEAN)
        weight.mul_(1 - rate * row.decay).add_(added)
        place = ((self.made + 1) % len(self.versions[name])).view(1)
        self.versions[name].index_copy_(0, place, weight[None])
        self.steps[name].index_copy_(0, place, expected[None])

    def rotate(self) -> None:
        """One step of orthogonal iteration towards the eigenbasis of each Gram matrix."""
        for name, gram in self.grams.items():
            self.bases[name].copy_(torch.linalg.qr(gram @ self.bases[name]).Q)


def spread(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.ndim - 1))


def orthogonal(matrices: Tensor) -> Tensor:
    """Newton-Schulz, five steps, as Muon has it; of each matrix of the stack."""
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.mT if tall else x).float()


def train(rows: list[Row], sizes: Sizes, tokens: Tensor, updates: int) -> list[list[float]]:
    """The losses of each row; on a GPU they are trained at the same time, each by a stream of its own."""
    runs = [Emulation(row, sizes, tokens, updates) for row in rows]
    if not tokens.is_cuda:
        for run in runs:
            for number in range(updates):
                run.update()
                if run.row.optimizer == "soap" and number % ROTATED_EVERY == 0:
                    run.rotate()
        return [run.losses.tolist() for run in runs]
    captured = [(run, *capture(run)) for run in runs]
    done = 2  # the first were made before the graph was captured
    for number in range(done, updates):
        for run, graph, stream in captured:
            with torch.cuda.stream(stream):
                graph.replay()
                if run.row.optimizer == "soap" and number % ROTATED_EVERY == 0:
                    run.rotate()
    torch.cuda.synchronize()
    return [run.losses.tolist() for run in runs]


def capture(run: Emulation) -> tuple[torch.cuda.CUDAGraph, torch.cuda.Stream]:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run.update()
        run.update()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        run.update()
    return graph, stream


def read_row(text: str) -> Row:
    kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(Row)}
    pairs = (pair.split("=") for pair in text.split())
    return Row(**{name: kinds[name](value) for name, value in pairs})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="+", help='settings of a row, such as "stages=8 predict=momentum"')
    parser.add_argument("--updates", type=int, default=900)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--characters", type=int, default=30_000_000)
    parser.add_argument("--side-by-side", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sizes = Sizes(batch=arguments.batch)
    tokens = read_tokens(arguments.characters, sizes.vocabulary).to("cuda")
    rows = [read_row(text) for text in arguments.rows]
    found = []
    for first in range(0, len(rows), arguments.side_by_side):
        start, together = time.monotonic(), rows[first : first + arguments.side_by_side]
        for row, losses in zip(together, train(together, sizes, tokens, arguments.updates), strict=True):
            last = sum(losses[-100:]) / len(losses[-100:])
            print(
                f"{last:.4f} {time.monotonic() - start:5.1f} s  {arguments.rows[rows.index(row)]}", flush=True
            )
            found.append({**asdict(row), "losses": losses})
    if arguments.json:
        arguments.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
