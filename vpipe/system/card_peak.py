"""The peak of known GPUs: flops a second of dense matrix products, by the precision of a run."""

from __future__ import annotations

import torch

_TERA = 1e12
# TFLOP/s in 16 bits and in float32 without TF32, by a part of the card's name; the first that fits holds. From data
# sheets, but of the H200, whose products of 16 bits were measured (its data sheet has 989).
_PEAKS = (
    ("B200", 2250.0, 80.0),
    ("H200", 790.0, 67.0),
    ("H100 PCIe", 756.0, 51.0),
    ("H100 NVL", 835.0, 60.0),
    ("H100", 989.0, 67.0),
    ("A100", 312.0, 19.5),
    ("A800", 312.0, 19.5),
    ("A40", 150.0, 37.4),
    ("A30", 165.0, 10.3),
    ("A10", 125.0, 31.2),
    ("L40S", 362.0, 91.6),
    ("L40", 181.0, 90.5),
    ("L4", 121.0, 30.3),
    ("V100", 125.0, 15.7),
    ("T4", 65.0, 8.1),
    ("RTX 5090", 209.5, 104.8),
    ("RTX 4090", 165.2, 82.6),
    ("RTX 3090", 71.0, 35.6),
)


def device_peak(device: torch.device, precision: str) -> float | None:
    """None where it is not known: of a CPU, of a part of a card, of a card that is not in the list."""
    if device.type != "cuda":
        return None
    return named_peak(torch.cuda.get_device_name(device), precision)


def named_peak(name: str, precision: str) -> float | None:
    if "MIG" in name:
        return None
    words = f" {name} "
    for part, half, single in _PEAKS:
        if f" {part} " in words or f" {part}-" in words:
            return _TERA * (single if precision == "fp32" else half)
    return None
