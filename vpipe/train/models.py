"""Models by name: all from `transformers`, built from a configuration, with a synthetic batch for each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor, nn

from vpipe.config.code import call_function
from vpipe.errors import ConfigError, VPipeError
from vpipe.pipeline.captured import keep_graph_of
from vpipe.system.files import short_repr
from vpipe.train.model_settings import read_model_settings

if TYPE_CHECKING:
    from vpipe.config import RunConfig

Batch = dict[str, Tensor]
SPECIAL_TOKENS = 3
"""Ids below this are padding, start and end: synthetic text has none of them."""
MASKED_SHARE = 0.15


class Example(NamedTuple):
    """A model that computes its loss itself, and a batch for it."""

    model: nn.Module
    batch: Batch


def build_own_model(config: RunConfig) -> nn.Module:
    """What the function of the key `model` returns; it builds the model where it likes, with seeded random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = call_function(config, "model")
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{config.source}: model is {config.model!r}: it returned {type(model).__name__}, not an nn.Module: return "
            "the model"
        )
    return model


def build_model(config: RunConfig, device: str = "cpu") -> Example:
    """A named model with seeded weights, on `cpu` or on `meta` (no values), and an example batch."""
    try:
        settings = _settings(config)
        architecture = _architecture(settings, config)
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(config.seed)
            model = architecture(settings)
        keep_graph_of(model)
        return Example(model, synthetic_batch(model, config.batch_size, config.sequence_length))
    except VPipeError:
        raise
    except Exception as error:  # the library's own error for settings that do not fit together
        if config.model is None:
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ConfigError(
            f"{config.source}: model is {config.model!r}: transformers cannot build it: {reason}"
        ) from None


def synthetic_batch(model: nn.Module, samples: int, length: int, seed: int = 0) -> Batch:
    """A batch of random tokens or pixels for a Hugging Face model, labels included."""
    generator = torch.Generator().manual_seed(seed)
    settings: Any = model.config
    taken = inspect.signature(model.forward).parameters
    if "pixel_values" in taken:
        batch = {"pixel_values": _pixels(settings, samples, generator)}
    elif "input_ids" in taken:
        batch = _tokens(model, samples, length, generator)
    else:
        raise ConfigError(
            f"{type(model).__name__} reads {', '.join(taken)}: synthetic batches exist only for models "
            "that read input_ids or pixel_values"
        )
    batch["labels"] = _labels(model, batch, samples, generator)
    if "next_sentence_label" in taken:
        batch["next_sentence_label"] = torch.randint(2, (samples,), generator=generator)
    return {name: tensor for name, tensor in batch.items() if name in taken}


def _tokens(model: nn.Module, samples: int, length: int, generator: torch.Generator) -> Batch:
    """Ids and their mask; the last sample is shorter than the others."""
    longest = _most_positions(model)
    if longest is not None and longest < length:
        raise ConfigError(
            f"sequence_length is {length}, but the model has positions for {longest}: give that or less"
        )
    vocabulary = _setting(model.config, "vocab_size")
    if vocabulary <= SPECIAL_TOKENS:
        raise ConfigError(
            f"the model's vocab_size is {vocabulary}: ids below {SPECIAL_TOKENS} are padding, start and end; give "
            f"{SPECIAL_TOKENS + 1} or more"
        )
    ids = torch.randint(SPECIAL_TOKENS, vocabulary, (samples, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, length - length // 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _most_positions(model: nn.Module) -> int | None:
    """The tokens that a sample may have; None: any number.

    A RoBERTa counts from the position behind that of padding, so that it has fewer than its configuration says.
    """
    settings: Any = model.config
    written = getattr(settings, "max_position_embeddings", None)
    counts = [written] if isinstance(written, int) and written > 0 else []
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            counts.append(module.num_embeddings - module.padding_idx - 1)
    return min(counts, default=None)


def _pixels(settings: Any, samples: int, generator: torch.Generator) -> Tensor:
    size = _setting(settings, "image_size")
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.randn(samples, _setting(settings, "num_channels"), height, width, generator=generator)


def _setting(settings: Any, name: str) -> Any:
    """A size that a synthetic batch needs; models of several parts have it in the configuration of one part."""
    if not hasattr(settings, name):
        raise ConfigError(
            f"the configuration of {settings.model_type!r} has no {name}: no synthetic batch can be made for it"
        )
    return getattr(settings, name)


def _labels(model: nn.Module, batch: Batch, samples: int, generator: torch.Generator) -> Tensor:
    name = type(model).__name__
    settings: Any = model.config
    if name.endswith(("ForSequenceClassification", "ForImageClassification")):
        return _classes(settings, samples, generator)
    if "input_ids" not in batch:
        raise ConfigError(
            f"{name} needs labels that a synthetic batch does not have: use a model ...ForImageClassification"
        )
    ids, mask = batch["input_ids"], batch["attention_mask"]
    if name.endswith("ForTokenClassification"):
        ids = torch.randint(settings.num_labels, ids.shape, generator=generator)
    elif settings.is_encoder_decoder:
        return torch.randint(SPECIAL_TOKENS, _setting(settings, "vocab_size"), ids.shape, generator=generator)
    labels = ids.masked_fill(mask == 0, -100)
    if name.endswith(("ForMaskedLM", "ForPreTraining")):
        chosen = torch.rand(ids.shape, generator=generator) < MASKED_SHARE
        chosen[:, 0] = True  # at least one in each sample, or the loss of a batch would be nan
        labels = labels.masked_fill(~chosen, -100)
    return labels


def _classes(settings: Any, samples: int, generator: torch.Generator) -> Tensor:
    """Of whole samples: a class, some of several classes, or numbers."""
    count: int = settings.num_labels
    problem = settings.problem_type or ("regression" if count == 1 else "single_label_classification")
    if problem == "single_label_classification":
        return torch.randint(count, (samples,), generator=generator)
    shape = (samples,) if count == 1 else (samples, count)
    if problem == "regression":
        return torch.randn(shape, generator=generator)
    return torch.randint(2, (samples, count), generator=generator).float()


def _settings(config: RunConfig) -> Any:
    """The Hugging Face configuration of the model."""
    if config.model is not None:
        place = f"{config.source}: model is {config.model!r}"
        return read_model_settings(config.path(config.model), place)
    inner = config.intermediate_size or 4 * config.hidden_size
    if config.model_type == "bert":
        return hf.BertConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            intermediate_size=inner,
            max_position_embeddings=max(512, config.sequence_length),
            hidden_dropout_prob=config.dropout,
            attention_probs_dropout_prob=config.dropout,
        )
    if config.model_type == "cpm":
        return hf.GPT2Config(
            vocab_size=config.vocab_size,
            n_embd=config.hidden_size,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_inner=inner,
            n_positions=max(1024, config.sequence_length),
            resid_pdrop=config.dropout,
            embd_pdrop=config.dropout,
            attn_pdrop=config.dropout,
            bos_token_id=1,
            eos_token_id=2,
            use_cache=False,
        )
    settings = hf.T5Config(
        vocab_size=config.vocab_size,
        d_model=config.hidden_size,
        d_kv=config.hidden_size // config.num_heads,
        d_ff=inner,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        dropout_rate=config.dropout,
        use_cache=False,
    )
    settings.decoder_start_token_id = 0
    settings.eos_token_id = 2  # as for cpm, and as the trained tokenizer has it
    return settings


def _architecture(settings: Any, config: RunConfig) -> Callable[[Any], nn.Module]:
    """The class that the file names, or the usual one for training if it names none that computes a loss."""
    place = f"{config.source}: model is {config.model!r}"
    names = settings.architectures or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{place}: its architectures are {short_repr(names)}: give a list with a name, or none"
        )
    for name in names:
        named = getattr(hf, name, None)
        if isinstance(named, type) and issubclass(named, hf.PreTrainedModel) and _reads_labels(named):
            if not isinstance(settings, named.config_class or object):
                raise ConfigError(
                    f"{place}: its architectures name {name}, which is no model of its model_type "
                    f"{settings.model_type!r}: leave architectures out, or change one of the two"
                )
            return named
    usual = (
        hf.AutoModelForSeq2SeqLM,
        hf.AutoModelForMaskedLM,
        hf.AutoModelForCausalLM,
        hf.AutoModelForImageClassification,
    )
    for auto in usual:
        if type(settings) in auto._model_mapping:
            return partial(auto.from_config, dtype=torch.get_default_dtype())  # whatever the file's is
    raise ConfigError(
        f"{place}: no architecture for {settings.model_type!r} computes "
        'a loss from labels: name one in its config.json, such as "architectures": ["BertForMaskedLM"]'
    )


def _reads_labels(architecture: type) -> bool:
    return "labels" in inspect.signature(architecture.forward).parameters  # type: ignore[attr-defined]
