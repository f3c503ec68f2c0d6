"""Base optimizers: made for the parameters of a stage, and in groups by parameter name."""

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.optim import Optimizer

from vpipe.errors import VPipeError

EXAMPLE = "give a function of the parameters, e.g. optimizer=lambda params: torch.optim.AdamW(params, 1e-3)"


class NamedParameters(list[nn.Parameter]):
    """Parameters in a list, as torch's optimizers take it, with their names in the model.

    `model_names` are those of all trained parameters of the model, of which one stage holds a part.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], model_names: Collection[str] | None = None
    ) -> None:
        pairs = list(named)
        super().__init__(parameter for _, parameter in pairs)
        self.names = [name for name, _ in pairs]
        self.model_names = model_names

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) pairs, which torch's optimizers take too."""
        return list(zip(self.names, self, strict=True))


OptimizerFactory = Callable[[NamedParameters], Optimizer | Sequence[Optimizer | None]]
Rule = tuple[str | Sequence[str], OptimizerFactory]
"""Patterns of parameter names, and what makes the optimizer of the parameters that match one of them."""


def make_optimizers(factory: OptimizerFactory, parameters: NamedParameters) -> list[Optimizer]:
    """The optimizers of some parameters, each of which must be in one group of one of them."""
    if not parameters:
        return []
    if isinstance(factory, Optimizer):
        kind = type(factory).__name__
        raise VPipeError(
            f"optimizer= is of type {kind}, not a function: it was made for other parameters than those of the stages; "
            f"give a function that makes it, e.g. optimizer=lambda params: torch.optim.{kind}(params, 1e-3)"
        )
    if not callable(factory):
        raise VPipeError(f"optimizer= is of type {type(factory).__name__}, not a function: {EXAMPLE}")
    try:
        made: Any = factory(parameters)
    except VPipeError:
        raise
    except TypeError as error:
        name = getattr(factory, "__name__", type(factory).__name__)
        raise VPipeError(
            f"optimizer= ({name}) failed when it was called with a list of parameters: {error}; {EXAMPLE}"
        ) from error
    except ValueError as error:
        raise VPipeError(
            f"optimizer= failed for {len(parameters)} parameters ({parameters.names[0]!r} and so on): {error}; it is "
            "called for the parameters of one stage, of which a group may have none: leave that optimizer out there"
        ) from error
    optimizers = [o for o in made if o is not None] if isinstance(made, list | tuple) else [made]
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise VPipeError(
                f"optimizer= returned {type(optimizer).__name__}, not a torch.optim.Optimizer or a list of them: "
                f"{EXAMPLE}"
            )
        if _needs_closure(optimizer):
            raise VPipeError(
                f"optimizer= returned {type(optimizer).__name__}, whose step computes the loss again: no stage has the "
                f"whole loss; {EXAMPLE}"
            )
    _check_each_once(optimizers, parameters)
    return [o for o in optimizers if any(group["params"] for group in o.param_groups)]


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _check_each_once(optimizers: Iterable[Optimizer], parameters: NamedParameters) -> None:
    counts = Counter(p for o in optimizers for group in o.param_groups for p in group["params"])
    if foreign := [parameter for parameter in counts if parameter not in set(parameters)]:
        raise VPipeError(
            f"optimizer= took a parameter of shape {tuple(foreign[0].shape)} that it was not given: the stages train "
            "copies of the model's parameters; use those of its argument, not model.parameters(), e.g. "
            "optimizer=lambda params: torch.optim.AdamW(params, 1e-3)"
        )
    for name, parameter in parameters.named():
        if (count := counts.pop(parameter, 0)) != 1:
            raise VPipeError(
                f"optimizer= put parameter {name!r} into {count or 'no'} groups: put each parameter that it is given "
                "into one; to freeze one, call requires_grad_(False) on it"
            )


def optimizer_groups(
    *rules: Rule, rest: OptimizerFactory, place: str = "optimizer_groups"
) -> OptimizerFactory:
    """An `optimizer=` that makes optimizers by parameter name: the first rule that matches a name has it.

        optimizer_groups(
            (["*.bias", "*norm*"], lambda params: torch.optim.AdamW(params, 1e-3, weight_decay=0)),
            ("*embeddings*", lambda params: torch.optim.AdamW(params, 1e-4)),
            rest=lambda params: torch.optim.AdamW(params, 1e-3),
        )

    Patterns are those of `fnmatch`, in which * stands for any text, dots included.

    Args:
        *rules: Pairs of a pattern, or several, and a function from parameters to an optimizer.
        rest: The same for all other parameters.
        place: What error messages begin with.
    """
    patterns = [[given] if isinstance(given, str) else list(given) for given, _ in rules]
    factories = [*(factory for _, factory in rules), rest]

    def rule_of(name: str) -> int:
        matching = (n for n, group in enumerate(patterns) if any(fnmatchcase(name, p) for p in group))
        return next(matching, len(patterns))

    def make(parameters: NamedParameters) -> list[Optimizer]:
        if parameters.model_names is not None:
            _check_patterns(patterns, parameters.model_names, rule_of, place)
        groups: list[list[tuple[str, nn.Parameter]]] = [[] for _ in factories]
        for name, parameter in parameters.named():
            groups[rule_of(name)].append((name, parameter))
        # The rest first: its learning rate is the one that is reported.
        return [
            optimizer
            for number in range(-1, len(patterns))
            for optimizer in make_optimizers(factories[number], NamedParameters(groups[number]))
        ]

    return make


def _check_patterns(
    patterns: Sequence[Sequence[str]], names: Collection[str], rule_of: Callable[[str], int], place: str
) -> None:
    used = {rule_of(name) for name in names}
    for number, group in enumerate(patterns):
        for pattern in group:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise VPipeError(
                    f"{place}, entry {number}: {pattern!r} matches none of the model's {len(names)} trained "
                    f"parameters: {_close_names(pattern, names)}"
                )
        if number not in used:
            raise VPipeError(
                f"{place}, entry {number}: earlier entries match every parameter that {', '.join(map(repr, group))} "
                "matches, and the first match holds: move this entry before them, or leave it out"
            )


def _close_names(pattern: str, names: Collection[str]) -> str:
    """Names that the pattern may have meant, by its text between wildcards."""
    wanted = pattern.strip("*.?").lower()
    containing = [name for name in names if wanted in name.lower()]
    if not containing:
        lower = [name.lower() for name in names]
        pieces = {name[i : i + len(wanted)] for name in lower for i in range(len(name))}
        close = get_close_matches(wanted, pieces.union(*(name.split(".") for name in lower)), 1)
        containing = [name for name in names if close and close[0] in name.lower()]
    found = [repr(name) for name in containing][:3]
    if found:
        return f"did you mean one of {', '.join(found)}?"
    return f"their names are such as {', '.join(repr(name) for name in list(names)[:3])}"
