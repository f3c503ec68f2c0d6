"""The configured data sets, as the model reads them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from vpipe import data
from vpipe.config.code import call_function, describe_error
from vpipe.errors import ConfigError
from vpipe.train.models import synthetic_batch

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from vpipe.config import RunConfig

SYNTHETIC_SAMPLES = 1024
TOKENIZER = "tokenizer.json"
"""File in a run's folder with its tokenizer, if it trained on text."""


class Datasets(NamedTuple):
    train: data.Subset
    validation: data.Subset
    tokenizer: Tokenizer | None
    """None if there is no text: random tokens, or shards that hold tokens already."""


def make_datasets(config: RunConfig, model: nn.Module, cache: Path) -> Datasets:
    """Training and validation samples; a trained tokenizer and the tokens are kept in `cache`."""
    if config.data is not None:
        return own_datasets(config)
    check_named_data(config, model)
    samples, tokenizer = _samples(config, model, cache)
    samples = _first_samples(samples, config.max_samples)
    return Datasets(*data.split(samples, config.validation_share, config.seed), tokenizer)


def own_datasets(config: RunConfig) -> Datasets:
    """What the function of the key `data` returns: one data set, of which a share is kept apart, or a pair."""
    place = f"{config.source}: data is {config.data!r}: what it returned"
    made = call_function(config, "data")
    parts = made if isinstance(made, tuple) and len(made) == 2 else (made,)
    for part in parts:
        data.check_samples(part, place)
    first, *others = (data.OwnSamples(part, config.seed, describe_error) for part in parts)
    kept = _first_samples(first, config.max_samples)
    if not others:
        return Datasets(*data.split(kept, config.validation_share, config.seed), None)
    if not all(map(len, parts)):
        raise ConfigError(
            f"{place} has no sample for training or for validation: return at least one for each"
        )
    train, validation = (data.Subset(part, np.arange(len(part))) for part in (kept, others[0]))
    return Datasets(train, validation, None)


def _first_samples(samples: data.Dataset, most: int | None) -> data.Dataset:
    if most is None or most >= len(samples):
        return samples
    return data.Subset(samples, np.arange(most))


def check_named_data(config: RunConfig, model: nn.Module) -> None:
    """Raise for a model of the user's own that text and random tokens are not made for."""
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"{config.source}: model is {config.model!r}, which is not a model of transformers: say what it is trained "
            "on with `data: my_module:build_data`"
        )


def _samples(config: RunConfig, model: nn.Module, cache: Path) -> tuple[data.Dataset, Tokenizer | None]:
    length = config.sequence_length
    settings: Any = model.config
    if config.synthetic_data:
        count = config.max_samples or SYNTHETIC_SAMPLES
        return data.Synthetic(
            lambda number, seed: synthetic_batch(model, number, length, seed), count, config.seed
        ), None
    _check_reads_text(model, config)
    path = None if config.data_dir is None else config.path(config.data_dir)
    given = None if config.tokenizer is None else config.path(config.tokenizer)
    masked = type(model).__name__.endswith(("ForMaskedLM", "ForPreTraining"))
    if masked and data.has_shards(path):
        next_sentence = "next_sentence_label" in inspect.signature(model.forward).parameters
        assert path is not None
        return data.read_shards(path, length, settings.vocab_size, next_sentence), None

    def tokenizer_of(texts: Sequence[str]) -> Tokenizer:
        kind: Any = "wordpiece" if masked else "bpe"
        return data.build_tokenizer(texts, kind, settings.vocab_size, cache, given)

    if settings.is_encoder_decoder:
        pairs = data.read_pairs(path)
        tokenizer = tokenizer_of([text for pair in pairs for text in pair])
        return data.translation_pairs(pairs, tokenizer, length), tokenizer
    documents = data.read_documents(path)
    tokenizer = tokenizer_of(documents)
    tokens = data.encode_documents(documents, tokenizer, cache)
    if masked:
        return data.masked_text(tokens, tokenizer, length, config.seed, path), tokenizer
    return data.causal_text(tokens, length, path), tokenizer


def _check_reads_text(model: nn.Module, config: RunConfig) -> None:
    name = type(model).__name__
    if not name.endswith(
        ("ForMaskedLM", "ForPreTraining", "LMHeadModel", "ForCausalLM", "ForConditionalGeneration")
    ):
        raise ConfigError(
            f"{config.source}: model {name} is not trained on text alone: set synthetic_data: true, "
            "or give samples of your own with `data: my_module:build_data`"
        )
