"""Bounds for what a run without end writes: fewer and fewer lines, and curves of limited length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

LINES = 10_000
"""Reports that are all written; of those that follow, fewer and fewer."""
POINTS = 4000
"""The most points of a curve, with the newest one."""

Point = TypeVar("Point")


def is_written(number: int) -> bool:
    """Whether report 1, 2, 3, ... of a run is written, so that their number grows with the logarithm of its length.

    The first LINES all are, every second one up to 2 LINES, every fourth one up to 4 LINES, and so on: half of LINES
    for each doubling. It depends on the number alone: a resumed run writes the same ones.
    """
    return not number % (1 << ((number - 1) // LINES).bit_length())


class Curve(Generic[Point]):
    """Evenly spaced points of a curve, as they were given; all of them while they are few, and always the newest."""

    def __init__(self, limit: int = POINTS) -> None:
        self._limit = limit
        self._points: list[Point] = []  # those with the numbers 0, stride, 2 stride, ...
        self._stride = 1
        self._count = 0
        self._newest: list[Point] = []

    def add(self, point: Point) -> None:
        if self._count % self._stride == 0:
            self._points.append(point)
            if len(self._points) >= self._limit:
                del self._points[1::2]
                self._stride *= 2
        self._newest = [point]
        self._count += 1

    def drop_while(self, wrong: Callable[[Point], bool]) -> None:
        """Take back the newest points as long as they are wrong."""
        if not (self._newest and wrong(self._newest[0])):
            return
        points = list(self)
        while points and wrong(points[-1]):
            points.pop()
        self._points, self._newest = points, points[-1:]
        self._count = len(points) * self._stride

    def __iter__(self) -> Iterator[Point]:
        yield from self._points
        if self._points and self._newest[0] is not self._points[-1]:
            yield self._newest[0]

    def __len__(self) -> int:
        return len(self._points) + bool(self._points and self._newest[0] is not self._points[-1])
