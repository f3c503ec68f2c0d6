"""Optimizers by name."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from vpipe.errors import VPipeError, meant
from vpipe.weights.muon import Muon
from vpipe.weights.optimizers import NamedParameters, OptimizerFactory

ENDS = ("embed", "wte", "wpe", "shared", "head", "classifier", "score", "bias")
"""Words in the names of embeddings, heads and tables of biases, which are matrices, but not between layers."""
EXPERTS = "expert"
RATE_FACTOR = "rate_factor"
"""Key of a group whose rate is so many times the run's."""
FULL_SIDE = 1024
"""Of matrices, from which on Muon's updates have the size that those of AdamW have in large models."""
SETTINGS = {
    "sgd": ("momentum",),
    "adam": ("betas", "eps"),
    "adamw": ("betas", "eps"),
    "nadamw": ("betas", "eps"),
    "lamb": ("betas", "eps"),
    "muon": ("momentum", "betas", "eps"),
}
"""The settings that each has besides its learning rate and its weight decay."""


def optimizer_factory(
    name: str, learning_rate: float, weight_decay: float = 0.0, **settings: Any
) -> OptimizerFactory:
    """A function from parameters to the optimizer of this name; fused where torch has a fused one.

    `settings` are betas, eps and momentum; None, or left out: the optimizer's own.
    """
    known: dict[str, Callable[..., Any]] = {
        "sgd": partial(torch.optim.SGD, momentum=0.9, fused=True),
        "adam": partial(torch.optim.Adam, fused=True),
        "adamw": partial(torch.optim.AdamW, fused=True),
        "nadamw": partial(torch.optim.NAdam, betas=(0.99, 0.999), decoupled_weight_decay=True),
        "lamb": _lamb,
        "muon": _muon,
    }
    if name not in known:
        raise VPipeError(f"unknown optimizer {name!r}: {meant(name, known)}")
    given = {key: value for key, value in settings.items() if value is not None}
    for key in given:
        if key not in SETTINGS[name]:
            having = ", ".join(other for other, keys in SETTINGS.items() if key in keys)
            raise VPipeError(
                f"{key} is {given[key]!r}, but optimizer {name!r} has no {key}: leave it out, or choose {having}"
            )
    return partial(known[name], lr=learning_rate, weight_decay=weight_decay, **given)


def name_of(optimizers: Iterable[Optimizer]) -> str:
    """The name that stands for these optimizers of one stage, also of a user's own: its class, in small letters."""
    kinds = [type(optimizer).__name__.lower() for optimizer in optimizers]
    kinds = [{"nadam": "nadamw"}.get(kind, kind) for kind in kinds]
    return "muon" if "muon" in kinds else next(iter(kinds), "none")


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether it is a matrix inside the model: not an embedding, a head or a table of biases, by its name.

    Experts are such matrices in a stack; other parameters of three dimensions (of convolutions) are not.
    """
    parts = name.lower().split(".")
    matrices = parameter.ndim == 2 or (parameter.ndim == 3 and any(EXPERTS in part for part in parts))
    return matrices and not any(word in part for part in parts for word in ENDS)


def _muon(
    params: NamedParameters,
    *,
    lr: float,
    weight_decay: float,
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> list[Optimizer]:
    """Muon for the matrices inside the model, AdamW for the rest; one rate for both.

    Muon's updates are scaled to the size of AdamW's, so that a rate for AdamW fits both: a root mean square of 0.2 for
    matrices whose longer side is 1024 or more, and for smaller ones the spectral norm of a matrix of that side. AdamW's
    updates of a small model are larger than 0.2, and with 0.2 it trains several times slower than with AdamW.
    """
    rest = [(name, p) for name, p in params.named() if not is_hidden_matrix(name, p)]
    hidden = [(name, p) for name, p in params.named() if is_hidden_matrix(name, p)]
    made: list[Optimizer] = []
    if rest:
        made.append(torch.optim.AdamW(rest, lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True))
    if hidden:
        groups = [
            {"params": members, "lr": lr * factor, "weight_decay": weight_decay / factor, RATE_FACTOR: factor}
            for factor, members in _by_factor(hidden).items()
        ]
        made.append(Muon(groups, lr, weight_decay, momentum))
    return made


def _by_factor(named: Iterable[tuple[str, nn.Parameter]]) -> dict[float, list[tuple[str, nn.Parameter]]]:
    """The matrices by the factor of their rate: Muon has sqrt(longer side) in it; that is at least FULL_SIDE here."""
    found: dict[float, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        factor = max(1.0, FULL_SIDE / max(1, *parameter.shape[-2:])) ** 0.5
        found.setdefault(factor, []).append((name, parameter))
    return found


def _lamb(params: Iterable[nn.Parameter], **options: Any) -> Optimizer:
    try:
        from pytorch_optimizer import Lamb
    except ImportError as error:
        raise VPipeError(
            "optimizer 'lamb' needs the package pytorch-optimizer: pip install 'vpipe[lamb]'"
        ) from error
    return Lamb(params, **options)
