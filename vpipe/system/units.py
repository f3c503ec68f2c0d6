"""Sizes in bytes and durations, as people write and read them."""

from __future__ import annotations

import re

from vpipe.errors import VPipeError

BINARY = ("KiB", "MiB", "GiB", "TiB")
DECIMAL = ("kB", "MB", "GB", "TB")
UNITS = (
    {"": 1, "b": 1}
    | {unit.lower(): 1024**power for power, unit in enumerate(BINARY, 1)}
    | {unit.lower(): 1000**power for power, unit in enumerate(DECIMAL, 1)}
)
PATTERN = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([a-z]*)", re.ASCII)


def read_bytes(text: str, what: str = "memory") -> int:
    """'11GiB', '500MB', '1.5 GiB' or plain bytes."""
    match = PATTERN.fullmatch(text.strip().lower())
    if match is None or match[2] not in UNITS:
        raise VPipeError(
            f"{what} {text[:60]!r} is not a size: write a number with one of {', '.join((*DECIMAL, *BINARY))}, "
            "such as 11GiB or 500MB, or plain bytes"
        )
    number = match[1]
    size = int(number) * UNITS[match[2]] if number.isdecimal() else int(float(number) * UNITS[match[2]])
    if size < 1:
        raise VPipeError(f"{what} {text!r} is less than one byte")
    return size


def read_bandwidth(text: str, what: str = "network") -> float:
    """'10Gbit/s' or '1.25GB/s', in bytes a second."""
    number = text.strip().lower().removesuffix("/s")
    try:
        if number.endswith("bit"):
            return read_bytes(number.removesuffix("it")) / 8
        return float(read_bytes(number))
    except VPipeError:
        raise VPipeError(
            f"{what} {text[:60]!r} is not a bandwidth: write a number with its unit, such as 10Gbit/s or 1.25GB/s"
        ) from None


def show_bytes(count: float) -> str:
    """With four digits at most: 412.4 MiB."""
    for unit in ("B", *BINARY):
        if count < 1024 or unit == BINARY[-1]:
            break
        count /= 1024
    return f"{count:.4g} {unit}" if unit != "B" else f"{count:.0f} B"


def duration(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.4g} {name}"
    return f"{seconds * 1e6:.4g} us"
