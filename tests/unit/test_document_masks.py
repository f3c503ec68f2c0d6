"""Documents that share a sample and know nothing of each other: the pipeline's loss is that of each alone."""

from typing import Any

import pytest
import torch
import transformers as hf

from tests.zoo import ZOO
from vpipe import Pipeline
from vpipe.config import RunConfig
from vpipe.errors import ConfigError
from vpipe.pipeline.threads import run_ranks
from vpipe.train.datasets import DOCUMENT_MASKS, check_document_masks

NAMES = {
    getattr(hf, specimen.config).model_type: name
    for name, specimen in ZOO.items()
    if specimen.model.endswith(("ForCausalLM", "LMHeadModel"))
}
LENGTHS = ((5, 1, 6), (12,), (2, 3, 7))
"""Of the documents of each sample."""
SHORT = ("llama",)


def test_every_type_is_in_the_zoo() -> None:
    assert NAMES.keys() >= DOCUMENT_MASKS


@pytest.mark.parametrize(
    "model_type",
    [
        name if name in SHORT else pytest.param(name, marks=pytest.mark.long)
        for name in sorted(DOCUMENT_MASKS)
    ],
)
def test_attention_stays_within_a_document(model_type: str) -> None:
    model: Any
    model, _ = ZOO[NAMES[model_type]].build()
    model.eval()
    ids = torch.randint(3, 60, (3, 12), generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])
    batch = {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}

    def work(world: Any) -> float:
        with Pipeline(model, batch, world=world, optimizer=torch.optim.SGD, loss_weight="tokens") as pipe:
            return pipe.evaluate([batch])

    total, count = 0.0, 0
    with torch.no_grad():
        for row, lengths in zip(ids, LENGTHS, strict=True):
            for document in row.split(lengths):
                if len(document) > 1:
                    targets = len(document) - 1
                    logits = model(input_ids=document[None], use_cache=False).logits[0, :-1]
                    total += float(torch.nn.functional.cross_entropy(logits, document[1:])) * targets
                    count += targets
    assert run_ranks(2, work) == pytest.approx([total / count] * 2, rel=1e-5)


def test_models_that_cross_documents_are_refused() -> None:
    config = RunConfig(documents="masked")
    with pytest.raises(ConfigError, match=r"a model of the type 'opt' does not keep its attention .* gpt2, "):
        check_document_masks(config, hf.OPTConfig())
    with pytest.raises(ConfigError, match="build it with use_cache=False"):
        check_document_masks(config, hf.GPT2Config())
