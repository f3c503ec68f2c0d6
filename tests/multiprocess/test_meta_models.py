"""A model on the meta device: no rank ever holds more of it than its own blocks."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.end_to_end.tiny import MODEL
from tests.multiprocess import tasks
from tests.multiprocess.pool import Pool
from vpipe import Pipeline
from vpipe.config import RunConfig
from vpipe.train.datasets import named_batch
from vpipe.train.models import build_model

WIDTH = 2400
LAYERS = 8
RANKS = 4
MODEL_BYTES = LAYERS * 4 * WIDTH * WIDTH
WORKSPACE_BYTES = 40 << 20  # what capturing takes, whatever the size of the model


def _peak_bytes() -> int:
    """The largest resident size since it was last reset."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _reset_peak() -> int:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _peak_bytes()


def _sgd(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01)


def _build_wide(*, meta: bool) -> tuple[int, int]:
    """The bytes of this rank's weights, and by how much making the pipeline raised the peak of memory."""
    batch = (torch.randn(2, WIDTH), torch.randn(2, WIDTH))
    torch.manual_seed(0)
    before = _reset_peak()
    with torch.device("meta" if meta else "cpu"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    with Pipeline(model, batch, optimizer=_sgd, loss_fn=functional.mse_loss) as pipe:
        assert all(parameter.is_meta == meta for parameter in model.parameters())
        own = sum(tensor.nbytes for tensor in pipe.state_dict().values())
        return own, _peak_bytes() - before


def _train_bert() -> tuple[list[float], set[str], dict[str, torch.Tensor] | None]:
    config = RunConfig(**MODEL)
    model = build_model(config, "meta").model
    batch = named_batch(config, model, config.batch_size)
    with Pipeline(model, batch, optimizer=tasks.adamw, schedule="pipedream", seed=3) as pipe:
        names = set(pipe.state_dict())
        return [loss for _, loss in pipe.train([batch] * 12)], names, pipe.full_state_dict()


def test_the_peak_of_memory_is_that_of_the_own_blocks(pool: Pool) -> None:
    for own, peak in pool.run(RANKS, _build_wide, meta=True):
        assert own == MODEL_BYTES // RANKS
        # Twice: the weights are drawn one by one and then laid out as the first version.
        assert peak < 2 * own + WORKSPACE_BYTES < MODEL_BYTES


def test_the_measurement_would_notice_a_whole_model(pool: Pool) -> None:
    for _, peak in pool.run(2, _build_wide, meta=False):
        assert peak > MODEL_BYTES


def test_a_bert_that_nobody_holds_whole_is_trained(pool: Pool) -> None:
    results = pool.run(2, _train_bert)
    (losses, first, state), (other_losses, second, _) = results
    assert losses == other_losses
    assert losses[-1] < losses[0]
    assert state is not None
    held = first | second
    unsaved = {name for name in held if name.endswith(("position_ids", "token_type_ids"))}
    assert list(state) == list(build_model(RunConfig(**MODEL), "meta").model.state_dict())
    assert held - unsaved == set(state) - {
        f"cls.predictions.decoder.{own}" for own in ("weight", "bias")
    }  # tied
    shared = {"bert.embeddings.word_embeddings.weight"}
    assert first & second <= shared | unsaved
    assert all(tensor.isfinite().all() for tensor in state.values())
