"""What language models run on a GPU: the kernels of their attention, and a head that never has all logits."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.unit.test_attention import MODELS, batch_for
from tests.unit.test_head_loss import Own, own_batch, sgd
from vpipe import Pipeline
from vpipe.graph import capture
from vpipe.pipeline.threads import run_ranks
from vpipe.stage import RandomContext, StageModule, head_kernel, head_loss
from vpipe.stage.precision import cast_module, skeleton

FUSED = ("flash", "cudnn", "efficient", "fmha")
"""Parts of the names of torch's fused kernels."""


def kernels(module: StageModule, fields: dict[str, Tensor]) -> list[str]:
    """The names of the kernels that the module's forward and backward run."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        module({}, fields, RandomContext())["loss"].backward()
        torch.cuda.synchronize()
    return [event.key.lower() for event in profiler.key_averages()]


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "bert"])
def test_attention_runs_a_fused_kernel(name: str) -> None:
    model = MODELS[name]()
    batch = batch_for(model, mask=False)
    graph = capture(skeleton(model, torch.bfloat16), batch)
    (stage,) = graph.stages([len(graph.blocks)])
    module = StageModule(stage, model, device="cuda")
    cast_module(module, torch.bfloat16)
    fields = {name: tensor.cuda() for name, tensor in graph.batch_fields(batch).items()}
    found = kernels(module, fields)
    assert any(part in kernel for kernel in found for part in FUSED), found


def one_pass(leaves: list[Tensor], target: Tensor) -> tuple[Tensor, ...]:
    settings = (1.0, None, 0.0, -100, True, torch.float32, True, True)
    loss = head_loss.head_loss_and_gradients(leaves[0], leaves[1], None, target, *settings)[0]
    return loss.detach(), *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", [True, False])
def test_heads_of_odd_vocabularies(dtype: torch.dtype, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel and head_kernel.compiled_kernel() is None:
        pytest.skip("Triton cannot compile here")
    if not kernel:
        monkeypatch.setattr(head_loss, "compiled_kernel", lambda: None)
    monkeypatch.setattr(head_loss, "PIECE", 300 * 5003)
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(shape, generator=generator).to("cuda", dtype).requires_grad_()
        for shape in ((1000, 64), (5003, 64))
    ]
    target = torch.randint(5003, (1000,), generator=generator).cuda()
    target[::5] = -100
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    loss = functional.cross_entropy(functional.linear(*exact), target)
    plain = functional.cross_entropy(functional.linear(*leaves).float(), target)
    right, theirs = (torch.autograd.grad(way, each) for way, each in ((loss, exact), (plain, leaves)))
    own, *ours = one_pass(leaves, target)
    torch.testing.assert_close(own, plain.detach(), rtol=1e-5, atol=0)
    for wanted, found, other in zip(right, ours, theirs, strict=True):
        assert (found - wanted).norm() < 1.5 * (other - wanted).norm()


def test_the_head_needs_a_third_of_the_memory() -> None:
    hidden = torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(151936, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(151936, (4096,), device="cuda")

    def peak(run: Any) -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before

    def plain() -> None:
        loss = functional.cross_entropy(functional.linear(hidden, weight).float(), target)
        torch.autograd.grad(loss, [hidden, weight])

    assert 3 * peak(lambda: one_pass([hidden, weight], target)) < peak(plain)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_cuda_graphs_hold_the_head(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "PIECE", 16 * 301)
    monkeypatch.setattr(head_loss, "LEAST_TOKENS", 16)
    model, data = Own(), [own_batch(number) for number in range(16)]

    def train(cuda_graphs: bool) -> list[float]:
        def work(world: Any) -> list[float]:
            with Pipeline(
                model,
                data[0],
                optimizer=sgd,
                minibatches=4,
                precision=precision,
                cuda_graphs=cuda_graphs,
                world=world,
            ) as pipe:
                assert pipe.layout.graph.trace.heads
                return [loss for _, loss in pipe.train(data)]

        return run_ranks(2, work)[0]

    assert train(True) == pytest.approx(train(False), rel=1e-3)
