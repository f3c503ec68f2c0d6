"""Swapping on a GPU: copies run beside computing, and what comes back is what left."""

from collections import deque

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from vpipe.stage.held import HeldSaver, address
from vpipe.stage.host_store import LEAST, HostStore, PinnedStore, make_store
from vpipe.stage.swap import Swap

GPU = torch.device("cuda:0")
WIDTH, ROWS = 512, 256


def compute(given: Tensor, layers: list[nn.Parameter]) -> Tensor:
    hidden = given
    for layer in layers:
        hidden = gelu(hidden @ layer)
    return hidden.square().sum()


def gradients(minibatches: list[Tensor], layers: list[nn.Parameter], store: HostStore | None) -> list[Tensor]:
    """Of all minibatches, three of which are between forward and backward at a time; swapped, if there is a store."""
    found = []
    flying: deque[tuple[Tensor, Tensor, Swap | None]] = deque()

    def backward() -> None:
        given, loss, _ = flying.popleft()
        for _, _, swap in list(flying)[:1]:
            if swap is not None:
                swap.fetch()
        loss.backward()
        found.extend([given.grad, *(layer.grad for layer in layers)])
        for layer in layers:
            layer.grad = None

    for minibatch in minibatches:
        given = minibatch.clone().requires_grad_()
        swap = None
        if store is None:
            loss = compute(given, layers)
        else:
            store.settle()
            swap = Swap(store)
            with swap.saving(HeldSaver(None, {address(layer) for layer in layers}), {address(given)}):
                loss = compute(given, layers)
            swap.leave()
        flying.append((given, loss, swap))
        if len(flying) == 3:
            backward()
    while flying:
        backward()
    return found


def test_what_comes_back_is_what_left() -> None:
    generator = torch.Generator(GPU).manual_seed(0)
    layers = [
        nn.Parameter(torch.randn(WIDTH, WIDTH, device=GPU, generator=generator) / WIDTH**0.5)
        for _ in range(12)  # more storages than come back in one go
    ]
    minibatches = [torch.randn(ROWS, WIDTH, device=GPU, generator=generator) for _ in range(9)]
    expected = gradients(minibatches, layers, None)
    store = make_store(GPU)
    assert isinstance(store, PinnedStore)
    for _ in range(2):  # the second time every buffer is used again
        found = gradients(minibatches, layers, store)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_a_swapped_minibatch_leaves_the_device_and_small_storages_stay() -> None:
    store = make_store(GPU)
    weight = nn.Parameter(torch.eye(WIDTH, device=GPU))
    before = torch.cuda.memory_allocated(GPU)
    large, small = torch.randn(ROWS, WIDTH, device=GPU), torch.randn(8, WIDTH, device=GPU)
    assert small.nbytes < LEAST <= large.nbytes
    sizes = large.nbytes, small.nbytes
    swap = Swap(store)
    with swap.saving(HeldSaver(None, {address(weight)}), set()):
        loss = (large @ weight).sum() + (small @ weight).sum()
    del large, small
    swap.leave()
    store.settle()
    held = torch.cuda.memory_allocated(GPU) - before
    assert sizes[1] <= held < sizes[0]
    swap.fetch()
    assert torch.cuda.memory_allocated(GPU) - before >= sum(sizes)
    loss.backward()
    assert weight.grad is not None
    assert torch.isfinite(weight.grad).all()
