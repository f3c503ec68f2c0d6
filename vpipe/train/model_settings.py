"""The settings of a Hugging Face model, from a local `config.json` that can load nothing: no code, no other file.

transformers takes every key of the file as an attribute of its configuration. Some name what it would fetch from a hub,
and run: a kernel for attention or experts (`"attn_implementation": "user/kernel"`, and also "flash_attention_2" where
that package is missing), a backbone, classes beside the file, another file in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers as hf

from vpipe.errors import ConfigError
from vpipe.system.files import DEEPEST, is_file, is_folder, read_json, short_repr

MOST_LAYERS = 10_000
OWN_IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")
"""Those of torch and of transformers itself, whatever is installed."""
ELSEWHERE = ("backbone", "configuration_files")
"""Keys that name another model or file to read."""
CODE = ("auto_map", "custom_pipelines")
"""Keys that name code beside the file; it is not run, and an exported model does not have it."""


def read_model_settings(path: Path, place: str) -> Any:
    """Of a file, or of the `config.json` in a folder; `place` begins error messages."""
    file = path / "config.json" if is_folder(path) else path
    if not is_file(file):
        raise ConfigError(f"{place}: there is no config.json at {path}: give a local file or directory")
    try:
        values = read_json(file)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{place}: {file} holds {short_repr(values)}: it must hold settings by name, in {{}}"
        )
    _check_keys(values, place)
    try:
        settings = hf.AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{place}: transformers cannot read it: {reason}") from None
    for part in _parts(settings):
        _check_part(part, place)
        # Nobody reads them, and with attention as sdpa transformers refuses to write such a file, at a run's end.
        part.output_attentions = part.output_hidden_states = False
    settings.use_cache = False
    return settings


def _check_keys(values: Any, place: str, depth: int = 0) -> None:
    if depth > DEEPEST:
        raise ConfigError(f"{place}: its values are nested deeper than {DEEPEST}: no model has such settings")
    for key, value in values.items() if isinstance(values, dict) else ():
        if "implementation" in key:
            _check_implementation(key, value, place)
        elif key in ELSEWHERE and value is not None:
            raise ConfigError(
                f"{place}: its {key} is {short_repr(value)}, which is loaded from elsewhere: leave it out, and write "
                "all settings into this file"
            )
        _check_keys(value, place, depth + 1)
    for value in values if isinstance(values, list) else ():
        _check_keys(value, place, depth + 1)


def _check_part(settings: Any, place: str) -> None:
    """Of the configuration that was made: a file may also rename its keys (`attribute_map`)."""
    for key in ("_attn_implementation", "_experts_implementation"):
        _check_implementation(key, getattr(settings, key, None), place)
    if getattr(settings, "is_encoder_decoder", False):
        _check_start(settings, place)
    for key in CODE:
        vars(settings).pop(key, None)
    for key, value in vars(settings).items():
        if "layer" in key and isinstance(value, int) and value > MOST_LAYERS:
            raise ConfigError(f"{place}: its {key} is {value}: give {MOST_LAYERS} or less")


def _check_start(settings: Any, place: str) -> None:
    """Of a model that makes its decoder's input from labels: the tokens that it puts first and in gaps.

    Files of T5 may leave the first one out: it is the padding.
    """
    if getattr(settings, "decoder_start_token_id", None) is None:
        settings.decoder_start_token_id = getattr(settings, "pad_token_id", None)
    most = getattr(settings, "decoder_vocab_size", None) or getattr(settings, "vocab_size", None)
    for key in ("decoder_start_token_id", "pad_token_id"):
        value = getattr(settings, key, None)
        if isinstance(value, int) and isinstance(most, int) and not 0 <= value < most:
            raise ConfigError(
                f"{place}: its {key} is {value}, but its vocabulary has {most} tokens: give one from 0 to {most - 1}"
            )


def _check_implementation(key: str, value: Any, place: str) -> None:
    for name in value.values() if isinstance(value, dict) else (value,):
        if name is not None and name not in OWN_IMPLEMENTATIONS:
            raise ConfigError(
                f"{place}: its {key} is {short_repr(name)}, which may be code from a hub: leave it out, or write one "
                f"of {', '.join(OWN_IMPLEMENTATIONS)}"
            )


def _parts(settings: Any) -> Iterator[Any]:
    """The configuration itself, and those of its parts."""
    yield settings
    for value in list(vars(settings).values()):
        for entry in value if isinstance(value, list | tuple) else (value,):
            if isinstance(entry, hf.PretrainedConfig):
                yield from _parts(entry)
