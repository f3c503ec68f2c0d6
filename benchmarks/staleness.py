"""Remedies for stale weights, compared by the losses of a small GPT or BERT whose pipeline is emulated on one device.

    python benchmarks/staleness.py --updates 900 "stages=1" "stages=8 predict=last" "stages=8 predict=momentum"
    python benchmarks/staleness.py --seeds 3 --rates 5e-4,1e-3,2e-3 "stages=1" "stages=8 predict=last tied=split"

Stage s of P reads the weights of P - 1 - s updates before, as `schedule: vpipe` has it, forward and backward the same
ones; a tied embedding is as old as the first stage's weights. Everything that an update does is one CUDA graph, so that
many rows can be tried in little time. What is worth it goes into vpipe; `benchmarks/convergence.py` then measures
vpipe itself. Each row is a text of settings (`Row`); all rows see the same data in the same order; a seed is that of
the first weights. The table at the end has one line for rows that differ in their seed only, and says how far each is
behind the synchronous rows (`stages=1`) of the same model and optimizer at their best rate.
"""

import argparse
import json
import math
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from small_gpt import Sizes, guessed_places, initial_weights, kind_of, loss_of, read_tokens, sample_places
from torch import Tensor

from vpipe.cost import Slowdown, write_convergence

MEAN = 0.8
"""Share of the past in the mean of updates."""
AHEAD = 20
"""Updates that the host is ahead of a GPU at most: one that is stopped meanwhile leaves the GPU to others soon."""
ROTATED_EVERY = 10
"""Updates between two steps towards the eigenbasis."""
EPS = 1e-8
FULL_SIDE = 1024
"""As in `vpipe/weights/named_optimizers.py`: of matrices, from which on Muon's updates have AdamW's size."""


@dataclass(frozen=True)
class Row:
    """A run."""

    model: str = "gpt"
    """gpt, bert."""
    stages: int = 8
    interval: int = 1
    """Minibatches of an update; `stages` or more: as `schedule: 2bw` has it."""
    optimizer: str = "muon"
    """muon, adamw, soap: of the matrices between embedding and head; the rest has AdamW."""
    rate: float = 1e-3
    warmup: int = 100
    momentum: float = 0.95
    momentum_from: float = 0.0
    """Muon's momentum at first; it rises to `momentum` over `momentum_rise` updates. 0: it stays the same."""
    momentum_rise: int = 300
    nesterov: float = 1.0
    """Muon's update is made of m + nesterov * (1 - momentum) * (g - m)."""
    lead: float = 0.0
    """So much more of `nesterov` for each update of delay: a gradient extrapolated in time."""
    beta1: float = 0.0
    beta2: float = 0.0
    """Of AdamW; 0: as vpipe has them, 0.97 and 0.99 beside a Muon with a mean delay of 1 or more, else 0.9 and 0.95."""
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
    vector_rate: float = 1.0
    """The rate of biases, norms and positions is so much of the rate, at a delay of 1 or more."""
    delay_rate: float = 0.0
    """The rate of all is divided by 1 + delay_rate * delay, which fades out over the first half of the run."""
    compensate: float = 0.0
    """DC-ASGD: g + compensate * g * g / sqrt(v) * (weights now - weights read); v: the mean square of g."""
    feedback: float = 0.0
    """Error feedback, for a delay of 1: the gradient that comes now is of the weights to which the last update was
    applied. So much of what that update would have added with this gradient, less what it added, is added now."""
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

    @property
    def mean_delay(self) -> float:
        """Over stages and the minibatches of an update, as `vpipe.schedule.facts` counts it."""
        late = product(range(self.stages), range(self.interval))
        return fmean(-min(0, (number - stage) // self.interval) for stage, number in late)

    @property
    def betas(self) -> tuple[float, float]:
        slow = self.mean_delay >= 1 and self.optimizer == "muon"
        return self.beta1 or (0.97 if slow else 0.9), self.beta2 or (0.99 if slow else 0.95)


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
        if row.feedback:
            self.earlier = {k: torch.zeros_like(w) for k, w in self.weights.items()}
            self.plain = {k: torch.zeros_like(w) for k, w in self.weights.items()}
        self.made = torch.zeros((), dtype=torch.int64, device=device)
        self.losses = torch.zeros(updates, device=device)
        warm = torch.arange(1, updates + 1, device=device)
        fallen = ((warm - row.warmup) / max(1, updates - row.warmup)).clamp(0, 1)
        self.rates = (
            row.rate * (warm / max(1, row.warmup)).clamp(max=1) * (1 + torch.cos(math.pi * fallen)) / 2
        )
        risen = (warm / max(1, row.momentum_rise)).clamp(max=1)
        begun = row.momentum_from or row.momentum
        self.momenta = begun + (row.momentum - begun) * risen
        self.places = sample_places(len(tokens), sizes, updates, device)
        self.guessed = guessed_places(sizes, updates, device) if row.model == "bert" else None
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
        sizes = self._minibatches()
        guessed: list[Tensor] | tuple[Tensor, ...] | list[None] = [None] * len(sizes)
        if self.guessed is not None:
            guessed = self.guessed.index_select(0, made.view(1))[0].long().split(sizes)
        gradients: dict[str, Tensor] = {}
        total = torch.zeros_like(self.losses[:1])
        for number, minibatch in enumerate(batch.split(sizes)):
            read = self._read_all(number)
            compute = torch.bfloat16 if made.is_cuda else torch.float32
            leaves = {k: value.to(compute).requires_grad_() for k, value in read.items()}
            share = sizes[number] / self.sizes.batch
            loss = share * loss_of(leaves, minibatch, self.sizes.heads, guessed[number])
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

    def _minibatches(self) -> list[int]:
        """Their samples; all that read nothing old, because they come late in the update, count as one."""
        row, each = self.row, self.sizes.batch // self.row.interval
        old = min(row.interval, row.stages)
        return [each] * old + [each * (row.interval - old)] * (row.interval > old)

    @torch.no_grad()
    def _read_all(self, number: int) -> dict[str, Tensor]:
        """The weights that the minibatch of this number in the update reads."""
        row = self.row

        def updates(late: Tensor) -> Tensor:
            return (-((number - late) // row.interval)).clamp(min=0)

        read = {k: self._read(k, updates(late)) for k, late in self.delays.items()}
        if row.tied == "late":
            # The last stage applies an update of the embedding when the first one's part has come.
            read["head"] = self._read("tokens", updates(self.delays["tokens"] + self.late))
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
        rule, (beta1, beta2) = self._rule(name), row.betas
        momentum = self.momenta.index_select(0, self.made.view(1))
        if rule == "adamw":
            rate = rate / (1 + row.adam_rate * late)
            if kind_of(name) == "vectors":
                rate = torch.where(late >= 1, row.vector_rate * rate, rate)
        mean, square = self.means[name], self.squares[name]
        earlier = mean.clone() if row.feedback else mean
        if row.compensate:
            seen = (square / (1 - beta2 ** number.clamp(min=1))).sqrt() + EPS
            gradient = gradient + row.compensate * gradient * gradient / seen * (weight - read)
        if rule == "muon":
            mean.lerp_(gradient, 1 - momentum)
            if row.compensate:
                square.lerp_(gradient * gradient, 1 - beta2)
            more = (row.nesterov + row.lead * late) * (1 - momentum)
            size = 0.2 * math.sqrt(max(*weight.shape[1:], FULL_SIDE)) * rate
            added = -size * orthogonal(mean + more * (gradient - mean))
            expected = -size * orthogonal(mean) if row.predict == "momentum" else added
        else:
            rotated = rule == "soap"
            first = row.momentum if rotated else beta1
            mean.lerp_(gradient, 1 - first)
            seen = (mean + row.adam_lead * late * (1 - first) * (gradient - mean)) / (
                1 - first**number
            ).float()
            if rotated:
                wide = weight.shape[1] <= weight.shape[2]
                gradient, seen = (x if wide else x.mT for x in (gradient, seen))
                self.grams[name].lerp_(gradient @ gradient.mT, 1 - beta2)
                basis = self.bases[name]
                gradient, seen = basis.mT @ gradient, basis.mT @ seen
                square = square.view_as(gradient)
            square.lerp_(gradient * gradient, 1 - beta2)
            seen = seen / ((square / (1 - beta2**number).float()).sqrt() + EPS)
            if rotated:
                seen = basis @ seen
                seen = seen if wide else seen.mT
            added = expected = -rate * seen
        if row.feedback:
            if rule == "muon":
                again = self.earlier[name].lerp(gradient, 1 - momentum)
                again = -size * orthogonal(again + more * (gradient - again))
            else:
                again = self.earlier[name].lerp(gradient, 1 - beta1) / (1 - beta1**number).float()
                again = -rate * again / ((square / (1 - beta2**number).float()).sqrt() + EPS)
            missed = row.feedback * (late > 0) * (self.made > 0) * (again - self.plain[name])
            self.earlier[name].copy_(earlier)
            self.plain[name].copy_(added)
            added = added + missed
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
    x = matrices.bfloat16() if matrices.is_cuda else matrices
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
        if number % AHEAD == 0:
            torch.cuda.synchronize()
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


def settings_of(row: Row) -> str:
    """What differs from the defaults, without the seed."""
    named = ((f.name, getattr(row, f.name), f.default) for f in fields(Row) if f.name != "seed")
    return " ".join(
        f"{name}={value}" for name, value, default in named if value != default or name == "stages"
    )


def report(found: list[tuple[Row, list[float]]]) -> list[Slowdown]:
    """A line for each group of rows that differ in their seed only; what a delay costs, of the best rates."""
    slowdowns = []
    groups: dict[Row, list[list[float]]] = defaultdict(list)
    for row, losses in found:
        groups[replace(row, seed=0)].append(losses)
    ends = {row: [last(losses) for losses in runs] for row, runs in groups.items()}
    print(
        "\nloss: mean of the last fifth of the updates, at most 100; *: at the best of its rates; +-: over seeds;"
    )
    print(
        "to equal loss: updates of this row, as a multiple of those that the synchronous rows needed for its loss"
    )
    print("   loss      +-   behind  to equal loss  seeds  row")
    for row, values in ends.items():
        rates = [fmean(ends[other]) for other in ends if replace(other, rate=row.rate) == row]
        fresh = [r for r in ends if r.stages == 1 and (r.model, r.optimizer) == (row.model, row.optimizer)]
        mean, behind, slower = fmean(values), "", ""
        star = "*" if mean == min(rates) else " "
        if row.stages > 1 and fresh:
            best = min(fresh, key=lambda r: fmean(ends[r]))
            behind = f"{mean - fmean(ends[best]):+.4f}"
            curve = [fmean(at) for at in zip(*groups[best], strict=True)]
            factor = round(len(curve) / updates_to(curve, mean), 2)
            slower = f"{factor:.2f}"
            if star == "*":
                known = (row.optimizer, row.predict != "none", row.mean_delay, factor)
                slowdowns.append(Slowdown(*known, f"{settings_of(row)}, {len(curve)} updates, emulated"))
        spread = f"{stdev(values):.4f}" if len(values) > 1 else ""
        print(f"{mean:.4f}{star} {spread:>7} {behind:>8} {slower:>14} {len(values):6}  {settings_of(row)}")
    return slowdowns


def last(losses: list[float]) -> float:
    return fmean(losses[-window(losses) :])


def window(losses: list[float]) -> int:
    """Updates of which a mean is shown."""
    return min(100, -(-len(losses) // 5))


def updates_to(losses: list[float], goal: float) -> int:
    """The end of the first window with a mean as low as this; all updates if there is none."""
    width = window(losses)
    ends = range(width, len(losses) + 1)
    return next((end for end in ends if fmean(losses[end - width : end]) <= goal), len(losses))


def text_tokens(arguments: argparse.Namespace, vocabulary: int) -> torch.Tensor:
    """Read from the file of `--tokens` if there is one, else made, and kept there."""
    if arguments.tokens is not None and arguments.tokens.exists():
        return torch.load(arguments.tokens)
    tokens = read_tokens(arguments.characters, vocabulary)
    if arguments.tokens is not None:
        torch.save(tokens, arguments.tokens)
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="+", help='settings of a row, such as "stages=8 predict=momentum"')
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
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="written after each group of rows side by side")
    parser.add_argument(
        "--output", type=Path, help="the factors `to equal loss`, for `vpipe plan --convergence`"
    )
    arguments = parser.parse_args()
    sizes = Sizes(**{field.name: getattr(arguments, field.name) for field in fields(Sizes)})
    given = [read_row(text) for text in arguments.rows]
    rates = [float(rate) for rate in arguments.rates.split(",")] if arguments.rates else [None]
    rows = [
        replace(row, rate=row.rate if rate is None else rate, seed=row.seed + seed)
        for row, rate, seed in product(given, rates, range(arguments.seeds))
    ]
    start = time.monotonic()
    tokens = text_tokens(arguments, sizes.vocabulary).to(arguments.device)
    needed = arguments.updates * sizes.batch * sizes.length
    print(
        f"{len(tokens):,} tokens in {time.monotonic() - start:.0f} s; {needed / len(tokens):.2f} epochs a row",
        flush=True,
    )
    found: list[tuple[Row, list[float]]] = []
    for first in range(0, len(rows), arguments.side_by_side):
        start, together = time.monotonic(), rows[first : first + arguments.side_by_side]
        for row, losses in zip(together, train(together, sizes, tokens, arguments.updates), strict=True):
            seconds = time.monotonic() - start
            print(f"{last(losses):.4f} {seconds:5.1f} s  seed={row.seed} {settings_of(row)}", flush=True)
            found.append((row, losses))
        if arguments.json:
            arguments.json.write_text(
                json.dumps([{**asdict(row), "losses": losses} for row, losses in found])
            )
    slowdowns = report(found)
    if arguments.output:
        write_convergence([], slowdowns, arguments.output)


if __name__ == "__main__":
    main()
