"""Built stages: randomness, recomputation, split backward, evaluation, meta models."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from tests import by_hand, models
from vpipe.errors import CaptureError
from vpipe.graph import ModelGraph, capture, tied
from vpipe.graph.materialise import materialise
from vpipe.stage import RandomContext, StageModule

WITH_DROPOUT: dict[str, Any] = {
    "bert": lambda: models.bert(1, dropout=0.3),
    "gpt2": lambda: models.gpt2(1, dropout=0.3),
    "lstm": lambda: models.lstm(2, dropout=0.3),
    "sequential": lambda: models.sequential(4, dropout=0.3),
    "unet_norm": models.unet_norm,
    "untraceable": models.untraceable,
}


@cache
def captured(name: str) -> tuple[nn.Module, Any, ModelGraph]:
    model, batch, loss_fn = WITH_DROPOUT[name]()
    return model, batch, capture(model, batch, loss_fn)


def run(name: str, partition: Any, **options: Any) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    model, batch, graph = captured(name)
    modules = by_hand.build(graph, model, partition, **options)
    loss, gradients = by_hand.run(graph, modules, batch, minibatch=3)
    buffers = {key: value for module in modules for key, value in module.buffers_by_name.items()}
    return loss, gradients, buffers


def assert_equal(got: Any, expected: Any, but: tuple[str, ...] = ()) -> None:
    """Equal to the bit, but for the parameters whose gradient is a sum in another order."""
    assert torch.equal(got[0], expected[0])
    for ours, theirs in zip(got[1:], expected[1:], strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours:
            if key in but:
                torch.testing.assert_close(ours[key], theirs[key])
            else:
                assert torch.equal(ours[key], theirs[key]), key


def shared_parameters(name: str) -> tuple[str, ...]:
    _, _, graph = captured(name)
    return tuple(tied(graph.stages([1] * len(graph.blocks))))


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_any_partition_draws_the_same_masks(name: str) -> None:
    blocks = len(captured(name)[2].blocks)
    whole = run(name, [blocks])
    assert_equal(run(name, [1] * blocks), whole, shared_parameters(name))
    assert_equal(run(name, [blocks - 2, 1, 1]), whole, shared_parameters(name))


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_recomputing_changes_nothing(name: str) -> None:
    blocks = len(captured(name)[2].blocks)
    partition = [2, blocks - 2]
    kept = run(name, partition)
    assert_equal(
        run(name, partition, policies=dict.fromkeys(range(blocks), "recompute")),
        kept,
        shared_parameters(name),
    )
    assert_equal(
        run(name, partition, policies=dict.fromkeys([1, blocks - 1], "recompute")),
        kept,
        shared_parameters(name),
    )


@pytest.mark.parametrize("name", WITH_DROPOUT)
@pytest.mark.parametrize("recompute", [(), (1, 2)])
def test_split_backward_gives_the_same_gradients(name: str, recompute: tuple[int, ...]) -> None:
    blocks = len(captured(name)[2].blocks)
    partition = [2, blocks - 2]
    loss, gradients, _ = run(name, partition, split=True, policies=dict.fromkeys(recompute, "recompute"))
    expected, expected_gradients, _ = run(name, partition)
    torch.testing.assert_close(loss, expected)
    assert gradients.keys() == expected_gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[key], msg=key)


def test_split_backward_postpones_the_weights_of_all_products() -> None:
    model, batch, graph = captured("gpt2")
    stage = graph.stages([len(graph.blocks)])[0]
    module = StageModule(stage, model, split=True)
    context = RandomContext()
    module({}, graph.batch_fields(batch), context)["loss"].backward()
    waiting = {name for name, p in module.parameters_by_name.items() if p.grad is None}
    products = {n for n, _ in model.named_parameters() if ".c_" in n}
    assert waiting == products  # the tied head's gradient joins the embedding's, which is there at once
    assert len(context.deferred) == len(products) // 2 + 1
    for work in context.deferred:
        work()
    assert all(p.grad is not None for p in module.parameters())


def test_minibatches_differ_and_runs_repeat() -> None:
    model, batch, graph = captured("bert")
    modules = by_hand.build(graph, model, [len(graph.blocks)])
    losses = [by_hand.run(graph, modules, batch, minibatch)[0] for minibatch in (0, 1, 0)]
    assert losses[0] != losses[1]
    assert losses[0] == losses[2]


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_evaluation_is_the_model_in_eval_mode(name: str) -> None:
    model, batch, loss_fn = WITH_DROPOUT[name]()
    graph = captured(name)[2]
    partition = graph.balanced_partition(2)
    modules = by_hand.build(graph, model, partition)
    by_hand.run(graph, modules, batch)  # moves the running statistics
    evaluating = [
        StageModule(stage, m, training=False)
        for stage, m in zip(graph.stages(partition), modules, strict=True)
    ]
    before = [buffer.clone() for m in modules for buffer in m.buffers()]
    for ours, theirs in zip(modules, evaluating, strict=True):
        assert all(a is b for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    loss, _ = by_hand.run(graph, evaluating, batch)
    for buffer, old in zip([b for m in modules for b in m.buffers()], before, strict=True):
        assert torch.equal(buffer, old)
    state = {key: value for m in modules for key, value in m.state_dict().items()}
    model.load_state_dict(state, strict=False)
    model.eval()
    with torch.no_grad():
        if loss_fn is None:
            expected = model(**batch).loss
        else:
            inputs, target = batch.values() if isinstance(batch, dict) else batch
            expected = loss_fn(model(inputs), target)
    torch.testing.assert_close(loss, expected)


def test_a_stage_holds_copies_under_the_models_own_names() -> None:
    model, _, graph = captured("bert")
    for stage in graph.stages(graph.balanced_partition(3)):
        module = StageModule(stage, model)
        assert tuple(module.parameters_by_name) == stage.parameters
        assert set(module.state_dict()) == set(stage.parameters) | set(stage.buffers)
        for name, parameter in module.parameters_by_name.items():
            original = model.get_parameter(name)
            assert torch.equal(parameter, original)
            assert parameter.data_ptr() != original.data_ptr()


def test_parameters_may_be_pointed_at_other_weights_between_actions() -> None:
    model, batch, graph = captured("sequential")
    module = StageModule(graph.stages([len(graph.blocks)])[0], model, split=True)
    context = RandomContext(seed=7)
    old = {name: p.data for name, p in module.parameters_by_name.items()}
    loss = module({}, graph.batch_fields(batch), context)["loss"]
    for parameter in module.parameters():
        parameter.data = torch.zeros_like(parameter)
    for name, parameter in module.parameters_by_name.items():
        parameter.data = old[name]
    loss.backward()
    for parameter in module.parameters():
        parameter.data = torch.full_like(parameter, float("nan"))
    for work in context.deferred:
        work()
    expected = by_hand.run(graph, by_hand.build(graph, model, [len(graph.blocks)]), batch)[1]
    for name, parameter in module.parameters_by_name.items():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)


META = {
    "bert": (hf.BertForMaskedLM, lambda: models.bert(1)),
    "gpt2": (hf.GPT2LMHeadModel, lambda: models.gpt2(1)),
    "llama": (hf.LlamaForCausalLM, lambda: models.llama(1)),
    "t5": (hf.T5ForConditionalGeneration, lambda: models.t5(1)),
    "vit": (hf.ViTForImageClassification, lambda: models.vit(1)),
}


@pytest.mark.parametrize(
    "name",
    ["bert", "t5", *(pytest.param(name, marks=pytest.mark.long) for name in ("gpt2", "llama", "vit"))],
)
def test_a_model_on_meta_is_materialised_stage_by_stage(name: str) -> None:
    cls, make = META[name]
    model, batch, _ = make()
    config = model.config
    with torch.device("meta"):
        empty = cls(config)
    graph = capture(empty, batch)
    losses = []
    for stages in (1, 3):
        modules = by_hand.build(graph, empty, graph.balanced_partition(stages), seed=5)
        losses.append(by_hand.run(graph, modules, batch)[0])
    assert torch.equal(*losses)
    assert torch.isfinite(losses[0])
    assert all(p.is_meta for p in empty.parameters())
    filled = by_hand.build(graph, model, graph.balanced_partition(2))
    torch.testing.assert_close(by_hand.run(graph, filled, batch)[0], model(**batch).loss.detach())
    reference = dict(model.named_parameters())
    for parameter in modules[1].parameters_by_name.items():
        own, other = parameter[1].std(), reference[parameter[0]].std()
        assert torch.isclose(own, other, rtol=0.3, atol=0.01), parameter[0]  # drawn by the same rule


def test_weights_for_a_device_are_those_of_the_host() -> None:
    """They are drawn in one piece of memory after the other, and each has its own in the end."""
    cls, make = META["gpt2"]
    model, _, _ = make()
    with torch.device("meta"):
        empty = cls(model.config)
    names = [name for name, _ in (*empty.named_parameters(), *empty.named_buffers())]
    on_host = materialise(empty, names, 5)
    on_device = materialise(empty, names, 5, torch.device("cpu", 0))
    assert list(on_device) == list(on_host) == names
    for name in names:
        assert torch.equal(on_device[name], on_host[name]), name
    places = {tensor.untyped_storage().data_ptr() for tensor in on_device.values()}
    assert len(places) == len(names)


def test_half_precision_takes_float_fields_along() -> None:
    model, batch, _ = models.vit(layers=1)
    graph = capture(model.bfloat16(), batch)
    modules = by_hand.build(graph, model, graph.balanced_partition(2))
    loss, gradients = by_hand.run(graph, modules, batch)
    assert loss.dtype is torch.bfloat16
    assert all(gradient.dtype is torch.bfloat16 for gradient in gradients.values())


def test_a_plain_model_on_meta_uses_reset_parameters() -> None:
    _, batch, loss_fn = models.unet_norm()
    with torch.device("meta"):
        model = models.UNet(norm=True)
    graph = capture(model, batch, loss_fn)
    modules = by_hand.build(graph, model, graph.balanced_partition(4))
    assert torch.isfinite(by_hand.run(graph, modules, batch)[0])


def test_an_untraceable_model_on_meta() -> None:
    model, batch, loss_fn = models.untraceable()
    graph = capture(model.to("meta"), batch, loss_fn)
    modules = by_hand.build(graph, model, graph.balanced_partition(2))
    assert torch.isfinite(by_hand.run(graph, modules, batch)[0])


def test_what_cannot_be_materialised_is_named() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(12))

        def forward(self, value: Tensor) -> Tensor:
            return value * self.factor

    model = nn.Sequential(nn.Linear(12, 12), Scale(), nn.Linear(12, 1)).to("meta")
    graph = capture(model, (torch.randn(4, 12), torch.randn(4, 1)), nn.functional.mse_loss)
    with pytest.raises(CaptureError, match=r"'1.factor'.*Scale.*reset_parameters"):
        by_hand.build(graph, model, [len(graph.blocks)])


def test_constants_in_the_code_of_a_model_on_meta_keep_their_values() -> None:
    """A Falcon takes its keys by `[..., [-2], :]`; the number in that list had been lost on meta."""

    class Picking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            made = self.linear(x).clone()
            scale = torch.tensor([[1.5, 2], [3, 4.0]], device=made.device)
            whole = torch.as_tensor([2, 1], device=made.device)
            factors = made.new_tensor([1, 7])
            made[:, [5]] = 0.5
            picked = made[..., [-2, 0]] @ scale * whole * factors
            return (picked + made[[1, 0], 1:3]).square().mean()

    model, batch = Picking(), torch.randn(2, 4)
    with torch.device("meta"):
        empty = Picking()
    graph = capture(empty, batch)
    filled = by_hand.build(graph, model, [len(graph.blocks)])
    torch.testing.assert_close(by_hand.run(graph, filled, batch)[0], model(batch).detach())


def test_a_constant_on_meta_that_has_no_values_is_named() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)
            self.factor = torch.ones(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x * self.factor).mean()

    with torch.device("meta"):
        model = Scaled()
    with pytest.raises(CaptureError, match=r"cannot capture Scaled .*'factor' has no values .*buffer"):
        capture(model, torch.randn(2, 4))
