"""The action: one thing that one stage does with one minibatch."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from vpipe.errors import ScheduleError


class Op(str, Enum):
    """What is done. (A `str` too: its hash is cached, and `walk` looks operations up millions of times.)"""

    F = "F"  # forward
    B = "B"  # whole backward: I and W at once
    I = "I"  # gradient of the inputs  # noqa: E741
    W = "W"  # gradient of the weights
    STEP = "STEP"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE = "REDUCE"

    __str__ = str.__str__


COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W})
UPDATE = frozenset({Op.REDUCE, Op.STEP})
COMMUNICATION = frozenset({Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B, Op.REDUCE})

PATTERN = re.compile(r"(\d+)(" + "|".join(sorted(Op.__members__, key=len, reverse=True)) + r")(\d+)")
MOST_DIGITS = 9
"""Of a stage or a minibatch; a longer number is a typing error."""


class Action(NamedTuple):
    """Prints as `2F0`. STEP and REDUCE bear the last minibatch of their update's group: `0STEP7`."""

    stage: int
    op: Op
    minibatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.minibatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        match = PATTERN.fullmatch(text.strip())
        if match is None or max(len(match[1]), len(match[3])) > MOST_DIGITS:
            shown = repr(text if len(text) <= 40 else text[:37] + "...")
            raise ScheduleError(
                f"{shown} is not an action: write stage, operation, minibatch, such as 2F0; "
                f"operations are {', '.join(Op.__members__)}"
            )
        return cls(int(match[1]), Op[match[2]], int(match[3]))
