"""Hugging Face directories: weights read into any partition, and written for `from_pretrained`.

Files may know a tensor by another name than the model does: a tied one by any of its names, a bare BertModel
without the `bert.` of BertForMaskedLM (or the other way round), an old layer norm's by `gamma` and `beta`. Or as
several tensors: a Mixtral's file holds `...block_sparse_moe.experts.0.w1.weight` and so on, one for each expert and
matrix; the model has one `...mlp.experts.gate_up_proj` for all of them. transformers states such rules for every model
that has any, and applies them when it loads; here they are applied to what a rank needs, and no more.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vpipe.checkpoint.files import file_errors, read_header, read_tensors, write_tensors
from vpipe.checkpoint.loading import check_fits
from vpipe.checkpoint.manifest import Manifest, read_manifest, verify
from vpipe.communication import agree
from vpipe.errors import VPipeError
from vpipe.graph import TensorInfo
from vpipe.graph.exported import canonical_names
from vpipe.pipeline import Pipeline
from vpipe.stage.stage import MODEL
from vpipe.system.files import LARGE, is_file, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FILE = re.compile(r"[^/\\\0]+\.safetensors")


def load_pretrained(pipe: Pipeline, model: nn.Module, directory: Path) -> list[str]:
    """Set the weights from a local Hugging Face directory; call it on every rank.

    Each rank reads what its stages hold. Returns the names that no file has (a head that is new): they keep
    their values. `model` is the one that the pipeline was built from.
    """

    infos = {**pipe.layout.graph.parameters, **pipe.layout.graph.buffers}
    # A buffer that is not persistent is computed by the model itself.
    needed = [name for name, *_ in pipe.layout.state_entries() if infos[name].persistent]

    def read() -> tuple[dict[str, Tensor], list[str]]:
        places = _places(directory)
        known = origins(model, places, {name for own in infos for name in (own, *infos[own].aliases)})
        prefix = getattr(model, "base_model_prefix", "")
        found = _match({name: infos[name] for name in needed}, prefix, known)
        if not found:
            raise VPipeError(
                f"{directory}: none of its {len(places)} tensors is one of the model's: it has "
                f"{next(iter(places), 'nothing')!r}, the model {needed[0]!r}; "
                "give the directory of a model of the same kind"
            )
        own = {name for stage in pipe.runtime.stages.values() for name in stage.state()}
        wanted = {name: origin for name, origin in found.items() if name in own}
        tensors = _read(directory, places, wanted)
        state = {name: origin.make(known_as, tensors, model) for name, (known_as, origin) in wanted.items()}
        check_fits(state, infos, directory)
        return state, [name for name in needed if name not in found]

    state, missing = agree(pipe.world, "pretrained weights", read)
    pipe.load_state_dict(state)
    return missing


def export_pretrained(
    checkpoint: Path, model: nn.Module, directory: Path, *, just_written: bool = False
) -> list[str]:
    """Write the weights of a checkpoint to a directory that `from_pretrained` reads; needs no pipeline.

    A model that is not one of transformers becomes its `state_dict` in `model.safetensors`. `model` has names and
    configuration and may be on `meta`. Parameters that training never used are in no checkpoint: the model's own
    values are written. Returns the names of those that it has no values for either, which `from_pretrained` will
    initialise. A checkpoint that was `just_written` is not hashed again.
    """
    if is_file(directory):
        raise VPipeError(f"cannot write {directory}: it is a file; give a directory")
    saved = _weights(read_manifest(checkpoint) if just_written else verify(checkpoint), checkpoint)
    first = canonical_names(model)
    own = model.state_dict()
    check_fits(saved, dict([*model.named_parameters(), *model.named_buffers()]), checkpoint)
    # One tensor under all names of a tied parameter: transformers then knows which of them to write.
    values = {
        name: saved.get(name, own[name]).to(own[name].dtype, copy=True)
        for name in dict.fromkeys(first[name] for name in own)
    }
    state = {name: values[first[name]] for name in own if not values[first[name]].is_meta}
    exporting: Any = model
    with file_errors("write", directory):
        if hasattr(model, "save_pretrained"):
            exporting.save_pretrained(directory, state_dict=dict(state))
        else:
            directory.mkdir(parents=True, exist_ok=True)
            write_tensors(directory / SINGLE, state, {"format": "pt"})
    return [name for name in own if name not in state]


def _weights(manifest: Manifest, checkpoint: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for file, entry in manifest.files.items():
        names = [name for name in entry.tensors if name.startswith(MODEL)]
        weights |= {n.removeprefix(MODEL): t for n, t in read_tensors(checkpoint / file, names).items()}
    return weights


def _places(directory: Path) -> dict[str, str]:
    """The file of each tensor."""
    index, single = directory / INDEX, directory / SINGLE
    if is_file(single):
        return dict.fromkeys(read_header(single)[0], SINGLE)
    if not is_file(index):
        raise VPipeError(
            f"{directory} has neither {SINGLE} nor {INDEX}: give a directory that save_pretrained wrote "
            "(pickled weights, such as pytorch_model.bin, are not read)"
        )
    found = read_json(index, most=LARGE)
    try:
        places = dict(found["weight_map"])
    except (ValueError, TypeError, KeyError):
        raise VPipeError(f"{index} is not an index of weights: it has no weight_map") from None
    for file in places.values():
        if not isinstance(file, str) or not _FILE.fullmatch(file):
            shown = repr(file) if isinstance(file, str) and len(file) <= 60 else type(file).__name__
            raise VPipeError(f"{index} names the file {shown}: only files beside it are read, *.safetensors")
    return places


def _match(
    needed: Mapping[str, TensorInfo], prefix: str, known: Mapping[str, Origin]
) -> dict[str, tuple[str, Origin]]:
    """The model's names that the files know, as what, and where it comes from."""
    prefix = f"{prefix}." if prefix else ""
    model_has, files_have = (any(n.startswith(prefix) for n in names) for names in (needed, known))
    found = {}
    for name, info in needed.items():
        for candidate in (name, *info.aliases):
            if model_has and not files_have:
                candidate = candidate.removeprefix(prefix)
            elif files_have and not model_has:
                candidate = prefix + candidate
            if candidate in known:
                found[name] = (candidate, known[candidate])
                break
    return found


def _read(
    directory: Path, places: Mapping[str, str], wanted: Mapping[str, tuple[str, Origin]]
) -> dict[str, Tensor]:
    """What the wanted tensors come from, file by file."""
    by_file: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for _, origin in wanted.values() for name in origin.names):
        by_file.setdefault(places[name], []).append(name)
    tensors: dict[str, Tensor] = {}
    for file, names in by_file.items():
        tensors |= read_tensors(directory / file, names)
    return tensors


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

    any_model: Any = model
    if not hasattr(model, "save_pretrained"):
        return {name: Origin(name, [name]) for name in in_files}
    rules = get_model_conversion_mapping(any_model)
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
