"""The model of a stage: the memory that it needs and the time that it takes for a minibatch.

One rank holds one slice of consecutive blocks, or several where the schedule puts chunks on a rank. While it
trains, its memory holds, summed over its slices:

    weights      parameter_bytes x (versions + 1 for the gradient + optimizer_ratio), what blocks share once; without
                 the gradient where it is fresh, that is, where an update follows every backward
    buffers      2 x what is received and 2 x what is sent across each cut to another rank: the message in use
                 and the one under way; the gradient that comes back is as large and takes the same place;
                 2 x the parameters that it shares with slices elsewhere, whose gradients are exchanged; where there
                 is a lag 1 x more if it holds the first of them, 2 x lag in all if not; once for the rank, the
                 workspace of libraries
    activations  for each minibatch in flight, that is from its F to the end of its B (or I)
        keep       kept_bytes x in_flight (the policies are those of `vpipe/cost/policies.py`)
        recompute  input x in_flight, where the input is the boundary_bytes of the block before it (nothing for
                   the model's first block, which reads the batch)
        swap       kept_bytes x min(in_flight, 2): one in use, and one on its way between device and host; the
                   others lie in host memory. Where copies run beside computing (the device's swapped_in is 3) once
                   more: one that has left is in memory until the next forward
        and        deferred_bytes x waiting, whatever the policy: those between the end of I and the end of W
    backward     what a backward needs beyond that while it runs, one at a time: the most over the slices of
                 `cost.backward_bytes`, that is, over their blocks, of working_bytes (and, if it is recomputed,
                 kept_bytes less the input) less what the blocks behind it have given back by then; fresh gradients
                 have taken some of that. In asynchronous schedules an update follows while the other minibatches are
                 in flight: its update_bytes less what the backward gave back. In synchronous ones none is in
                 flight: no less than weights, buffers, the update_bytes of a slice and swapped ones that linger

The most in flight and the most waiting are taken to come together. That is so for whole backwards and for zb-h1; where
a rank holds several slices (interleaved, zb-v) `moments.py` tells what comes together.

A rank works on a minibatch for

    compute      forward + backward of all blocks, what recomputing takes of the recomputed ones and what swapping
                 takes, beyond its copies, of the swapped ones; the runtime's overhead for each forward, backward and
                 part of a backward; the update and, where there are replicas, the sending of the gradients to each
                 of the others, shared by the rank's minibatches of one update; and what it sends, if senders copy
                 their messages themselves
    host         swapped kept_bytes / to_host + the same / from_host: copies go one at a time; with those of the
                 ranks that share the link (`result.py`)
    link         for each slice the slower of its two cuts; activations and gradients at the same time

All three overlap, so the time is the largest of them; the stage as a whole, with r replicas that take turns,
gives a minibatch every time / r.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from vpipe.cost import (
    POLICIES,
    Profile,
    all_reduce_seconds,
    backward_bytes,
    input_bytes,
    update_bytes,
)
from vpipe.cost.costs import MOST_BUCKETS
from vpipe.simulate.network import reduction


class Load(NamedTuple):
    """What a schedule asks of one stage's ranks."""

    replicas: int
    in_flight: int
    """Minibatches between their F and the end of their B or I, at most."""
    versions: int
    waiting: int
    """Minibatches between the end of their I and that of their W, at most, while others are in flight."""
    split: bool
    """Whether backward is split into I and W."""
    per_update: float
    """A rank's own minibatches between two updates."""
    lag: int = 0
    """Updates that the first stage may be behind the last; none in synchronous schedules."""
    fresh: bool = False
    """Whether an update follows every backward, so that gradients are not there before."""

    @property
    def asynchronous(self) -> bool:
        return self.lag > 0


class Slice(NamedTuple):
    """Consecutive blocks on the ranks of one stage."""

    start: int
    stop: int
    load: Load
    ranks: tuple[int, ...]
    before: int | None
    """A rank that its inputs come from; None at the model's begin, or where that is the same rank."""
    after: int | None
    """A rank that its outputs go to; None at the model's end, or where that is the same rank."""


class StageMemory(NamedTuple):
    weights: int
    activations: int
    backward: int
    buffers: int

    @property
    def total(self) -> int:
        return sum(self)


class Time(NamedTuple):
    compute: float
    host: float
    link: float

    @property
    def seconds(self) -> float:
        return max(self)


def stage_memory(profile: Profile, slices: Sequence[Slice], policies: Sequence[Sequence[str]]) -> StageMemory:
    """The peak memory of a rank that holds `slices`, with a policy for each of their blocks."""
    weights = activations = backward = copied = 0
    buffers = profile.device.workspace
    for piece, chosen in zip(slices, policies, strict=True):
        load = piece.load
        weights += weight_bytes(profile, piece)
        buffers += buffer_bytes(profile, piece)
        for number, name in zip(range(piece.start, piece.stop), chosen, strict=True):
            block, policy = profile.blocks[number], POLICIES[name]
            held = policy.held(block, input_bytes(profile.blocks, number))
            activations += held * policy.minibatches(profile.device, load.in_flight)
            activations += block.deferred * load.waiting
            copied += policy.copied(block)
        backward = max(backward, running_bytes(profile, piece, chosen))
    backward = max(backward, drained_update_bytes(profile, slices, copied) - activations)
    return StageMemory(weights, activations, backward, buffers)


def waiting_bytes(profile: Profile, slices: Sequence[Slice]) -> int:
    """What minibatches between the two parts of their backward hold."""
    return sum(
        piece.load.waiting * sum(block.deferred for block in profile.blocks[piece.start : piece.stop])
        for piece in slices
    )


def running_bytes(profile: Profile, piece: Slice, policies: Sequence[str]) -> int:
    """What a backward, and an update that follows it while others are in flight, need beyond what was held."""
    load = piece.load
    return backward_bytes(
        profile, piece.start, policies, split=load.split, fresh=load.fresh, updated=load.asynchronous
    )


def drained_update_bytes(profile: Profile, slices: Sequence[Slice], copied: int = 0) -> int:
    """What the update of a slice needs at most while nothing is in flight: in synchronous schedules.

    `copied`: bytes of a minibatch that go to the host, some of which still lie on the device then.
    """
    if slices[0].load.asynchronous:
        return 0
    most = max(update_bytes(profile.blocks[piece.start : piece.stop]) for piece in slices)
    return most + profile.device.lingering * copied


def stage_time(profile: Profile, slices: Sequence[Slice], policies: Sequence[Sequence[str]]) -> Time:
    """A rank's time for one minibatch; a stage of r replicas gives one every r-th part of it."""
    compute = copied = link = 0.0
    for piece, chosen in zip(slices, policies, strict=True):
        for block, name in zip(profile.blocks[piece.start : piece.stop], chosen, strict=True):
            compute += block.forward + block.backward + POLICIES[name].seconds(block)
            copied += POLICIES[name].copied(block)
        compute += fixed_seconds(profile, piece)
        link += link_seconds(profile, piece)
    return Time(compute, copied / host_bandwidth(profile), link)


def weight_bytes(profile: Profile, piece: Slice) -> int:
    parameters = profile.parameter_bytes(piece.start, piece.stop)
    return ceil(parameters * copies(profile, piece.load))


def copies(profile: Profile, load: Load) -> float:
    """What is there for each byte of parameters: versions, gradients, optimizer state."""
    return load.versions + (not load.fresh) + profile.optimizer_ratio


def buffer_bytes(profile: Profile, piece: Slice) -> int:
    received = 0 if piece.before is None else input_bytes(profile.blocks, piece.start)
    sent = 0 if piece.after is None else profile.blocks[piece.stop - 1].boundary_bytes
    shared = profile.exchange_buffers(piece.start, piece.stop, piece.load.lag)
    return 2 * (received + sent) + shared


def host_bandwidth(profile: Profile) -> float:
    """Bytes a second, out and back again."""
    return 1 / (1 / profile.device.to_host + 1 / profile.device.from_host)


def actions(load: Load) -> int:
    """Of a stage for a minibatch: a forward, and a backward in one or two parts."""
    return 3 if load.split else 2


def fixed_seconds(profile: Profile, piece: Slice) -> float:
    """What no policy changes, beside the blocks' own time: for the runtime, the update and copied messages."""
    runtime = actions(piece.load) * profile.device.overhead
    return runtime + update_seconds(profile, piece) + sum(copy_seconds(profile, piece))


def update_seconds(profile: Profile, piece: Slice) -> float:
    """The share of one minibatch in the update, and in the reduction where there are replicas."""
    blocks = profile.blocks[piece.start : piece.stop]
    parameters = profile.parameter_bytes(piece.start, piece.stop)
    spent = sum(block.update for block in blocks) + reduce_seconds(profile, piece.load.replicas, parameters)
    if piece.load.versions > 1:
        spent += sum(block.version for block in blocks)
    spent += profile.exchange_seconds(profile.exchanged_bytes(piece.start, piece.stop))
    return spent / piece.load.per_update


def reduce_seconds(profile: Profile, replicas: int, count: float) -> float:
    """One replica's part in adding up the gradients of all: on one host, if one has room for them."""
    hosts = profile.hosts
    if hosts is None or replicas == 1:
        return all_reduce_seconds([profile.link] * (replicas - 1), count)
    ranks = [rank for own in sorted(hosts.ranks, key=len, reverse=True) for rank in own][:replicas]
    parts = [reduction(profile, ranks, rank, count) for rank in ranks]
    # At least one of some buckets is still to be sent when the last backward has ended.
    return min(part.seconds + part.route.seconds / MOST_BUCKETS + part.route.latency for part in parts)


def copy_seconds(profile: Profile, piece: Slice) -> tuple[float, float]:
    """What a rank that copies its messages itself spends on activations and on gradients."""
    if not profile.link.sender_busy:
        return 0.0, 0.0
    sent = received = 0.0
    if piece.after is not None:
        sent = profile.link.seconds(profile.blocks[piece.stop - 1].boundary_bytes)
    if piece.before is not None:
        received = profile.link.seconds(input_bytes(profile.blocks, piece.start))
    return sent, received


def link_seconds(profile: Profile, piece: Slice) -> float:
    received = sent = 0.0
    if piece.before is not None:
        received = hop_seconds(
            profile, piece.before, piece.ranks[0], input_bytes(profile.blocks, piece.start)
        )
    if piece.after is not None:
        sent = hop_seconds(
            profile, piece.ranks[-1], piece.after, profile.blocks[piece.stop - 1].boundary_bytes
        )
    return max(received, sent)


def hop_seconds(profile: Profile, one: int, other: int, count: int) -> float:
    """Activations one way and gradients the other, at the same time."""
    there, back = profile.link_between(one, other), profile.link_between(other, one)
    return max(there.seconds(count), back.seconds(count))
