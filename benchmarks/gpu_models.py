"""The models of the GPU benchmark by name: built from a configuration, with minibatches of random data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor, nn


class Subject(NamedTuple):
    """A model that is measured."""

    kind: type[hf.PreTrainedModel]
    config: type[hf.PretrainedConfig]
    settings: dict[str, Any]
    layers: int
    length: int
    """Tokens of a sample; of images what follows from their size."""
    batch: Callable[[hf.PretrainedConfig, int, int, torch.Generator], dict[str, Tensor]]
    """From the configuration, the samples and their length."""
    tiny: dict[str, Any]
    """Settings with which the script can be tried on a CPU."""

    def build(self, layers: int, *, tiny: bool) -> nn.Module:
        settings = {**self.settings, **(self.tiny if tiny else {}), "num_hidden_layers": layers}
        return self.kind(self.config(**settings))


def masked_words(
    config: hf.PretrainedConfig, size: int, length: int, generator: torch.Generator
) -> dict[str, Tensor]:
    ids = torch.randint(3, config.vocab_size, (size, length), generator=generator)
    labels = ids.where(torch.rand(ids.shape, generator=generator) < 0.15, -100)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def next_words(
    config: hf.PretrainedConfig, size: int, length: int, generator: torch.Generator
) -> dict[str, Tensor]:
    ids = torch.randint(3, config.vocab_size, (size, length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def images(
    config: hf.PretrainedConfig, size: int, length: int, generator: torch.Generator
) -> dict[str, Tensor]:
    pixels = torch.rand(size, 3, config.image_size, config.image_size, generator=generator)
    labels = torch.randint(0, config.num_labels, (size,), generator=generator)
    return {"pixel_values": pixels, "labels": labels}


_NARROW = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256}
_TINY = {**_NARROW, "vocab_size": 512}
_GROUPED = {**_TINY, "num_key_value_heads": 2, "head_dim": 16}
SUBJECTS = {
    "bert-large": Subject(
        hf.BertForMaskedLM,
        hf.BertConfig,
        {"vocab_size": 30522, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
        24,
        128,
        masked_words,
        _TINY,
    ),
    "qwen3-0.6b": Subject(
        hf.Qwen3ForCausalLM,
        hf.Qwen3Config,
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
            "use_cache": False,
        },
        28,
        512,
        next_words,
        _GROUPED,
    ),
    "llama-1b": Subject(
        hf.LlamaForCausalLM,
        hf.LlamaConfig,
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "tie_word_embeddings": True,
            "use_cache": False,
        },
        16,
        512,
        next_words,
        _GROUPED,
    ),
    "mixtral": Subject(
        hf.MixtralForCausalLM,
        hf.MixtralConfig,
        {
            "vocab_size": 32000,
            "hidden_size": 768,
            "intermediate_size": 2688,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "use_cache": False,
        },
        12,
        512,
        next_words,
        {key: value for key, value in _GROUPED.items() if key != "head_dim"},
    ),
    "vit-large": Subject(
        hf.ViTForImageClassification,
        hf.ViTConfig,
        {
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "num_labels": 1000,
        },
        24,
        197,
        images,
        {**_NARROW, "image_size": 32, "patch_size": 8, "num_labels": 10},
    ),
}
