"""The training state in a manifest, checked before anything is set from it: who can write a file can write its hash."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, ValidationError

from vpipe.errors import VPipeError

Number = (
    Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
    | Annotated[float, Field(strict=True, allow_inf_nan=False)]
)
Natural = Annotated[int, Field(strict=True, ge=0, lt=2**53)]
Plain = StrictBool | Number | StrictStr | None


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Group(_Part):
    parameters: list[StrictStr]
    numbers: dict[str, Number | list[Number]]


class _Record(_Part):
    """Of one base optimizer (`vpipe.weights.optimizer_state`)."""

    optimizer: StrictStr
    groups: list[_Group]
    values: dict[str, dict[str, Plain | list[Plain]]]
    scheduler: dict[str, Any] | None


class _LossScale(_Part):
    enabled: StrictBool
    value: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
    good_updates: Natural


class _State(_Part):
    updates: Natural
    loss_scale: _LossScale
    optimizers: list[_Record]


def check_state(state: dict[str, Any], path: Path) -> None:
    """Raise unless it has the form that `Pipeline.training_state` gives it."""
    try:
        _State.model_validate(state)
    except ValidationError as error:
        first = error.errors()[0]
        place = " ".join(".".join(map(str, first["loc"])).split())[:100]
        raise VPipeError(f"{path}: state.{place} in its manifest is wrong: {first['msg'].lower()}") from None
