"""What transformers makes of a file's tensors: other names, and one tensor of several.

A Mixtral's file holds `...block_sparse_moe.experts.0.w1.weight` and so on, one tensor for each expert and matrix;
the model has one `...mlp.experts.gate_up_proj` for all of them. transformers states such rules for every
model that has any, and applies them when it loads; here they are applied to what a rank needs, and no more.
"""

from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from vpipe.errors import VPipeError


@dataclass
class Origin:
    """Where a tensor of the model comes from: one tensor of a file, or several and what is done with them."""

    target: str
    """What they become, or the first of it."""
    names: list[str] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)
    converter: Any = None

    def make(self, target: str, tensors: Mapping[str, Tensor], model: Any) -> Tensor:
        """The model's tensor from those of the files."""
        if self.converter is None:
            return tensors[self.names[0]]
        converter = deepcopy(self.converter)
        for name, pattern in zip(self.names, self.patterns, strict=True):
            converter.add_tensor(self.target, name, pattern, tensors[name])
        try:
            made = converter.convert(self.target, model=model, config=model.config)[target]
        except Exception as error:
            raise VPipeError(
                f"tensor {target!r} cannot be made of {self.names[0]!r} and what belongs to it: {error}"
            ) from None
        return made[0] if isinstance(made, list) else made


def origins(model: nn.Module, in_files: Iterable[str], own: Collection[str]) -> dict[str, Origin]:
    """For each name that the model may know: what of the files it comes from. `own` are the model's names."""
    # Not above: most of what has to do with checkpoints does not need it, and it takes long to import.
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules = get_model_conversion_mapping(_as_any(model))
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    found: dict[str, Origin] = {}
    for name in sorted(in_files, key=dot_natural_key):
        target, pattern = (name, None) if name in own else rename_source_key(name, renamings, converters)
        origin = found.setdefault(target, Origin(target))
        origin.names.append(name)
        if pattern is not None:
            origin.patterns.append(pattern)
            origin.converter = by_pattern[pattern]
    for origin in [origin for origin in found.values() if origin.converter is not None]:
        first, *others = origin.converter.target_patterns
        before, _, behind = origin.target.partition(first)
        found |= {f"{before}{other}{behind}": origin for other in others}
    return found


def _as_any(model: nn.Module) -> Any:
    return model
