"""Data: text and its tokenizer, samples of fixed length, and the order in which they are trained on."""

from vpipe.data.dataset import Batch, Batches, Dataset, Sampler, Subset, split
from vpipe.data.own import OwnSamples, check_samples
from vpipe.data.pairs import read_pairs
from vpipe.data.samples import (
    MaskedText,
    Synthetic,
    causal_text,
    encode_documents,
    masked_text,
    translation_pairs,
)
from vpipe.data.shards import has_shards, read_shards
from vpipe.data.text import read_documents
from vpipe.data.tokenizer import build_tokenizer, read_tokenizer, special_id

__all__ = [
    "Batch",
    "Batches",
    "Dataset",
    "MaskedText",
    "OwnSamples",
    "Sampler",
    "Subset",
    "Synthetic",
    "build_tokenizer",
    "causal_text",
    "check_samples",
    "encode_documents",
    "has_shards",
    "masked_text",
    "read_documents",
    "read_pairs",
    "read_shards",
    "read_tokenizer",
    "special_id",
    "split",
    "translation_pairs",
]
