"""The host link of a rank that swaps: one copy at a time, in either direction, beside compute.

    rank    F5      B2          F6      B3
    host      ==out 5== ==in 3==  ==out 6== ==in 4==

What F5 made leaves when F5 ends. What B3 reads comes back from the start of the backward before it on. So one
minibatch is in use and one on its way, and copies cost nothing while one out and one in take no longer than a
forward and a backward. Where they do, a backward waits for its copy, and a forward for the copy of the forward
before the last one: never more than two minibatches lie on the device.

On a GPU copies run beside computing, and memory is given back in the order of the computation: what F5 made stays until
the stage's next forward (`stage/host_store.py`). So B3 is in use, 4 comes and 6 has left but is still in memory: three
(`DeviceCost.swapped_in`).

Ranks that share a link (`DeviceCost.shared_by`) have each the part of it that it has in what all of them copy: so for
each minibatch of the pipeline the link is busy for the sum of their copies. Of n that copy equally much each has an
n-th part, and one that copies alone has all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf

from vpipe.cost import DeviceCost
from vpipe.schedule import Action, Event, Op, Schedule
from vpipe.simulate.memory import TimedLedger
from vpipe.simulate.stage_cost import StageCost

Key = tuple[int, int]  # stage and minibatch


def shares(schedule: Schedule, costs: Sequence[StageCost], together: int) -> dict[int, float]:
    """The part that each rank which swaps has of its link to the host; `together` ranks share one."""
    copied: dict[int, float] = {}
    for stage, ranks in enumerate(schedule.placement):
        for rank in ranks if costs[stage].swapped else ():
            copied[rank] = copied.get(rank, 0.0) + costs[stage].swapped / len(ranks)
    carried: dict[int, float] = {}
    for rank, size in copied.items():
        carried[rank // together] = carried.get(rank // together, 0.0) + size
    return {rank: size / carried[rank // together] for rank, size in copied.items()}


class HostLink:
    def __init__(self, device: DeviceCost, share: float, ledger: TimedLedger) -> None:
        self.to_host, self.from_host = share * device.to_host, share * device.from_host
        self.ledger = ledger
        self.free = 0.0
        self.made: deque[tuple[Key, float]] = deque()  # to be copied out, since when; times not yet given
        self.out: dict[Key, float] = {}
        self.stays = device.lingering > 0
        self.newest: dict[int, Key] = {}  # by stage: what its latest forward made
        # When the stage's next forward started, of what is still to be copied.
        self.followed: dict[Key, float] = {}
        # When its copy was done, of what that forward has still to give back.
        self.left: dict[Key, float] = {}
        self.last_out = 0.0
        self.previous = 0.0  # when the rank's previous action started
        # When its latest backward started, which is when the next copy in may.
        self.requested: float | None = None

    def hold(self, action: Action, start: float) -> float:
        """When an action that could start at `start` has its place or its data on the device."""
        stage, op, minibatch = action
        swapped = self.ledger.stashes[stage].cost.swapped
        if op is Op.F and swapped:
            while len(self.made) > 1:
                self.copy_out()
            start = max(start, self.last_out)
            self.follow((stage, minibatch), start)
        elif op is Op.B or op is Op.I:
            requested = self.previous if self.requested is None else self.requested
            while self.made and self.made[0][1] <= requested:
                self.copy_out()
            if swapped:
                start = max(start, self.copy_in((stage, minibatch), swapped, requested))
            self.ledger.settle(requested)
            self.requested = start
        self.previous = start
        return start

    def note(self, event: Event) -> None:
        _, (stage, op, minibatch), _, end = event
        if op is Op.F and self.ledger.stashes[stage].cost.swapped:
            self.made.append(((stage, minibatch), end))

    def copy_out(self) -> None:
        key, ready = self.made.popleft()
        swapped = self.ledger.stashes[key[0]].cost.swapped
        self.free = self.last_out = self.out[key] = max(ready, self.free) + swapped / self.to_host
        if not self.stays or key in self.followed:
            self.ledger.copied(max(self.free, self.followed.pop(key, 0.0)), -swapped)
        else:
            self.left[key] = self.free

    def follow(self, key: Key, start: float) -> None:
        """A forward starts: what the stage's last one made may go, once it is copied."""
        before = self.newest.get(key[0])
        self.newest[key[0]] = key
        if before in self.left:
            self.give_back(before, start)
        elif before is not None and self.stays:
            self.followed[before] = start

    def give_back(self, key: Key, time: float) -> None:
        self.ledger.copied(max(time, self.left.pop(key)), -self.ledger.stashes[key[0]].cost.swapped)

    def copy_in(self, key: Key, swapped: int, requested: float) -> float:
        """When the copy that a backward reads is there. It goes before the copies out that were made later."""
        while key not in self.out:
            self.copy_out()
        begin = max(requested, self.free, self.out.pop(key))
        self.ledger.copied(begin, swapped)
        self.free = begin + swapped / self.from_host
        return self.free

    def close(self) -> None:
        """The run is over."""
        while self.made:
            self.copy_out()
        for key in list(self.left):
            self.give_back(key, self.ledger.end)
        self.ledger.settle(inf)
