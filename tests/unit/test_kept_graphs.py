"""Exported graphs that are kept: they are those that would be exported again, or they are not used."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from tests import by_hand
from tests.examples import example
from vpipe.graph import capture
from vpipe.graph.batch import BatchLayout
from vpipe.graph.histogram import histc
from vpipe.graph.kept import GRAPHS, find_graph, graph_key
from vpipe.graph.loss import LossModule


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VPIPE_CACHE", str(tmp_path))
    return tmp_path / GRAPHS


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A name for each export."""
    done: list[str] = []
    export = torch.export.export

    def counted(*arguments: Any, **options: Any) -> Any:
        done.append(type(arguments[0]).__name__)
        return export(*arguments, **options)

    monkeypatch.setattr(torch.export, "export", counted)
    return done


# Embeddings and masks; bodies of autocast and no_grad around rotary embeddings; experts; a nested form of the output.
@pytest.mark.parametrize(
    "name",
    [
        "mixtral",
        pytest.param("bert", marks=pytest.mark.long),
        pytest.param("t5", marks=pytest.mark.long),
        pytest.param("vit", marks=pytest.mark.long),
    ],
)
def test_a_graph_is_exported_once(name: str, folder: Path, exports: list[str]) -> None:
    model, batch, loss_fn = example(name)
    # As in two processes: some models change themselves when they are first called.
    first, second = (capture(each, batch, loss_fn, keep=True) for each in (deepcopy(model), deepcopy(model)))
    assert len(exports) == 1
    assert len(list(folder.iterdir())) == 1
    assert (first.fingerprint, first.plan_fingerprint) == (second.fingerprint, second.plan_fingerprint)
    assert [str(block.weight) for block in first.blocks] == [str(block.weight) for block in second.blocks]
    assert first.trace.output is not None
    assert second.trace.output is not None
    assert list(map(str, first.trace.output.values)) == list(map(str, second.trace.output.values))
    modules = by_hand.build(second, model, second.balanced_partition(2))
    by_hand.assert_same(by_hand.run(second, modules, batch), by_hand.run_eager(model, batch, loss_fn)[:2])
    fewer = {field: value[:1] for field, value in batch.items()}
    assert {name: tensor.shape for name, tensor in second.batch_fields(fewer).items()} == {
        name: tensor.shape for name, tensor in first.batch_fields(fewer).items()
    }


def tiny(**changes: Any) -> Any:
    config = hf.BertConfig(
        vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    for name, value in changes.items():
        setattr(config, name, value)
    return hf.BertForMaskedLM(config)


def key(model: nn.Module, loss_fn: Callable[..., Any] | None = None, **fields: torch.Tensor) -> str | None:
    ids = torch.zeros(2, 4, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids} | fields
    layout = BatchLayout(model, batch, loss_fn)
    return graph_key(LossModule(model, layout, loss_fn), batch)


def test_what_a_graph_depends_on_is_in_its_key() -> None:
    found = key(tiny())
    assert found is not None
    assert found == key(tiny())
    assert found == key(tiny(name_or_path="some/config.json"))  # wherever it was read from
    others = [
        tiny(hidden_act="relu"),
        tiny(hidden_dropout_prob=0.0),
        tiny().bfloat16(),
        tiny(),
        tiny(),
        tiny(),
    ]
    others[3].bert.embeddings.dropout.p = 0.5
    others[4].bert.embeddings.word_embeddings.weight.requires_grad_(False)
    others[5].set_attn_implementation("eager")
    keys = [key(other) for other in others]
    keys.append(key(tiny(), labels=torch.zeros(2, 4, dtype=torch.int32)))
    keys.append(key(tiny(), attention_mask=torch.ones(2, 4)))
    assert None not in keys
    assert len({found, *keys}) == 1 + len(keys)


def test_a_model_with_code_of_a_user_has_no_key() -> None:
    hooked, replaced, own, patched = tiny(), tiny(), tiny(), tiny()
    hooked.bert.register_forward_hook(lambda *_: None)
    replaced.bert.embeddings.forward = replaced.bert.embeddings.forward
    own.bert.embeddings.dropout = type("Own", (nn.Dropout,), {"__module__": "mine"})()
    patched.__class__ = type("Patched", (hf.BertForMaskedLM,), {"__module__": "mine"})
    for model in (hooked, replaced, own, patched):
        assert key(model) is None
    assert key(tiny(), lambda output: output.loss) is None


def test_a_damaged_file_is_exported_again(folder: Path, exports: list[str]) -> None:
    ids = torch.zeros(2, 4, dtype=torch.long)
    batch, model = {"input_ids": ids, "labels": ids}, tiny()
    whole = capture(model, batch, keep=True)
    (file,) = folder.iterdir()
    text = file.read_text()
    # No word of it names anything but an operation: not a module, not a function of Python.
    for damaged in (
        text[: len(text) // 2],
        text.replace('"aten.linear.default"', '"os.system"', 1),
        text.replace('"aten.linear.default"', '"attrgetter"', 1),
        text.replace('"target": "tensors_0"', '"target": "tensors_0=print(1)"', 1),
        text.replace('"target": "tensors_0"', '"target": "tensors_0.__class__"', 1),
    ):
        assert damaged != text
        file.write_text(damaged)
        assert find_graph(file.stem) is None
    assert capture(model, batch, keep=True).fingerprint == whole.fingerprint
    assert len(exports) == 2
    capture(model, batch, keep=True)
    assert len(exports) == 2


def test_a_histogram_of_whole_numbers_is_torchs() -> None:
    """On `meta` and on a CPU, which has one of other numbers only."""
    numbers = torch.tensor([0, 3, 3, 1, 2, 3, 7], dtype=torch.int32)
    found = histc(numbers, bins=4, min=0, max=3)
    assert found.dtype == torch.int32
    assert found.tolist() == torch.histc(numbers.float(), 4, 0, 3).tolist() == [1, 1, 1, 3]
    assert histc(numbers.to("meta"), 4, 0, 3).shape == (4,)
