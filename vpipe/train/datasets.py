"""The configured data sets, as the model reads them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from vpipe import data
from vpipe.config.code import call_function, describe_error, takes_config
from vpipe.errors import ConfigError
from vpipe.train.models import synthetic_batch

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from vpipe.config import RunConfig

SYNTHETIC_SAMPLES = 1024
DOCUMENT_MASKS = frozenset(
    {
        *(
            "cohere",
            "deepseek_v3",
            "gemma2",
            "gemma3_text",
            "gpt2",
            "gpt_neox",
            "llama",
            "mistral",
            "mixtral",
        ),
        *("olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "starcoder2"),
    }
)
"""Types of models that make a mask from positions that begin anew; each is compared with its documents alone."""
READ_BY = {"data_field": ("jsonl", "parquet", "saved"), "token_type": ("tokens",)}
"""Keys that only some kinds of data have a use for."""
TOKENIZER = "tokenizer.json"
"""File in a run's folder with its tokenizer, if it trained on text."""


class AllSamples(NamedTuple):
    """All samples, before a share is kept apart; the rest as in `Datasets`."""

    samples: data.Dataset
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None
    note: str | None = None


class Datasets(NamedTuple):
    train: data.Subset
    validation: data.Subset
    tokenizer: Tokenizer | None
    """None if there is no text: random tokens, or files that hold tokens already."""
    chat_template: str | None = None
    """That of the user's tokenizer."""
    note: str | None = None
    """What the user should know about the samples."""


def make_datasets(config: RunConfig, model: nn.Module, cache: Path) -> Datasets:
    """Training and validation samples; a trained tokenizer and the tokens are kept in `cache`."""
    if config.data is not None:
        return own_datasets(config)
    check_named_data(config, model)
    made = _samples(config, model, cache)
    samples = _first_samples(made.samples, config.max_samples)
    train, validation = data.split(samples, config.validation_share, config.seed)
    return Datasets(train, validation, made.tokenizer, made.chat_template, made.note)


def own_datasets(config: RunConfig) -> Datasets:
    """What the function of the key `data` returns: one data set, of which a share is kept apart, or a pair."""
    place = f"{config.source}: data is {config.data!r}: what it returned"
    made = call_function(config, "data")
    parts = made if isinstance(made, tuple) and len(made) == 2 else (made,)
    for part in parts:
        data.check_samples(part, place)
    _check_read(config, pair=len(parts) == 2)
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


def _check_read(config: RunConfig, *, pair: bool) -> None:
    """Raise for keys about samples that nothing reads, because the samples are the user's own."""
    if pair and _written(config, "validation_share"):
        raise ConfigError(
            f"{config.source}: validation_share is {config.validation_share}, but data {config.data!r} returns samples "
            "for training and for validation: leave validation_share out"
        )
    if (
        _written(config, "sequence_length")
        and "model" in config.code
        and not any(takes_config(config, key) for key in ("model", "data"))
    ):
        raise ConfigError(
            f"{config.source}: sequence_length is {config.sequence_length}, which nothing reads, because model and "
            "data are your own: leave it out, or give one of the functions a parameter `config`"
        )


def _written(config: RunConfig, key: str) -> bool:
    return getattr(config, key) != type(config).model_fields[key].default


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


def named_batch(config: RunConfig, model: nn.Module, samples: int, seed: int = 0) -> data.Batch:
    """Random tokens, with the fields that the configured text would have."""
    batch = synthetic_batch(model, samples, config.sequence_length, seed)
    settings: Any = model.config
    if config.documents == "joined" and not settings.is_encoder_decoder:
        batch.pop("attention_mask", None)
    elif config.documents == "masked" and batch.pop("attention_mask", None) is not None:
        ids, half = batch["input_ids"], config.sequence_length // 2
        batch["position_ids"] = torch.arange(ids.shape[1]).remainder(half).expand(ids.shape).clone()
    return batch


def _samples(config: RunConfig, model: nn.Module, cache: Path) -> AllSamples:
    settings: Any = model.config
    if config.documents == "masked" and not config.synthetic_data:
        check_document_masks(config, settings)
    if config.synthetic_data:
        count = config.max_samples or SYNTHETIC_SAMPLES
        return AllSamples(
            data.Synthetic(lambda number, seed: named_batch(config, model, number, seed), count, config.seed)
        )
    _check_reads_text(model, config)
    path = None if config.data_dir is None else config.path(config.data_dir)
    masked = type(model).__name__.endswith(("ForMaskedLM", "ForPreTraining"))
    if (masked or settings.is_encoder_decoder) and config.documents != "joined":
        raise ConfigError(
            f"{config.source}: documents is {config.documents!r}, which is for models that predict the next token, not "
            f"for {type(model).__name__}: leave it out"
        )
    shards = masked and data.has_shards(path)
    kind = "shards" if shards else "pairs" if settings.is_encoder_decoder else data.data_kind(path)
    for key, kinds in READ_BY.items():
        if getattr(config, key) is not None and kind not in kinds:
            raise data.data_error(
                path,
                f"{key} is {getattr(config, key)!r}, which is for {' and '.join(kinds)} only: leave it out",
            )
    if shards:
        next_sentence = "next_sentence_label" in inspect.signature(model.forward).parameters
        assert path is not None
        if config.tokenizer is not None:
            raise ConfigError(
                f"{config.source}: tokenizer is {config.tokenizer!r}, but the shards in {config.data_dir!r} hold "
                "tokens already: leave it out"
            )
        return AllSamples(data.read_shards(path, config.sequence_length, settings.vocab_size, next_sentence))
    if settings.is_encoder_decoder:
        pairs = data.read_pairs(path)
        tokenizer = _tokenizer(config, [text for pair in pairs for text in pair], "bpe", settings, cache)
        return AllSamples(data.translation_pairs(pairs, tokenizer, config.sequence_length), tokenizer)
    if path is not None and kind == "tokens":
        return _token_samples(config, settings, path, masked)
    return _text_samples(config, settings, path, masked, cache)


def _text_samples(
    config: RunConfig, settings: Any, path: Path | None, masked: bool, cache: Path
) -> AllSamples:
    """Samples of documents, which are encoded once."""
    documents = _documents(config, path)
    tokenizer = _tokenizer(config, documents, "wordpiece" if masked else "bpe", settings, cache)
    chat = data.Chat(tokenizer, None if config.tokenizer is None else config.path(config.tokenizer))
    words = data.encode_documents(documents, tokenizer, cache, chat)
    length = config.sequence_length
    if masked:
        rows = data.windows(words, length - 2, length, path)
        return AllSamples(data.masked_text(rows, tokenizer, config.seed), tokenizer)
    whole: data.TokenRows = (
        data.Documents(words, length)
        if config.documents == "padded"
        else data.windows(words, length, length, path)
    )
    separate = config.documents == "masked"
    trained = data.trained_rows(whole, data.UNTRAINED | (data.FIRST if separate else 0))
    dropped = len(whole) - len(trained)
    if not len(trained):
        raise data.data_error(
            path, "no sample has a token to predict: give more documents, or a larger sequence_length"
        )
    note = f"{dropped} of {len(whole)} samples have no token to predict and are left out" if dropped else None
    return AllSamples(
        data.CausalText(trained, separate, config.documents == "padded"), tokenizer, chat.template, note
    )


def _token_samples(config: RunConfig, settings: Any, path: Path, masked: bool) -> AllSamples:
    """Samples of files of tokens. A tokenizer is needed where special tokens have a meaning."""
    if config.documents == "padded":
        raise data.data_error(
            path, "files of tokens have no documents to fill up (documents: padded): use joined or masked"
        )
    tokenizer = None
    if config.tokenizer is not None:
        tokenizer = data.read_tokenizer(config.path(config.tokenizer), settings.vocab_size)
    elif masked or config.documents == "masked":
        raise data.data_error(
            path,
            "only a tokenizer knows which tokens are special (they end a document, or hide a word): name the one that "
            "made the files with the key tokenizer",
        )
    separate = config.documents == "masked"
    end = data.special_id(tokenizer, "end") if separate and tokenizer is not None else None
    width = config.sequence_length - (2 if masked else 0)
    rows = data.TokenFiles(path, data.list_files(path), config.token_type, settings.vocab_size, width, end)
    if masked:
        assert tokenizer is not None
        return AllSamples(data.masked_text(rows, tokenizer, config.seed), tokenizer)
    return AllSamples(data.CausalText(rows, separate), tokenizer)


def _documents(config: RunConfig, path: Path | None) -> Iterable[data.Document]:
    kind = data.data_kind(path)
    if path is not None and kind == "saved":
        return data.read_saved(path, config.data_field)
    if path is not None and kind in ("jsonl", "parquet"):
        return data.read_records(path, kind, config.data_field)
    return data.read_documents(path)


def _tokenizer(
    config: RunConfig, documents: Iterable[data.Document], kind: Any, settings: Any, cache: Path
) -> Tokenizer:
    given = None if config.tokenizer is None else config.path(config.tokenizer)
    return data.build_tokenizer(documents, kind, settings.vocab_size, cache, given)


def check_document_masks(config: RunConfig, settings: Any) -> None:
    """Raise for a model that does not keep attention within a document."""
    if settings.model_type not in DOCUMENT_MASKS:
        raise ConfigError(
            f"{config.source}: documents is 'masked', but a model of the type {settings.model_type!r} does not keep "
            f"its attention within a document: use joined or padded, or one of {', '.join(sorted(DOCUMENT_MASKS))}"
        )
    if settings.use_cache:
        raise ConfigError(
            f"{config.source}: documents is 'masked', but with use_cache a model of transformers looks past the end of "
            "a document: build it with use_cache=False"
        )


def _check_reads_text(model: nn.Module, config: RunConfig) -> None:
    name = type(model).__name__
    if not name.endswith(
        ("ForMaskedLM", "ForPreTraining", "LMHeadModel", "ForCausalLM", "ForConditionalGeneration")
    ):
        raise ConfigError(
            f"{config.source}: model {name} is not trained on text alone: set synthetic_data: true, "
            "or give samples of your own with `data: my_module:build_data`"
        )
