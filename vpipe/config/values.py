"""The types of the configuration's values, each with its check."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from vpipe.config.code import names_code
from vpipe.config.settings import AUTO
from vpipe.cost.plan_file import check_schedule
from vpipe.schedule.kind import MOST_DEPTH
from vpipe.system.files import check_path
from vpipe.system.units import read_bytes

LOSS_WEIGHTS = ("auto", "samples", "tokens")


def _number(value: Any) -> Any:
    """YAML reads 5e-5, which has no dot, as text."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        return float(value)
    return value


def _machine(value: str) -> str:
    # Only what a host's name may have: it can be taken neither for an option of another program nor for a command.
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*:[0-9]{1,4}", value):
        raise ValueError("host:GPU, such as 'localhost:0'")
    return value


def _size(value: str) -> str:
    read_bytes(value)
    return value


def _code(value: str) -> str:
    if not names_code(value):
        raise ValueError("module:function, such as 'my_module:build_data'")
    return value


def _schedule(value: str) -> str:
    return value if value == AUTO else check_schedule(value)


def _loss_weight(value: str) -> str:
    if value not in LOSS_WEIGHTS and not names_code(value):
        raise ValueError(f"{', '.join(LOSS_WEIGHTS)}, or module:function")
    return value


LARGEST = 10**9
"""Of any count: a larger number is taken for a mistake in writing."""
Count = Annotated[int, Field(strict=True, ge=1, le=LARGEST)]
Places = Annotated[int, Field(strict=True, ge=1, le=4096)]
Natural = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
Rank = Annotated[int, Field(strict=True, ge=0, lt=4096)]
Depth = Annotated[int, Field(strict=True, ge=0, le=MOST_DEPTH)]
Real = Annotated[float, BeforeValidator(_number), Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[Real, Field(gt=0)]
Seconds = Annotated[Real, Field(gt=0, le=1e6)]
"""At most eleven days: the calls of the system that wait take no more."""
Layers = Annotated[int, Field(strict=True, ge=1, le=10_000)]
Share = Annotated[Real, Field(ge=0, le=1)]
NotNegative = Annotated[Real, Field(ge=0)]
OptimizerName = Literal["sgd", "adam", "adamw", "nadamw", "muon", "lamb"]
Compress = Literal["none", "bf16", "int8", "int4"]
Betas = Annotated[list[Annotated[Real, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]
Momentum = Annotated[Real, Field(ge=0, lt=1)]
Pattern = Annotated[str, Field(min_length=1)]
Machine = Annotated[str, AfterValidator(_machine)]
Program = Annotated[str, Field(pattern=r"^[A-Za-z0-9/_][^\x00-\x1f\x7f]*$")]
Path_ = Annotated[str, Field(min_length=1), AfterValidator(check_path)]
Code = Annotated[str, AfterValidator(_code)]
LossWeight = Annotated[str, AfterValidator(_loss_weight)]
ScheduleName = Annotated[str, AfterValidator(_schedule)]
"""Or the path of a table."""
MemorySize = Annotated[str, Field(min_length=1), AfterValidator(_size)]
