"""The shared page: memory that the launcher makes and every rank of the host maps, with the current action of each.

    verdict                   the first rank that failed, and its error: written by the launcher, read by all
    rank 0   beat  place  error      the last heartbeat; the current action, and since when; the error that ends it
    rank 1   beat  place  error

The page outlives a rank that is killed, so its last action can be reported. It has no name in the file system and needs
no disk, which may be full: so a rank leaves its error there too. Entering an action is one `pack_into`. A rank without
a launcher has a page of its own.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

from vpipe.schedule.action import Action, Op

VARIABLE = "VPIPE_PAGE"
"""Set for a rank: the descriptor of the page."""

_VERDICT = 2048
_ERROR_AT = 128
_SLOT = 4096
_BEAT = Struct("=d")
_PLACE = Struct("=diHB")  # since when, minibatch, stage, operation
_PLACE_AT = _BEAT.size
_WORDS_AT = _PLACE_AT + _PLACE.size
_OPS = tuple(Op)
_CODES = {op: code for code, op in enumerate(_OPS, 1)}
_WORDS, _WORDS_AGAIN = 0, len(_OPS) + 1
"""In place of an operation: words follow; no action has been before, as in fresh memory, or one has."""


class RankActivity(NamedTuple):
    """What a rank does, and since when (`time.monotonic`)."""

    since: float
    action: Action | None
    words: str

    def __str__(self) -> str:
        return str(self.action) if self.action is not None else self.words


class Page:
    """The memory of all ranks of a host."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self.memory = memory

    @staticmethod
    def size(ranks: int) -> int:
        return _VERDICT + ranks * _SLOT

    @property
    def verdict(self) -> str:
        """The first rank that failed, and its error; empty as long as none has."""
        length = int.from_bytes(self.memory[:2], "little")
        return self.memory[2 : 2 + length].decode(errors="replace")

    @verdict.setter
    def verdict(self, text: str) -> None:
        written = text.encode()[: _VERDICT - 2]
        self.memory[2 : 2 + len(written)] = written
        self.memory[:2] = len(written).to_bytes(2, "little")  # last: a reader must not see a part of it

    def beat(self, rank: int) -> float:
        """The last heartbeat of the rank's interpreter (`time.monotonic`); 0 before the first one."""
        return float(_BEAT.unpack_from(self.memory, _VERDICT + rank * _SLOT)[0])

    def place(self, rank: int) -> RankActivity:
        start = _VERDICT + rank * _SLOT
        since, minibatch, stage, code = _PLACE.unpack_from(self.memory, start + _PLACE_AT)
        if code not in (_WORDS, _WORDS_AGAIN):
            return RankActivity(since, Action(stage, _OPS[code - 1], minibatch), "")
        words = self.memory[start + _WORDS_AT : start + _ERROR_AT].partition(b"\0")[0]
        return RankActivity(since, None, words.decode(errors="replace"))

    def has_begun(self, rank: int) -> bool:
        """Whether the rank has ever entered an action."""
        return bool(_PLACE.unpack_from(self.memory, _VERDICT + rank * _SLOT + _PLACE_AT)[3] != _WORDS)

    def error(self, rank: int) -> str:
        """What the rank has reported about its failure, of a long traceback the end; empty if it has not."""
        start = _VERDICT + rank * _SLOT
        return self.memory[start + _ERROR_AT : start + _SLOT].rstrip(b"\0").decode(errors="replace")


class Whereabouts:
    """One rank's place on the page."""

    def __init__(self, page: Page, rank: int) -> None:
        self.page = page
        self.rank = rank
        self._memory = page.memory
        self._start = _VERDICT + rank * _SLOT
        self._place = self._start + _PLACE_AT

    def enter(self, action: Action, now: float) -> None:
        """This rank begins an action."""
        stage, op, minibatch = action
        _PLACE.pack_into(self._memory, self._place, now, minibatch, stage, _CODES[op])

    def beat(self) -> None:
        _BEAT.pack_into(self._memory, self._start, time.monotonic())

    def say(self, words: str) -> None:
        """This rank begins something that is no action."""
        room = _ERROR_AT - _WORDS_AT
        start = self._start + _WORDS_AT
        code = _WORDS_AGAIN if self.page.has_begun(self.rank) else _WORDS
        self._memory[start : start + room] = words.encode()[: room - 1].ljust(room, b"\0")
        _PLACE.pack_into(self._memory, self._place, time.monotonic(), 0, 0, code)

    def fail(self, error: str) -> None:
        """This rank ends because of this error."""
        room = _SLOT - _ERROR_AT
        start = self._start + _ERROR_AT
        text = error.encode(errors="replace")
        kept = text[-room:] if error.startswith("Traceback") else text[:room]
        self._memory[start : start + room] = kept.ljust(room, b"\0")


@contextmanager
def shared_page(ranks: int) -> Iterator[tuple[Page, int]]:
    """A page for the ranks that are about to be started, and its descriptor, which they inherit."""
    descriptor = os.memfd_create("vpipe-page")
    try:
        os.ftruncate(descriptor, Page.size(ranks))
        page = Page(mmap.mmap(descriptor, Page.size(ranks)))
        for rank in range(ranks):
            Whereabouts(page, rank).say("its start")
        yield page, descriptor
    finally:
        os.close(descriptor)


@lru_cache(maxsize=1)
def launchers_page() -> Page | None:
    """The page that the launcher made, if there is a launcher."""
    written = os.environ.pop(VARIABLE, None)  # not for children of ours, which have no such descriptor
    if written is None:
        return None
    descriptor = int(written)
    try:
        return Page(mmap.mmap(descriptor, os.fstat(descriptor).st_size))
    except OSError:
        return None  # a container that passes no descriptors on
    finally:
        os.close(descriptor)


def whereabouts(rank: int) -> Whereabouts:
    """This rank's place."""
    page = launchers_page()
    return Whereabouts(page if page is not None else Page(bytearray(Page.size(rank + 1))), rank)
