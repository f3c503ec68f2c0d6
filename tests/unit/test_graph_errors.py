"""Users' mistakes in capture and in batches: one error that names the value, the place and the fix."""

from __future__ import annotations

import io
import logging
import traceback
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests import models
from vpipe.errors import BatchError, CaptureError
from vpipe.graph import ModelGraph, capture


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if x.sum() > 0:
            x = x * 2
        return x.mean()


def test_the_line_that_stops_a_capture_is_named() -> None:
    with pytest.raises(
        CaptureError, match=r"cannot capture Branching.*test_graph_errors.py:\d+.*if x.sum\(\) > 0"
    ):
        capture(Branching(), torch.randn(2, 4))


def test_the_error_stands_alone_and_torchs_own_is_in_the_log() -> None:
    """In a script of a user's own, Python prints the whole chain of an error."""
    logged, logger = io.StringIO(), logging.getLogger("vpipe.graph.capture")
    handler = logging.StreamHandler(logged)
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        with pytest.raises(CaptureError) as caught:
            capture(Branching(), torch.randn(2, 4))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert "torch/export" not in "".join(traceback.format_exception(caught.value))
    assert "\n" not in str(caught.value)
    assert "torch/export" in logged.getvalue()


def test_nothing_is_printed_when_a_capture_fails(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError):
        capture(Branching(), torch.randn(2, 4))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("wrap", [nn.Sequential, nn.Identity])
def test_a_batch_that_the_model_cannot_take_is_said_so(wrap: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)) if wrap is nn.Sequential else nn.Linear(4, 3)
    with pytest.raises(
        CaptureError, match=r"cannot capture .*RuntimeError.*run the model once on the example"
    ):
        capture(model, torch.randn(2, 5), lambda output: output.sum())


def test_one_sample_fixes_the_number_of_samples() -> None:
    graph = capture(nn.Linear(4, 3), torch.randn(1, 4), lambda output: output.sum())
    with pytest.raises(
        BatchError, match=r"size 2 in dimension 0, expected 1 .*capture with a larger example"
    ):
        graph.batch_fields(torch.randn(2, 4))


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (None, r"the output of Linear holds no loss \(a tensor of shape \[2, 3\]\); give capture a loss_fn"),
        (lambda output: output, r"loss_fn returned a tensor of shape \[2, 3\], expected a scalar tensor"),
        (lambda output: 1.0, r"loss_fn returned 1.0, expected a scalar tensor"),
    ],
)
def test_a_missing_loss_is_asked_for(loss_fn: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(nn.Linear(4, 3), torch.randn(2, 4), loss_fn)


def test_a_language_model_without_labels_has_no_loss() -> None:
    model, batch, _ = models.bert(1)
    del batch["labels"]
    with pytest.raises(CaptureError, match=r"BertForMaskedLM holds no loss.*labels"):
        capture(model, batch)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(CaptureError, match="ReLU has no parameters"):
        capture(nn.ReLU(), torch.randn(2, 4), lambda output: output.sum())


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (3, "example batch is a int"),
        ({"input": 1}, "no tensor among its fields"),
        ({"x": torch.ones(2, 4)}, r"\['x'\] are not parameters of Linear.forward"),
        ({"input": {1, 2}}, "'input' is a set; .* or a dict, list or tuple of these"),
        ((torch.ones(2, 4), torch.ones(2)), "batch has 2 fields but Linear.forward takes 1"),
    ],
)
def test_an_example_batch_that_does_not_fit_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        capture(nn.Linear(4, 3), batch)


@cache
def bert() -> ModelGraph:
    model, batch, _ = models.bert(1)
    return capture(model, batch | {"output_attentions": False})


def changed(**changes: Any) -> dict[str, Any]:
    return models.language_batch() | {"output_attentions": False} | changes


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.ones(2), r"batch is a Tensor; the model was captured with the fields \['input_ids'"),
        ({"input_ids": torch.ones(2)}, r"missing: \['attention_mask', 'labels', 'output_attentions'\]"),
        (changed(extra=1), r"unknown: \['extra'\]"),
        (changed(labels=3), "'labels' is a int, expected a tensor"),
        (
            changed(labels=torch.ones(4, 8)),
            r"'labels' has dtype float32, expected int64; convert it with .to\(torch.int64",
        ),
        (changed(labels=torch.ones(4).long()), r"'labels' has shape \[4\], expected 2 dimensions"),
        (changed(input_ids=models.token_ids(4, 9)), r"'\w+' has size \d in dimension 1, expected \d"),
        (changed(input_ids=models.token_ids(3, 8)), r"number of samples \(dimension 0\): {'input_ids': 3"),
        (
            models.language_batch(4, 80) | {"output_attentions": False},
            "size 80 in dimension 1, expected 1 to 64",
        ),
        (
            changed(output_attentions=True),
            "'output_attentions' is True, but the model was captured with False",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        bert().batch_fields(batch)


def test_sequences_are_checked_by_length_and_named_after_parameters() -> None:
    model, batch, loss_fn = models.sequential()
    graph = capture(model, batch, loss_fn)
    assert graph.fields == ("input", "target")
    with pytest.raises(BatchError, match="batch has 1 fields, expected 2"):
        graph.batch_fields(batch[:1])
    with pytest.raises(BatchError, match="'input' has size 11 in dimension 1, expected 12"):
        graph.batch_fields((torch.randn(4, 11), batch[1]))


def test_fields_beyond_forward_go_to_the_loss_in_order() -> None:
    def loss_fn(output: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return (functional.mse_loss(output, target, reduction="none") * weight).mean()

    batch = {"input": torch.randn(3, 4), "w": torch.tensor([[0.0]]).expand(3, 1), "t": torch.randn(3, 2)}
    graph = capture(nn.Linear(4, 2), batch, loss_fn)
    assert graph.fields == ("input", "w", "t")


def test_the_model_is_left_as_it_was() -> None:
    model, batch, _ = models.bert(1)
    model.eval()
    model.bert.embeddings.train()
    before = {name: module.training for name, module in model.named_modules()}
    capture(model, batch)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert all(parameter.grad is None for parameter in model.parameters())
