"""Data: text and its tokenizer, samples of fixed length, and the order in which they are trained on."""

from vpipe.data.chat import Chat
from vpipe.data.dataset import Batch, Batches, Dataset, Sampler, Subset, split
from vpipe.data.kind import data_kind
from vpipe.data.own import OwnSamples, check_samples
from vpipe.data.pairs import read_pairs
from vpipe.data.records import Conversation, Document, read_records, read_saved
from vpipe.data.samples import CausalText, MaskedText, Synthetic, masked_text, translation_pairs
from vpipe.data.shards import has_shards, read_shards
from vpipe.data.text import data_error, list_files, read_documents
from vpipe.data.tokenizer import build_tokenizer, read_tokenizer, special_id
from vpipe.data.tokens import (
    FIRST,
    UNTRAINED,
    Documents,
    TokenFiles,
    TokenRows,
    encode_documents,
    trained_rows,
    windows,
)

__all__ = [
    "FIRST",
    "UNTRAINED",
    "Batch",
    "Batches",
    "CausalText",
    "Chat",
    "Conversation",
    "Dataset",
    "Document",
    "Documents",
    "MaskedText",
    "OwnSamples",
    "Sampler",
    "Subset",
    "Synthetic",
    "TokenFiles",
    "TokenRows",
    "build_tokenizer",
    "check_samples",
    "data_error",
    "data_kind",
    "encode_documents",
    "has_shards",
    "list_files",
    "masked_text",
    "read_documents",
    "read_pairs",
    "read_records",
    "read_saved",
    "read_shards",
    "read_tokenizer",
    "special_id",
    "split",
    "trained_rows",
    "translation_pairs",
    "windows",
]
