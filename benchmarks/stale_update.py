"""The optimizer's step of `benchmarks/staleness.py`, as functions of tensors.

What changes from update to update or from row to row (rates, momenta, corrections) comes as a tensor, so that one
compiled function serves all parameters of a shape, in all rows.
"""

import math
from functools import reduce
from typing import NamedTuple

import torch
from small_gpt import kind_of
from stale_rows import Row
from torch import Tensor

MEAN = 0.8
"""Share of the past in the mean of updates."""
EPS = 1e-8
FULL_SIDE = 1024
"""As in `vpipe/weights/named_optimizers.py`: of matrices, from which on Muon's updates have AdamW's size."""
SCALARS = 8
"""Room for the numbers of `Now` that all layers share; a multiple of 4, so that the rest is aligned."""


class Now(NamedTuple):
    """The settings of one parameter at one update."""

    slow: Tensor
    """Share of the gradient in its mean."""
    slow_square: Tensor
    mean_done: Tensor
    """What the mean of a gradient that was always 1 would be by now."""
    square_done: Tensor
    decay: Tensor
    compensate: Tensor
    rate: Tensor
    """This and what follows: for each layer its own, (layers or 1, 1, ...)."""
    ahead: Tensor
    """The step is made of mean + ahead * (gradient - mean)."""
    missed: Tensor
    """`Row.feedback`, where it applies."""

    @classmethod
    def unpack(cls, packed: Tensor, like: Tensor) -> "Now":
        shared = packed[: len(cls._fields) - 3].unbind(0)
        of_layers = packed[SCALARS:].view(3, -1)[:, : len(like)].unbind(0)
        return cls(*shared, *(spread(values, like) for values in of_layers))


def settings_table(row: Row, name: str, delays: Tensor, updates: int, layers: int) -> Tensor:
    """A `Now`, packed, for each update: (updates, SCALARS + 3 * layers)."""
    made = torch.arange(updates)[:, None]
    warm, late = made + 1, delays.cpu() / row.interval
    fallen = ((warm - row.warmup) / max(1, updates - row.warmup)).clamp(0, 1)
    rate = row.rate * (warm / max(1, row.warmup)).clamp(max=1) * (1 + torch.cos(math.pi * fallen)) / 2
    rate = rate / (1 + row.delay_rate * late * (1 - 2 * made / updates).clamp(min=0))
    rule, (beta1, beta2) = rule_of(row, name), row.betas
    if rule == "adamw":
        rate = rate / (1 + row.adam_rate * late)
        if kind_of(name) == "vectors":
            rate = torch.where(late >= 1, row.vector_rate * rate, rate)
    begun = row.momentum_from or row.momentum
    risen = begun + (row.momentum - begun) * (warm / max(1, row.momentum_rise)).clamp(max=1)
    if rule == "muon":
        slow, mean_done = 1 - risen, torch.ones(updates, 1)
        ahead = (row.nesterov + row.lead * late) * slow
    else:
        first = row.momentum if rule == "soap" else beta1
        slow, mean_done = torch.full((updates, 1), 1 - first), 1 - first ** warm.double()
        ahead = row.adam_lead * late * slow
    missed = row.feedback * (late > 0) * (made > 0)
    scalars = (slow, 1 - beta2, mean_done, 1 - beta2 ** warm.double(), row.decay, row.compensate)
    table = torch.zeros(updates, SCALARS + 3 * layers)
    for column, values in enumerate(scalars):
        table[:, column : column + 1] = values
    for number, values in enumerate((rate, ahead, missed)):
        first_column = SCALARS + number * layers
        table[:, first_column : first_column + len(delays)] = values
    return table


def rule_of(row: Row, name: str) -> str:
    """The optimizer of these parameters."""
    return {"hidden": row.optimizer, "tokens": row.embedding}.get(kind_of(name), "adamw")


def initial_state(row: Row, name: str, weight: Tensor) -> dict[str, Tensor]:
    """What `step` reads and writes of a parameter."""
    rule = rule_of(row, name)
    state = {"weight": weight, "mean": torch.zeros_like(weight)}
    if rule != "muon" or row.compensate:
        state["square"] = torch.zeros_like(weight)
    if row.feedback:
        state |= {"earlier": torch.zeros_like(weight), "plain": torch.zeros_like(weight)}
    if row.predict == "mean" and rule == "muon":
        state["mean_step"] = torch.zeros_like(weight)
    if rule == "soap":
        side = min(weight.shape[1:])
        state["gram"] = weight.new_zeros(len(weight), side, side)
        state["basis"] = torch.eye(side, device=weight.device).repeat(len(weight), 1, 1)
    return state


def step(
    rule: str, ahead: bool, gradient: Tensor, state: dict[str, Tensor], packed: Tensor, read: Tensor | None
) -> Tensor:  # fmt: skip
    """Changes `state`; the update that the next versions are predicted with, `ahead`: that of the momentum alone.

    `read`: the weights of which the gradient is, if it is to be compensated.
    """
    weight, mean = state["weight"], state["mean"]
    now = Now.unpack(packed, weight)
    if read is not None:
        seen = (state["square"] / now.square_done).sqrt() + EPS
        gradient = gradient + now.compensate * gradient * gradient / seen * (weight - read)
    before = mean.clone() if "earlier" in state else mean
    mean.lerp_(gradient, now.slow)
    mixed = mean + now.ahead * (gradient - mean)
    if rule == "soap":
        added = -now.rate * rotated_step(mixed / now.mean_done, gradient, state, now)
    else:
        if "square" in state:
            state["square"].lerp_(gradient * gradient, now.slow_square)
        added = plain_step(rule, mixed, state, now)
    expected = plain_step(rule, mean, state, now) if ahead and rule == "muon" else added
    if "earlier" in state:
        again = state["earlier"].lerp(gradient, now.slow)
        if rule == "muon":
            again = again + now.ahead * (gradient - again)
        again = plain_step(rule, again, state, now)
        missed = now.missed * (again - state["plain"])
        state["earlier"].copy_(before)
        state["plain"].copy_(added)
        added = added + missed
    if "mean_step" in state:
        expected = state["mean_step"].lerp_(added, 1 - MEAN)
    weight.mul_(1 - now.rate * now.decay).add_(added)
    return expected


def totals(parts: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    """The sums of gradients, each of (layers or 1, minibatches, ...), over minibatches and parts."""
    return {
        name: reduce(torch.add, (part.sum(1, dtype=torch.float32) for part in each))
        for name, each in parts.items()
    }


def plain_step(rule: str, mean: Tensor, state: dict[str, Tensor], now: Now) -> Tensor:
    if rule == "muon":
        return -0.2 * math.sqrt(max(*mean.shape[1:], FULL_SIDE)) * now.rate * orthogonal(mean)
    return -now.rate * (mean / now.mean_done) / ((state["square"] / now.square_done).sqrt() + EPS)


def rotated_step(seen: Tensor, gradient: Tensor, state: dict[str, Tensor], now: Now) -> Tensor:
    """AdamW's in the eigenbasis of the gradients' Gram matrix."""
    wide, basis = seen.shape[1] <= seen.shape[2], state["basis"]
    gradient, seen = (x if wide else x.mT for x in (gradient, seen))
    state["gram"].lerp_(gradient @ gradient.mT, now.slow_square)
    gradient, seen = basis.mT @ gradient, basis.mT @ seen
    square = state["square"].view(gradient.shape)
    square.lerp_(gradient * gradient, now.slow_square)
    seen = basis @ (seen / ((square / now.square_done).sqrt() + EPS))
    return seen if wide else seen.mT


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


def rotate(state: dict[str, Tensor]) -> None:
    """One step of orthogonal iteration towards the eigenbasis of the Gram matrix."""
    state["basis"].copy_(torch.linalg.qr(state["gram"] @ state["basis"]).Q)


def spread(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.ndim - 1))
