"""The line about an evaluation: its loss, its perplexity if it has one, and the user's metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vpipe.errors import printable
from vpipe.pipeline.loss_weight import is_cross_entropy

if TYPE_CHECKING:
    from vpipe.pipeline import Pipeline


def perplexity_of(pipe: Pipeline, loss: float) -> float | None:
    """None where the loss is something else than a mean of cross-entropies, or more than that."""
    return math.exp(min(loss, 700.0)) if is_cross_entropy(pipe.layout.graph) else None


def evaluation_line(loss: float, perplexity: float | None, metrics: Mapping[str, float]) -> str:
    figures = [f"Evaluation loss: {loss:.4f}"]
    if perplexity is not None:
        figures.append(f"Perplexity: {perplexity:.2f}")
    figures += [f"{name}: {value:.4f}" for name, value in metrics.items()]
    return printable(", ".join(figures))
