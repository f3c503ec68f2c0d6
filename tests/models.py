"""The zoo of tiny models that every test of the pipeline draws from.

Each function returns `(model, batch, loss_fn)`: seeded, without dropout unless asked for, small enough to be
run in float64 and long enough to be cut into four stages. `loss_fn` is None where the model returns its loss.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional

Batch: TypeAlias = Any
Example: TypeAlias = tuple[nn.Module, Batch, "Callable[..., Tensor] | None"]

VOCABULARY = 67
BATCH = 4
LENGTH = 8


def token_ids(batch: int = BATCH, length: int = LENGTH, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def language_batch(batch: int = BATCH, length: int = LENGTH, seed: int = 1) -> dict[str, Tensor]:
    """Ids, a ragged mask and labels of which some are ignored."""
    ids = token_ids(batch, length, seed)
    mask = torch.ones_like(ids)
    mask[-1, length - 2 :] = 0
    labels = ids.clone()
    labels[:, ::3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def bert_config(layers: int = 3, dropout: float = 0.0, **overrides: Any) -> hf.BertConfig:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 37,
        "max_position_embeddings": 64,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }
    return hf.BertConfig(**(settings | overrides))


def bert(layers: int = 3, dropout: float = 0.0) -> Example:
    return _seeded(lambda: hf.BertForMaskedLM(bert_config(layers, dropout))), language_batch(), None


def bert_pretraining(layers: int = 2, dropout: float = 0.0) -> Example:
    batch = language_batch() | {
        "token_type_ids": (torch.arange(LENGTH) > 4).long().expand(BATCH, LENGTH).contiguous(),
        "next_sentence_label": torch.arange(BATCH) % 2,
    }
    return _seeded(lambda: hf.BertForPreTraining(bert_config(layers, dropout))), batch, None


def gpt2(layers: int = 2, dropout: float = 0.0) -> Example:
    config = hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=32,
        n_layer=layers,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _seeded(lambda: hf.GPT2LMHeadModel(config)), language_batch(), None


def _decoder_settings(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "use_cache": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def llama(layers: int = 2) -> Example:
    config = hf.LlamaConfig(**_decoder_settings(layers))
    return _seeded(lambda: hf.LlamaForCausalLM(config)), language_batch(), None


def gemma2(layers: int = 2) -> Example:
    config = hf.Gemma2Config(**_decoder_settings(layers), sliding_window=4, query_pre_attn_scalar=8)
    return _seeded(lambda: hf.Gemma2ForCausalLM(config)), language_batch(), None


def qwen3(layers: int = 2) -> Example:
    config = hf.Qwen3Config(**_decoder_settings(layers))
    return _seeded(lambda: hf.Qwen3ForCausalLM(config)), language_batch(), None


def mixtral(layers: int = 2) -> Example:
    config = hf.MixtralConfig(**_decoder_settings(layers), num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "batched_mm"  # the default has no float64
    return _seeded(lambda: hf.MixtralForCausalLM(config)), language_batch(), None


def t5(layers: int = 2, dropout: float = 0.0) -> Example:
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=37,
        num_layers=max(1, layers - 1),
        num_decoder_layers=layers,
        num_heads=4,
        dropout_rate=dropout,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    batch = language_batch()
    batch["labels"] = token_ids(length=6, seed=2)
    return _seeded(lambda: hf.T5ForConditionalGeneration(config)), batch, None


def vit(layers: int = 2, dropout: float = 0.0) -> Example:
    config = hf.ViTConfig(
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=37,
        image_size=16,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    pixels = torch.randn(BATCH, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    batch = {"pixel_values": pixels, "labels": torch.arange(BATCH) % 5}
    return _seeded(lambda: hf.ViTForImageClassification(config)), batch, None


class RecurrentLanguageModel(nn.Module):
    """Layers of LSTM between an embedding and a projection; dropout between the layers."""

    def __init__(self, layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 24)
        self.layers = nn.ModuleList(nn.LSTM(24, 24, batch_first=True) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            output, _ = layer(hidden)
            hidden = hidden + self.dropout(output)
        return self.head(hidden)


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def lstm(layers: int = 4, dropout: float = 0.0) -> Example:
    batch = [token_ids(), token_ids(seed=2)]
    return _seeded(lambda: RecurrentLanguageModel(layers, dropout)), batch, next_token_loss


class UNet(nn.Module):
    """Three levels down, three up; every level's output skips straight to its mirror image."""

    def __init__(self, channels: int = 8, norm: bool = False) -> None:
        super().__init__()
        widths = [3, channels, channels * 2, channels * 4]
        self.down = nn.ModuleList(self._level(a, b, norm) for a, b in pairwise(widths))
        self.middle = self._level(widths[-1], widths[-1], norm)
        self.up = nn.ModuleList(
            self._level(2 * b, a if a != 3 else b, norm)
            for a, b in zip(widths[-2::-1], widths[:0:-1], strict=True)
        )
        self.head = nn.Conv2d(widths[1], 3, 1)

    @staticmethod
    def _level(inputs: int, outputs: int, norm: bool) -> nn.Sequential:
        layers: list[nn.Module] = [nn.Conv2d(inputs, outputs, 3, padding=1)]
        if norm:
            layers.append(nn.BatchNorm2d(outputs))
        return nn.Sequential(*layers, nn.ReLU(inplace=True))

    def forward(self, image: Tensor) -> Tensor:
        skips = []
        hidden = image
        for level in self.down:
            hidden = level(hidden)
            skips.append(hidden)
            hidden = functional.max_pool2d(hidden, 2)
        hidden = self.middle(hidden)
        for level in self.up:
            hidden = functional.interpolate(hidden, scale_factor=2.0)
            hidden = level(torch.cat([hidden, skips.pop()], dim=1))
        return self.head(hidden)


def unet(norm: bool = False) -> Example:
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(BATCH, 3, 16, 16, generator=generator)
    target = torch.randn(BATCH, 3, 16, 16, generator=generator)
    return _seeded(lambda: UNet(norm=norm)), {"image": image, "target": target}, functional.mse_loss


def unet_norm() -> Example:
    return unet(norm=True)


def sequential(layers: int = 6, dropout: float = 0.0) -> Example:
    def make() -> nn.Module:
        modules: list[nn.Module] = [nn.Linear(12, 24)]
        for _ in range(layers):
            modules += [nn.GELU(), nn.Dropout(dropout), nn.Linear(24, 24)]
        return nn.Sequential(*modules, nn.ReLU(inplace=True), nn.Linear(24, 5))

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH, 12, generator=generator)
    return _seeded(make), (inputs, torch.arange(BATCH) % 5), functional.cross_entropy


class Doubling(nn.Module):
    """A layer whose control flow depends on the data, which no exporter can follow."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.linear(hidden)
        while hidden.norm() < 4:
            hidden = hidden * 2
        return hidden


def untraceable() -> Example:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH, 12, generator=generator)
    model = _seeded(lambda: nn.Sequential(*(Doubling(12) for _ in range(5)), nn.Linear(12, 5)))
    return model, (inputs, torch.arange(BATCH) % 5), functional.cross_entropy


ZOO: dict[str, Callable[[], Example]] = {
    "bert": bert,
    "bert_pretraining": bert_pretraining,
    "gpt2": gpt2,
    "llama": llama,
    "gemma2": gemma2,
    "qwen3": qwen3,
    "mixtral": mixtral,
    "t5": t5,
    "vit": vit,
    "lstm": lstm,
    "unet": unet,
    "unet_norm": unet_norm,
    "sequential": sequential,
    "untraceable": untraceable,
}
