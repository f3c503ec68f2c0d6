"""The head and the loss of a large vocabulary in pieces: equal to the plain model, and never all logits at once."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional

from vpipe import Pipeline, verify
from vpipe.graph import capture, head
from vpipe.pipeline.threads import run_ranks
from vpipe.stage import RandomContext, StageModule, head_loss
from vpipe.train.models import synthetic_batch

TOKENS, SIZE, CLASSES = 40, 12, 301
Batch = dict[str, Tensor]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of logits is computed in pieces, of 16 tokens."""
    monkeypatch.setattr(head, "MANY", 0)
    monkeypatch.setattr(head_loss, "PIECE", 16 * CLASSES)
    monkeypatch.setattr(head_loss, "LEAST_TOKENS", 16)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens of the pieces that are computed."""
    seen: list[int] = []
    logits = head_loss._logits

    def watched(states: Tensor, *rest: Any) -> Tensor:
        seen.append(len(states))
        return logits(states, *rest)

    monkeypatch.setattr(head_loss, "_logits", watched)
    return seen


def tensors(dtype: torch.dtype, bias: bool) -> tuple[list[Tensor], Tensor]:
    """Hidden states, weight and perhaps bias; targets, some of which do not count."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(TOKENS, SIZE), (CLASSES, SIZE), (CLASSES,)][: 2 + bias]
    leaves = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    target = torch.randint(CLASSES, (TOKENS,), generator=generator)
    target[::7] = -100
    return leaves, target


def plain(leaves: list[Tensor], target: Tensor, scale: float, cap: float | None, **options: Any) -> Tensor:
    logits = functional.linear(*leaves) * scale
    if cap is not None:
        logits = cap * torch.tanh(logits)
    return functional.cross_entropy(logits.float() if logits.itemsize == 2 else logits, target, **options)


def chunked(leaves: list[Tensor], target: Tensor, scale: float, cap: float | None, **options: Any) -> Tensor:
    hidden, weight, bias = (*leaves, None)[:3]
    assert hidden is not None
    smoothing, mean = options.get("label_smoothing", 0.0), options.get("reduction", "mean") == "mean"
    wide = torch.float32 if hidden.itemsize == 2 else hidden.dtype
    arguments = (hidden, weight, bias, target, scale, cap, smoothing, -100, mean, wide)
    if options.get("one_pass"):
        return head_loss.head_loss_and_gradients(*arguments, True, True)[0]
    return head_loss.head_loss(*arguments)


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"label_smoothing": 0.1},
        {"label_smoothing": 0.2, "reduction": "sum", "bias": True, "scale": 0.5, "cap": 3.0},
        {"bias": True, "scale": 2.0},
        {"cap": 5.0},
    ],
    ids=str,
)
def test_loss_and_gradients_equal_those_of_all_logits(
    options: dict[str, Any], one_pass: bool, pieces: list[int]
) -> None:
    options = dict(options)
    bias, scale, cap = options.pop("bias", False), options.pop("scale", 1.0), options.pop("cap", None)
    leaves, target = tensors(torch.float64, bias)
    expected = plain(leaves, target, scale, cap, **options)
    found = chunked(leaves, target, scale, cap, **options, one_pass=one_pass)
    assert max(pieces) == 16
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    wanted = torch.autograd.grad(3 * expected, leaves)
    for own, other in zip(torch.autograd.grad(3 * found, leaves), wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-14)


def test_classes_that_fill_up_the_weight_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: with them, and with a kernel that replaces the logits by their gradient."""

    def filled_up(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert bias is not None
        return functional.pad(weight, (0, 0, 0, 19)), functional.pad(bias, (0, 19))

    def kernel(logits: Tensor, labels: Tensor, gradient: bool) -> Tensor:
        logs = logits.log_softmax(1)
        if gradient:
            logits.copy_(logs.exp().scatter_add(1, labels, -torch.ones_like(logs)))
        return -logs.gather(1, labels)

    monkeypatch.setattr(head_loss, "_filled_up", filled_up)
    monkeypatch.setattr(head_loss._CrossEntropy, "kernel", lambda *_: kernel)
    leaves, target = tensors(torch.float64, True)
    expected = plain(leaves, target, 1.0, None)
    found = chunked(leaves, target, 1.0, None, one_pass=True)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(chunked(leaves, target, 1.0, None), expected, rtol=1e-14, atol=0)
    wanted = torch.autograd.grad(expected, leaves)
    torch.testing.assert_close(torch.autograd.grad(found, leaves), wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_the_plain_model(dtype: torch.dtype) -> None:
    leaves, target = tensors(dtype, True)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    right = torch.autograd.grad(plain(exact, target, 0.3, None), exact)
    ours = torch.autograd.grad(chunked(leaves, target, 0.3, None, one_pass=True), leaves)
    theirs = torch.autograd.grad(plain(leaves, target, 0.3, None), leaves)
    for wanted, own, other in zip(right, ours, theirs, strict=True):
        assert own.dtype is dtype
        assert (own - wanted).norm() < 1.5 * (other - wanted).norm()


def test_large_sums_in_float16() -> None:
    hidden = torch.full((4096, SIZE), 100.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(CLASSES, SIZE, dtype=torch.float16, requires_grad=True)
    target = torch.zeros(4096, dtype=torch.int64)
    chunked([hidden, weight], target, 1.0, None, one_pass=True).backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[0], torch.full((SIZE,), 100.0 / CLASSES - 100).half())


@pytest.mark.parametrize("one_pass", [True, False])
def test_no_label_counts(one_pass: bool) -> None:
    leaves, target = tensors(torch.float64, False)
    loss = chunked(leaves, torch.full_like(target, -100), 1.0, None, one_pass=one_pass)
    assert loss.isnan()
    gradients = torch.autograd.grad(loss, leaves)
    if one_pass:
        assert not any(gradient.count_nonzero() for gradient in gradients)


class Own(nn.Module):
    """A model of the user's own: `form` says how it computes its loss."""

    def __init__(self, form: str = "flat", tied: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.form = form
        self.embedding = nn.Embedding(CLASSES, SIZE)
        self.layers = nn.ModuleList([nn.Linear(SIZE, SIZE) for _ in range(4)])
        self.head = nn.Linear(SIZE, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return FORMS[self.form](self.head(hidden), labels)


def ragged(logits: Tensor, labels: Tensor) -> Tensor:
    """A sum divided by the number of labels that count, as transformers does where it knows them."""
    total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / (labels != -100).sum()


def negative_log(logits: Tensor, labels: Tensor) -> Tensor:
    logs = functional.log_softmax(logits, -1).view(-1, CLASSES)
    return functional.nll_loss(logs, labels.view(-1), ignore_index=-100)


def with_penalty(logits: Tensor, labels: Tensor) -> Tensor:
    """Somebody else reads the logits."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 1e-3 * logits.square().mean()


def of_each(logits: Tensor, labels: Tensor) -> Tensor:
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.mean()


FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flat": lambda logits, labels: functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
    "shifted": lambda logits, labels: functional.cross_entropy(
        logits[:, :-1].reshape(-1, CLASSES), labels[:, 1:].reshape(-1)
    ),
    "transposed": lambda logits, labels: functional.cross_entropy(
        logits.transpose(1, 2), labels, label_smoothing=0.1
    ),
    "permuted": lambda logits, labels: functional.cross_entropy(logits.permute(0, 2, 1), labels),
    "capped": lambda logits, labels: functional.cross_entropy(
        (torch.tanh(logits / 3.0) * 3.0).view(-1, CLASSES), labels.view(-1)
    ),
    "logs": negative_log,
    "ragged": ragged,
    "penalty": with_penalty,
    "each": of_each,
}
WHOLE = ("penalty", "each")
"""Forms whose logits are computed as the model does."""


def own_batch(number: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(CLASSES, (4, 16), generator=generator)
    labels = torch.randint(CLASSES, (4, 16), generator=generator)
    labels[-1, 5 + number % 3 :] = -100  # another number of labels in each minibatch
    return {"ids": ids, "labels": labels}


def both_ways(model: nn.Module, batch: Batch) -> Iterator[tuple[float, dict[str, Tensor]]]:
    """Loss and gradients of the captured model: in pieces, and as the model computes them."""
    graph = capture(model, batch)
    heads = graph.trace.heads
    for each in (heads, ()):
        graph.trace.heads = each
        (stage,) = graph.stages([len(graph.blocks)])
        module = StageModule(stage, model)
        loss = module({}, graph.batch_fields(batch), RandomContext())["loss"]
        loss.backward()
        yield (
            float(loss.detach()),
            {n: p.grad for n, p in module.parameters_by_name.items() if p.grad is not None},
        )


def assert_both_ways_equal(model: nn.Module, batch: Batch) -> None:
    (loss, gradients), (expected, others) = both_ways(model, batch)
    assert loss == pytest.approx(expected, rel=1e-13)
    assert gradients.keys() == others.keys()
    largest = max(float(gradient.abs().max()) for gradient in others.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], rtol=1e-9, atol=1e-12 * largest, msg=name)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=[pytest.mark.long] if form in ("permuted", "capped") else [])
        for form in FORMS
    ],
)
def test_own_losses(form: str, pieces: list[int]) -> None:
    model = Own(form, tied=form != "logs", bias=form == "ragged").double()
    assert_both_ways_equal(model, own_batch())
    assert (not pieces) == (form in WHOLE)
    assert not pieces or max(pieces) == 16


SIZES: dict[str, Any] = {
    "vocab_size": 301, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "use_cache": False,
}  # fmt: skip
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=301, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=1, eos_token_id=2, use_cache=False,
        )
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(
        hf.Qwen3Config(**SIZES, head_dim=8, num_key_value_heads=1, tie_word_embeddings=True)
    ),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SIZES, head_dim=8, num_key_value_heads=1)),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=301, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, dropout_rate=0.0, use_cache=False,
        )
    ),
}  # fmt: skip
SHORT = ("qwen3", "bert")


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in MODELS]
)
def test_models_of_transformers(name: str, pieces: list[int]) -> None:
    model: Any = MODELS[name]().double()
    model.config.decoder_start_token_id = 0
    assert_both_ways_equal(model, synthetic_batch(model, 3, 16))
    assert max(pieces) == 16


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"ranks": 2, "minibatches": 2},
    "zb-h1": {"ranks": 2, "minibatches": 2},
    "zb-v": {"ranks": 2, "minibatches": 2},
    "2bw": {"ranks": 2, "update_interval": 2},
    "vpipe": {"ranks": 3, "replicas": [1, 2]},
}
LONG = {("1f1b", True), ("zb-h1", False), ("zb-v", False), ("2bw", False), ("vpipe", True)}


@pytest.mark.parametrize(
    ("schedule", "one_pass"),
    [
        pytest.param(*case, marks=[pytest.mark.long] if case in LONG else [])
        for case in itertools.product(SCHEDULES, (False, True))
    ],
)
def test_schedules_train_like_the_plain_model(
    schedule: str, one_pass: bool, monkeypatch: pytest.MonkeyPatch, pieces: list[int]
) -> None:
    if one_pass:
        monkeypatch.setattr(head_loss, "HALF", (torch.float64,))
    model = Own("flat", tied=schedule != "vpipe")
    options = {"optimizer": sgd, "updates": 3, "loss_weight": "tokens", **SCHEDULES[schedule]}
    result = verify(model, own_batch, schedule=schedule, **options)
    assert result.ok, result.differences
    assert max(pieces) == 16


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_recomputed_split_and_compiled(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of a head do not depend on how its stage runs."""
    monkeypatch.setattr(head_loss, "HALF", (torch.float64,))
    model, batch = Own().double(), own_batch()
    graph = capture(model, batch)
    (stage,) = graph.stages([len(graph.blocks)])
    options: list[dict[str, Any]] = [
        {},
        {"policies": {block.index: "recompute" for block in graph.blocks}},
        {"split": True},
    ]
    if compiled:
        options = [{}, {"compile": "aot_eager"}]
    found = []
    for each in options:
        module, context = StageModule(stage, model, **each), RandomContext()
        module({}, graph.batch_fields(batch), context)["loss"].backward()
        for work in context.deferred:
            work()
        found.append({name: p.grad for name, p in module.parameters_by_name.items()})
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-10, atol=1e-13)


def test_outputs_still_have_the_logits(pieces: list[int]) -> None:
    """An evaluation computes pieces, unless the output is wanted."""

    class WithLogits(Own):
        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            logits = self.head(self.embedding(ids))
            return FORMS["flat"](logits, labels), logits

    model, batch = WithLogits(), own_batch()

    def work(world: Any) -> tuple[float, int, Any]:
        with Pipeline(model, batch, optimizer=sgd, world=world) as pipe:
            loss = pipe.evaluate([batch])
            computed = len(pieces)
            return loss, computed, list(pipe.predict([batch]))

    ((loss, computed, outputs),) = run_ranks(1, work)
    expected, logits = model(**batch)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    assert computed == len(pieces) == 4
    torch.testing.assert_close(outputs[0][1], logits.detach())


def test_the_key_turns_it_off(pieces: list[int]) -> None:
    def work(world: Any) -> float:
        with Pipeline(Own(), own_batch(), optimizer=sgd, world=world, chunked_loss=False) as pipe:
            return pipe.evaluate([own_batch()])

    run_ranks(1, work)
    assert not pieces


def test_small_heads_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = capture(Own(), own_batch()).trace
    assert trace.heads
    monkeypatch.setattr(head, "MANY", 64 * CLASSES + 1)
    assert not head.find_heads(trace)
    half = capture(Own().bfloat16(), own_batch()).trace  # 64 targets, hidden states of 12 numbers
    assert half.heads
    half.hints = dict.fromkeys(half.hints, 3)
    assert not head.find_heads(half)
    half.hints = dict.fromkeys(half.hints, 4)
    assert head.find_heads(half)
    monkeypatch.setattr(head, "LARGE", 30)
    assert not head.find_heads(half)
