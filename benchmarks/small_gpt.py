"""A small GPT or BERT as a function of stacked weights, and text for it: what `benchmarks/staleness.py` trains."""

import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

HIDDEN = ("qkv", "out", "up", "down")
"""The matrices that Muon takes; each is a tensor of all layers, (layers, rows, columns)."""
HIDDEN_WORDS = 0.15
"""Share of the tokens that BERT is to guess."""


@dataclass(frozen=True)
class Sizes:
    layers: int = 8
    width: int = 512
    heads: int = 8
    vocabulary: int = 8192
    length: int = 256
    batch: int = 32


def kind_of(name: str) -> str:
    return "hidden" if name in HIDDEN else "tokens" if name in ("tokens", "head") else "vectors"


@cache
def initial_weights(sizes: Sizes, seed: int, device: torch.device) -> dict[str, Tensor]:
    """GPT-2's, with a tied embedding; (1, ...) for what there is once, (layers, ...) for the rest."""
    generator = torch.Generator().manual_seed(seed)
    n, d = sizes.layers, sizes.width

    def normal(*shape: int, scale: float = 0.02) -> Tensor:
        return scale * torch.randn(shape, generator=generator)

    deep = 0.02 / math.sqrt(2 * n)
    weights = {
        "tokens": normal(1, sizes.vocabulary, d),
        "positions": normal(1, sizes.length, d),
        "qkv": normal(n, d, 3 * d),
        "out": normal(n, d, d, scale=deep),
        "up": normal(n, d, 4 * d),
        "down": normal(n, 4 * d, d, scale=deep),
    }
    for name, count, width in (
        ("qkv_bias", n, 3 * d), ("out_bias", n, d), ("up_bias", n, 4 * d), ("down_bias", n, d),
        ("norm1_bias", n, d), ("norm2_bias", n, d), ("final_bias", 1, d),
    ):  # fmt: skip
        weights[name] = torch.zeros(count, width)
    for name, count in (("norm1", n), ("norm2", n), ("final", 1)):
        weights[name] = torch.ones(count, d)
    return {name: weight.to(device) for name, weight in weights.items()}


def loss_of(weights: dict[str, Tensor], batch: Tensor, heads: int, guessed: Tensor | None = None) -> Tensor:
    """Of the next token of each; with `guessed`, (minibatches, samples, k) places, of the tokens there, which a BERT
    has to guess. Its minibatches, (minibatches, samples, length + 1), have weights of their own each:
    (layers or 1, minibatches, ...).

    A BERT is the same model without the causal mask (so its norms stand before a layer, not behind it).
    """
    w = {name: stacked.unbind(0) for name, stacked in weights.items()}
    inputs, targets = batch[..., :-1], batch[..., 1:]
    if guessed is not None:
        targets = inputs.gather(2, guessed)
        inputs = inputs.scatter(
            2, guessed, w["tokens"][0].shape[1] - 1
        )  # the last token stands for a hidden one
    x = embedded(inputs, w["tokens"][0]) + w["positions"][0][:, None]
    shape = x.shape[1:3]
    x = x.flatten(1, 2)  # (minibatches, tokens, width)
    for layer in range(len(w["qkv"])):
        normed = norm(x, w["norm1"][layer], w["norm1_bias"][layer])
        qkv = normed @ w["qkv"][layer] + w["qkv_bias"][layer][:, None]
        x = x + attended(qkv, shape, heads, guessed is None) @ w["out"][layer] + w["out_bias"][layer][:, None]
        normed = norm(x, w["norm2"][layer], w["norm2_bias"][layer])
        inner = F.gelu(normed @ w["up"][layer] + w["up_bias"][layer][:, None], approximate="tanh")
        x = x + inner @ w["down"][layer] + w["down_bias"][layer][:, None]
    if guessed is not None:
        places = guessed[..., None].expand(-1, -1, -1, x.shape[-1])
        x = x.unflatten(1, shape).gather(2, places).flatten(1, 2)
    x = norm(x, w["final"][0], w["final_bias"][0])
    logits = x @ w.get("head", w["tokens"])[0].mT
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def embedded(inputs: Tensor, tables: Tensor) -> Tensor:
    """Each minibatch by its own table of (minibatches, vocabulary, width)."""
    count, vocabulary, _ = tables.shape
    first = vocabulary * torch.arange(count, device=inputs.device)
    return F.embedding(inputs + first[:, None, None], tables.flatten(0, 1))


def norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Rounded once, as a layer norm with one scale is."""
    normed = F.layer_norm(x.float(), x.shape[-1:])
    return (normed * scale[:, None] + shift[:, None]).to(x.dtype)


def attended(qkv: Tensor, shape: torch.Size, heads: int, causal: bool) -> Tensor:
    """Attention of (minibatches, tokens, 3 * width), where `shape` is (samples, length)."""
    samples = qkv.unflatten(1, shape).flatten(0, 1).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in samples)
    found = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return found.transpose(1, 2).reshape(*qkv.shape[:2], -1)


@cache
def guessed_places(sizes: Sizes, updates: int, device: torch.device) -> Tensor:
    """The places of the hidden tokens: (updates, samples, k)."""
    generator = torch.Generator().manual_seed(2)
    count = max(1, round(HIDDEN_WORDS * sizes.length))
    drawn = [
        torch.rand(sizes.batch, sizes.length, generator=generator).topk(count).indices.short()
        for _ in range(updates)
    ]
    return torch.stack(drawn).to(device)


def sample_places(count: int, sizes: Sizes, updates: int, device: torch.device) -> Tensor:
    """Where the samples of each update begin: every stretch of the text once an epoch."""
    generator = torch.Generator().manual_seed(1)
    stretches = (count - 1) // sizes.length
    epochs = -(-updates * sizes.batch // stretches)
    order = torch.cat([torch.randperm(stretches, generator=generator) for _ in range(epochs)])
    return (order[: updates * sizes.batch] * sizes.length).view(updates, sizes.batch).to(device)


def read_tokens(characters: int, vocabulary: int) -> Tensor:
    """Source text of installed packages as tokens of a BPE that is trained on a part of it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts: dict[str, None] = {}  # each once
    for source in _sources():
        text = source.read_text(encoding="utf-8", errors="ignore")
        if 0 < len(text) <= 200_000 and text not in texts:
            texts[text] = None
            characters -= len(text)
        if characters <= 0:
            break
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    # More text would not change the merges much, and takes long.
    some = list(texts)[:: max(8, len(texts) // 1000)]
    tokenizer.train_from_iterator(some, trainer)
    ids: list[Tensor] = []
    for first in range(0, len(texts), 1000):  # encodings take far more memory than tokens
        found = tokenizer.encode_batch_fast(list(texts)[first : first + 1000])
        ids += [torch.tensor(one.ids, dtype=torch.int32) for one in found]
    return torch.cat(ids)


def _sources() -> Iterator[Path]:
    """The files of transformers and of torch, then those of all other packages beside them, then Python's own."""
    packages = []
    for name in ("transformers", "torch"):
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        packages.append(Path(spec.origin).parent)
    for folder in (*packages, packages[-1].parent, Path(sysconfig.get_path("stdlib"))):
        yield from sorted(folder.rglob("*.py"))
