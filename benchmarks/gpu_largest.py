"""The largest minibatch, and the most layers, that train under the cap: found by short runs, begun at the prediction.

Five settings: PipeDream's (everything kept), GPipe's (everything recomputed, 32 accumulated), VPipe's (the guides'
share recomputed), and our plan without and with swapping. A size that runs out of memory does not fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

from gpu_bench import Bench, Case, with_layers
from gpu_settings import RANKS, ROOMS, even_stages, find_cap, hand_made

from vpipe.cost import Profile
from vpipe.cost.plan_file import recomputed_from_end
from vpipe.errors import VPipeError
from vpipe.plan import plan

SECONDS = 300.0
"""Of the whole part: after so long no further size is tried."""
LEAST_BANDWIDTH = 1.0
"""Bytes a second to the host at which no plan swaps."""

Setting = Callable[[Bench, Profile, int, int, int], Case | None]
"""From the profile, a minibatch's size, the layers and the cap to what is to be run; None: it is known not to fit."""


def largest(bench: Bench, profile: Profile, limits: dict[str, float]) -> None:
    cap = find_cap(bench, profile, limits)
    deadline = time.monotonic() + SECONDS
    step = max(1, bench.batch // 4)
    sizes = range(step, 16 * bench.batch + 1, step)
    depths = range(4, 6 * bench.layers + 1, 2)
    for what, candidates in (("batch", sizes), ("layers", depths)):
        for name, setting in SETTINGS.items():

            @cache
            def case_of(value: int, what: str = what, setting: Setting = setting) -> Case | None:
                own = {"batch": bench.batch, "layers": bench.layers} | {what: value}
                return setting(bench, profile, own["batch"], own["layers"], cap)

            found, sure = search(bench, profile, candidates, case_of, f"{name}: {what}", deadline)
            bench.tell(case=f"largest {what}: {name}", cap=cap, largest={what: found}, sure=sure)


def search(
    bench: Bench,
    profile: Profile,
    candidates: Sequence[int],
    case_of: Callable[[int], Case | None],
    name: str,
    deadline: float,
) -> tuple[int | None, bool]:
    """The largest candidate that fits, and whether there was time to make sure of it."""

    def fits(place: int) -> bool:
        case = case_of(candidates[place])
        if case is None:
            return False
        brief = case._replace(name=f"{name} {candidates[place]}?", brief=True)
        return bench.run(brief, profile, {}) is not None

    def fits_by_prediction(place: int) -> bool:
        case = case_of(candidates[place])
        return case is not None and max(bench.prediction(case, profile)["predicted_bytes"]) <= (case.cap or 0)

    place = bisect(fits_by_prediction, -1, len(candidates))
    low, high = -1, len(candidates)  # the last that is known to fit, the first that is known not to
    place, stride = max(place, 0), 1
    while low + 1 < high:
        if not bench.in_time(deadline):
            return candidates[low] if low >= 0 else None, False
        if fits(place):
            low = place
        else:
            high = place
        if low < 0 or high == len(candidates):
            # One side is still open: stride away from the prediction, ever longer.
            place = min(max(place + (stride if high == len(candidates) else -stride), low + 1), high - 1)
            stride *= 2
        else:
            place = (low + high) // 2
    return candidates[low] if low >= 0 else None, True


def bisect(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The last place between that fits, if all before it do."""
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def pipedream(bench: Bench, profile: Profile, batch: int, layers: int, cap: int) -> Case:
    return Case("", "pipedream", batch, None, even_stages(2 * layers + 1), None, cap, layers=layers)


def gpipe(bench: Bench, profile: Profile, batch: int, layers: int, cap: int) -> Case:
    everything = ("recompute",) * (2 * layers + 1)
    return Case("", "gpipe", batch, 32, even_stages(2 * layers + 1), everything, cap, layers=layers)


def vpipe(bench: Bench, profile: Profile, batch: int, layers: int, cap: int) -> Case:
    hand = hand_made(2 * layers + 1)
    some = recomputed_from_end(hand, (0.3, 0.0, 0.0, 0.0))
    return Case("", "vpipe", batch, None, hand, some, cap, layers=layers)


def ours(bench: Bench, profile: Profile, batch: int, layers: int, cap: int, swap: bool) -> Case | None:
    deep = with_layers(profile, layers)
    if not swap:
        device = replace(deep.device, to_host=LEAST_BANDWIDTH, from_host=LEAST_BANDWIDTH)
        deep = replace(deep, device=device)
    try:
        made = plan(deep, RANKS, int(ROOMS[-1] * cap), "vpipe", batch_size=batch)
    except VPipeError:
        return None
    if not swap and "swap" in made.policies:
        return None  # nothing else would have fitted
    return Case(
        "", "vpipe", batch, None, made.partition, made.policies, cap, replicas=made.replicas, layers=layers
    )


SETTINGS: dict[str, Setting] = {
    "PipeDream's setting": pipedream,
    "GPipe's setting": gpipe,
    "VPipe's setting": vpipe,
    "our plan without swap": partial(ours, swap=False),
    "our plan": partial(ours, swap=True),
}
