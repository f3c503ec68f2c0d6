"""The values that follow from others: the sizes of the model from its partition, the minibatches from the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vpipe.config.contradictions import MODEL_SIZES
from vpipe.errors import ConfigError
from vpipe.schedule import KINDS, read_table
from vpipe.system.files import read_text

if TYPE_CHECKING:
    from vpipe.config.keys import RunConfig

BERT_LARGE = {"hidden_size": 1024, "num_heads": 16, "vocab_size": 30522}
LARGE_LAYERS = (24, 48)
"""Layers of the guides' two models, which are as wide as BERT-large."""


def known_blocks(config: RunConfig) -> int | None:
    """The number of blocks: two for each layer of bert and cpm, and a head; None if the model must be captured."""
    if config.model is not None or config.model_type == "translation":
        return None
    return 2 * config.num_layers + 1


def model_sizes(config: RunConfig) -> dict[str, Any]:
    """The sizes that follow from the number of blocks in the partition, as far as the file does not give them."""
    blocks = sum(config.partition) if isinstance(config.partition, list) else 0
    given = config.model_fields_set
    if known_blocks(config) is None or "num_layers" in given or blocks < 3 or not blocks % 2:
        return {}
    layers = blocks // 2
    sizes = {} if layers == config.num_layers else {"num_layers": layers}
    if (
        config.model_type == "bert"
        and layers in LARGE_LAYERS
        and given.isdisjoint(set(MODEL_SIZES) - {"dropout"})
    ):
        sizes |= BERT_LARGE
    return sizes


def minibatches_of_update(config: RunConfig) -> dict[str, int]:
    """`batch_size`, `minibatches` and `update_interval`, as `global_batch_size` and those that are given make them."""
    whole = config.global_batch_size
    if whole is None:
        return {}
    kind = KINDS.get(config.chosen_schedule)
    if kind is None:
        count = read_table(read_text(config.path(config.chosen_schedule))).update_interval
        key, fixed = "schedule", True
    else:
        key = "minibatches" if kind.synchronous else "update_interval"
        fixed = getattr(config, key) is not None
        count = (
            getattr(config, key) or kind.default_minibatches(config.positions) or max(config.replicas or [1])
        )
    if not fixed and "batch_size" in config.model_fields_set:
        size, rest = config.batch_size, whole % config.batch_size
        count = whole // size
        what = f"batch_size {size}"
    else:
        size, rest = whole // count, whole % count
        what = f"the {count} minibatches of an update ({key})"
        if "batch_size" in config.model_fields_set and config.batch_size != size:
            raise ConfigError(
                f"{config.source}: global_batch_size is {whole}, but batch_size {config.batch_size} times {what} is "
                f"{config.batch_size * count}: leave one of them out"
            )
    if rest or not whole // size:
        raise ConfigError(
            f"{config.source}: global_batch_size is {whole}, which is not a multiple of {what}: make it one"
        )
    return {"batch_size": size} if kind is None else {"batch_size": size, key: count}
