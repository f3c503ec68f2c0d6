"""Keep, recompute and swap: the same numbers to the last bit, and as much less memory as the policy says."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import models
from tests.examples import example, varied
from vpipe import Pipeline
from vpipe.cost import DeviceCost, LinkCost, Profile
from vpipe.errors import PartitionError
from vpipe.graph import ModelGraph
from vpipe.pipeline.threads import run_ranks
from vpipe.profile.model import MeasuredModel
from vpipe.stage.held import Held, HeldSaver, address
from vpipe.stage.host_store import HostStore, Ticket
from vpipe.stage.swap import Swap

Results = list[tuple[list[float], dict[str, Tensor] | None, int]]


def adamw(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3, weight_decay=0.1)


def train(given: models.Example, ranks: int, batches: Sequence[Any], **options: Any) -> Results:
    """Of each rank its losses, the weights (on rank 0), and the most bytes that autograd held."""
    model, batch, loss_fn = given

    def work(world: Any) -> tuple[list[float], dict[str, Tensor] | None, int]:
        with Pipeline(model, batch, optimizer=adamw, loss_fn=loss_fn, world=world, **options) as pipe:
            held = pipe.runtime.count_held()
            losses = [loss for _, loss in pipe.train(batches)]
            assert held.now == 0, "something is still held though no minibatch is under way"
            return losses, pipe.full_state_dict(), held.peak

    return run_ranks(ranks, work)


def assert_equal(got: Results, expected: Results) -> None:
    for (losses, _, _), (before, _, _) in zip(got, expected, strict=True):
        assert losses == before
    weights, reference = got[0][1], expected[0][1]
    assert weights is not None
    assert reference is not None
    assert weights.keys() == reference.keys()
    for name, tensor in reference.items():
        assert torch.equal(weights[name], tensor), name


def policies_of(pattern: Sequence[str], blocks: int) -> tuple[str, ...]:
    return tuple(pattern[block % len(pattern)] for block in range(blocks))


PATTERNS = [["swap"], ["recompute"], ["swap", "keep", "recompute"], ["keep", "swap", "swap"]]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "pipedream"])
def test_numbers_do_not_change(
    schedule: str, captured: Callable[..., ModelGraph], capture_once: None
) -> None:
    """With dropout, tied weights, stale weight versions and split backward."""
    given = example("bert", torch.float32, layers=2, dropout=0.1)
    blocks = len(captured(*given).blocks)
    batches = varied(given[1], 8)
    options: dict[str, Any] = {"schedule": schedule}
    if schedule != "pipedream":
        options["minibatches"] = 4
    expected = train(given, 2, batches, **options)
    for pattern in PATTERNS:
        assert_equal(train(given, 2, batches, policies=policies_of(pattern, blocks), **options), expected)


def test_bfloat16(capture_once: None) -> None:
    given = example("gpt2", torch.float32, layers=1, dropout=0.1)
    batches = varied(given[1], 8)
    options: dict[str, Any] = {"schedule": "gpipe", "minibatches": 4, "precision": "bf16"}
    expected = train(given, 1, batches, **options)
    policies = ("swap", "recompute", "swap")  # attention, feed-forward, head
    assert_equal(train(given, 1, batches, policies=policies, **options), expected)


DEVICE, LINK = DeviceCost(2**34, 1e10, 1e10), LinkCost(1e10, 1e-5)
LAYERS, WIDTH, SAMPLES, LENGTH = 4, 64, 4, 16


@pytest.fixture(scope="module")
def transformer(captured: Callable[..., ModelGraph]) -> tuple[models.Example, Profile]:
    """Large enough that activations outweigh masks and ids."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(models.VOCABULARY, WIDTH)
            self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, models.VOCABULARY)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.encoder(self.embedding(ids)))

    batch = [models.token_ids(SAMPLES, LENGTH), models.token_ids(SAMPLES, LENGTH, seed=2)]
    given = (Stack(), batch, models.next_token_loss)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vpipe.pipeline.captured.capture", captured)
        profile = MeasuredModel(*given, optimizer=adamw).measure(0, DEVICE, LINK)
    return given, profile


def predicted(profile: Profile, blocks: range, policies: Sequence[str], in_flight: int) -> int:
    """The peak of a stage: all minibatches in flight, or the moment when a block is recomputed for the oldest.

    Of what is swapped one minibatch is in use and one on its way. When a block is recomputed, those behind it
    are done with, and its input is there already.
    """
    costs = profile.blocks
    entered = [costs[block - 1].boundary_bytes if block else 0 for block in blocks]
    held = [
        {"keep": cost.kept_bytes, "swap": cost.kept_bytes, "recompute": before}[policies[block]]
        for block, cost, before in zip(blocks, costs[blocks.start : blocks.stop], entered, strict=True)
    ]
    away = max(0, in_flight - 2) * sum(costs[b].kept_bytes for b in blocks if policies[b] == "swap")
    again = [
        costs[block].kept_bytes - before - sum(held[place + 1 :])
        for place, (block, before) in enumerate(zip(blocks, entered, strict=True))
        if policies[block] == "recompute"
    ]
    return in_flight * sum(held) - away + max([0, *again])


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 2), ("1f1b", 3), ("pipedream", 3), ("gpipe", 2)])
@pytest.mark.parametrize("pattern", [["keep"], ["recompute"], ["swap"], ["keep", "recompute", "swap"]])
def test_the_peak_is_what_the_policies_say(
    transformer: tuple[models.Example, Profile],
    schedule: str,
    ranks: int,
    pattern: list[str],
    capture_once: None,
) -> None:
    given, profile = transformer
    blocks = len(profile.blocks)
    policies = policies_of(pattern, blocks)
    partition = [blocks // ranks] * ranks
    partition[-1] += blocks % ranks
    options: dict[str, Any] = {} if schedule == "pipedream" else {"minibatches": 4}
    options |= {"schedule": schedule, "partition": partition, "policies": policies}
    got = train(given, ranks, varied(given[1], 8), **options)
    for rank, end in enumerate(accumulate(partition)):
        own = range(end - partition[rank], end)
        in_flight = 4 if schedule == "gpipe" else ranks - rank
        expected = predicted(profile, own, policies, in_flight)
        assert got[rank][2] == pytest.approx(expected, rel=0.05), f"rank {rank}"


def test_split_backward_is_counted_until_its_weight_gradients(
    transformer: tuple[models.Example, Profile], capture_once: None
) -> None:
    """Weight gradients that wait hold inputs and gradients: no more than all that was kept."""
    given, profile = transformer
    blocks = len(profile.blocks)
    first = blocks // 2 + 1
    own = profile.blocks[:first], profile.blocks[first:]
    kept = [sum(cost.kept_bytes for cost in costs) for costs in own]
    options: dict[str, Any] = {"schedule": "zb-h1", "minibatches": 6, "partition": (first, blocks - first)}
    for policy in ("keep", "swap"):
        got = train(given, 2, varied(given[1], 12), policies=(policy,) * blocks, **options)
        for rank in (0, 1):
            assert kept[rank] < got[rank][2] <= 1.05 * 3 * kept[rank]


def test_a_storage_is_moved_once_and_comes_back_as_it_was() -> None:
    """Views of one storage share its copy; parameters and the stage's inputs stay where they are."""
    held, store = Held(), CountingStore()
    weight = nn.Parameter(torch.randn(4, 4))
    given = torch.randn(8, 4, requires_grad=True)
    swap = Swap(store)
    saver = HeldSaver(held, {address(weight)})
    with swap.saving(saver, {address(given)}):
        made = given @ weight
        left, right = made.t().chunk(2, dim=1)
        loss = (left * right).sum() + (made * made).sum()
    assert held.now == given.nbytes + made.nbytes
    made_bytes = made.nbytes
    del made, left, right
    swap.leave()
    assert store.moved == [made_bytes]
    assert held.now == given.nbytes
    swap.fetch()
    assert held.now == given.nbytes + made_bytes
    loss.backward()
    del loss
    assert held.now == 0
    assert held.peak == given.nbytes + made_bytes
    gradients = given.grad, weight.grad
    given.grad = weight.grad = None
    made = given @ weight
    left, right = made.t().chunk(2, dim=1)
    ((left * right).sum() + (made * made).sum()).backward()
    assert torch.equal(gradients[0], given.grad)
    assert torch.equal(gradients[1], weight.grad)


class CountingStore(HostStore):
    """A store that tells what was moved."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[int] = []

    def put(self, tensors: Sequence[Tensor]) -> list[Ticket]:
        self.moved += [tensor.nbytes for tensor in tensors]
        return super().put(tensors)


def test_host_buffers_are_used_again() -> None:
    store = HostStore()
    [first] = store.put([torch.arange(8, dtype=torch.uint8)])
    assert torch.equal(store.take(first), torch.arange(8, dtype=torch.uint8))
    [second] = store.put([torch.zeros(8, dtype=torch.uint8)])
    assert second.buffer.data_ptr() == first.buffer.data_ptr()


def test_mistakes_are_named(capture_once: None, captured: Callable[..., ModelGraph]) -> None:
    given = example("bert", torch.float32, layers=2, dropout=0.1)
    blocks = len(captured(*given).blocks)
    for policies, options, message in [
        (("keep",) * 3, {}, f"policies has 3 entries, the model has {blocks} blocks"),
        (
            ("keep",) * (blocks - 1) + ("drop",),
            {},
            f"policy of block {blocks - 1} is 'drop': choose from keep",
        ),
        (("keep",) * blocks, {"recompute_ratio": 0.5}, "recompute_ratio is 0.5 and policies are given"),
    ]:
        with pytest.raises(PartitionError, match=message):
            train(given, 2, [], policies=policies, **options)
