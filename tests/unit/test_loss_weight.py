"""Minibatches that count by their targets: an update equals the plain model's over the whole batch."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vpipe
from tests.zoo import ZOO
from vpipe import Pipeline
from vpipe.errors import VPipeError
from vpipe.graph import capture, target_count
from vpipe.pipeline.threads import run_ranks

pytestmark = pytest.mark.usefixtures("capture_once")
MINIBATCHES = 4


def ragged(seed: int, vocabulary: int = 60, samples: int = 2, length: int = 12) -> dict[str, Tensor]:
    """Labels of which a different share is ignored in each minibatch."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (samples, length), generator=random)
    ignored = torch.rand(ids.shape, generator=random) < 0.2 + 0.2 * (seed % 4)
    ignored[0, 5] = False
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(ignored, -100),
    }


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


def trained(model: nn.Module, batches: list[Any], ranks: int = 2, **options: Any) -> Any:
    """The loss of one update, the weights after it, and the loss of an evaluation."""

    def work(world: Any) -> Any:
        with Pipeline(
            model, batches[0], optimizer=sgd, world=world, minibatches=len(batches), **options
        ) as pipe:
            ((_, loss),) = pipe.train(batches)
            return loss, pipe.full_state_dict(), pipe.evaluate(batches)

    return run_ranks(ranks, work)[0]


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.long) for name in ("bert", "llama", "t5"))]
)
def test_an_update_is_that_of_the_whole_batch(name: str) -> None:
    model, _ = ZOO[name].build()
    model = model.double().eval()
    for module in model.modules():
        for name in ("p", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    batches = [ragged(seed) for seed in range(MINIBATCHES)]
    plain = copy.deepcopy(model).train()
    whole = {field: torch.cat([batch[field] for batch in batches]) for field in batches[0]}
    loss = plain(**whole).loss
    loss.backward()
    sgd(plain.parameters()).step()
    ours, weights, evaluated = trained(model, batches, loss_weight="tokens")
    assert ours == pytest.approx(loss.item(), rel=1e-6)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-8)
    with torch.no_grad():
        assert evaluated == pytest.approx(float(plain.eval()(**whole).loss), rel=1e-6)
    assert abs(trained(model, batches, loss_weight="samples")[0] - loss.item()) > 1e-4


class Own(nn.Module):
    """Fields with names of their own; the loss is computed outside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20)

    def forward(self, words: Tensor) -> Tensor:
        hidden: Tensor = self.head(torch.relu(self.inner(self.embed(words))))
        return hidden


def skipping(output: Tensor, targets: Tensor) -> Tensor:
    """Ignores 7, and every second target."""
    return nn.functional.cross_entropy(output[:, ::2].transpose(1, 2), targets[:, ::2], ignore_index=7)


def summed(output: Tensor, targets: Tensor) -> Tensor:
    each = nn.functional.cross_entropy(output.transpose(1, 2), targets, reduction="none")
    return each.mean()


def test_the_targets_of_a_loss_of_ones_own() -> None:
    batches = [
        {"words": torch.randint(20, (3, 8)), "targets": torch.randint(5 + seed, 9, (3, 8))}
        for seed in range(4)
    ]
    model = Own().double()
    count = target_count(capture(model, batches[0], skipping))
    assert count is not None
    for batch in batches:
        assert count(batch) == sum(int(target != 7) for row in batch["targets"] for target in row[::2])
    whole = {field: torch.cat([batch[field] for batch in batches]) for field in batches[0]}
    expected = skipping(model(whole["words"]), whole["targets"]).item()
    assert trained(model, batches, loss_fn=skipping, loss_weight="tokens")[0] == pytest.approx(
        expected, rel=1e-10
    )


def test_targets_of_a_model_on_meta() -> None:
    """The graph moves labels to the device of the model, which has no values there."""
    model, _ = ZOO["gpt2"].build()
    count = target_count(capture(model.to("meta"), ragged(0)))
    assert count is not None
    for seed in range(3):
        assert count(ragged(seed)) == int((ragged(seed)["labels"][:, 1:] != -100).sum())


def test_losses_whose_targets_cannot_be_counted() -> None:
    batch = {"words": torch.randint(20, (3, 8)), "targets": torch.randint(20, (3, 8))}
    model = Own()
    with pytest.raises(
        VPipeError, match=r"loss_weight is 'tokens', but the loss is not one mean .*: give a function"
    ):
        trained(model, [batch], loss_fn=summed, loss_weight="tokens")
    with pytest.raises(
        VPipeError, match=r"loss_weight is 'token': did you mean 'tokens'\?.*or give a function"
    ):
        trained(model, [batch], loss_fn=summed, loss_weight="token")
    by_hand = trained(
        model, [batch], loss_fn=summed, loss_weight=lambda fields: float(fields["targets"].numel())
    )
    assert by_hand[0] == pytest.approx(trained(model, [batch], loss_fn=summed, loss_weight="auto")[0])
    empty = ragged(0) | {"labels": torch.full((2, 12), -100)}
    with pytest.raises(VPipeError, match="a minibatch has no target token, so its loss is not a number"):
        trained(ZOO["bert"].build()[0], [ragged(0), empty], loss_weight="tokens")


@pytest.mark.long
def test_verify_weighs_alike() -> None:
    model, _ = ZOO["gpt2"].build()
    result = vpipe.verify(model, ragged, loss_weight="tokens", schedule="gpipe", minibatches=4, updates=2)
    assert result.ok
