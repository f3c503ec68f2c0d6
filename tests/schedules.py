"""Schedules for property tests, and their programs as text."""

from hypothesis import strategies as st

from vpipe.schedule import KINDS, Schedule, build, lower
from vpipe.schedule.kind import too_shallow

NAMES = tuple(KINDS)
ASYNCHRONOUS = tuple(name for name, kind in KINDS.items() if not kind.synchronous)
CHUNKED = tuple(name for name, kind in KINDS.items() if kind.chunks > 1)
"""Several stages a rank, and as many replicas of each."""


def programs(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, schedule.program(rank))) for rank in range(schedule.num_ranks)]


def plain_schedules() -> st.SearchStrategy[Schedule]:
    """Any schedule with any replicas and any depth that it takes."""

    def schedule(name: str, counts: list[int], minibatches: int, ahead: list[int]) -> Schedule:
        if name in CHUNKED:
            counts = [counts[0]] * len(counts)
        depth = ahead[: len(counts)]
        fits = KINDS[name].any_depth and too_shallow(counts, depth, joint=not KINDS[name].synchronous) is None
        return build(name, len(counts), minibatches, replicas=counts, depth=depth if fits else None)

    return st.builds(
        schedule,
        st.sampled_from(NAMES),
        st.lists(st.integers(1, 3), min_size=1, max_size=4),
        st.integers(1, 14),
        st.lists(st.integers(0, 5), min_size=4, max_size=4).map(lambda drawn: sorted(drawn, reverse=True)),
    )


def schedules() -> st.SearchStrategy[Schedule]:
    """The same, lowered or not."""
    return st.builds(
        lambda plain, lowered: lower(plain) if lowered else plain, plain_schedules(), st.booleans()
    )
