"""Learning-rate policies against closed forms."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vpipe.errors import VPipeError
from vpipe.weights.policies import POLICIES, learning_rate_factor, learning_rate_policy

WARMUP, TOTAL = 10, 100


@pytest.mark.parametrize(
    ("name", "at_total", "halfway"),
    [
        ("polynomial", 0.0, 0.5),
        ("step", 0.001, 0.1),
        ("cosine", 0.0, 0.5),
        ("constant", 1.0, 1.0),
    ],
)
def test_values_at_the_turning_points(name: str, at_total: float, halfway: float) -> None:
    factor = learning_rate_factor(name, WARMUP, TOTAL)
    assert factor(0) == 1 / (WARMUP + 1)
    assert factor(WARMUP) == 1.0
    assert factor((WARMUP + TOTAL) // 2) == pytest.approx(halfway, abs=1e-12)
    assert factor(TOTAL) == pytest.approx(at_total, abs=1e-12)


def test_closed_forms() -> None:
    left = [(TOTAL - u) / (TOTAL - WARMUP) for u in range(WARMUP, TOTAL + 1)]
    closed = {
        "polynomial": left,
        "cosine": [math.cos(math.pi / 2 * (1 - share)) ** 2 for share in left],
        "step": [1.0] * 30 + [0.1] * 30 + [0.01] * 30 + [0.001],
        "constant": [1.0] * len(left),
    }
    rising = [(u + 1) / (WARMUP + 1) for u in range(WARMUP)]
    for name, falling in closed.items():
        factor = learning_rate_factor(name, WARMUP, TOTAL)
        assert [factor(u) for u in range(TOTAL + 1)] == pytest.approx(rising + falling, abs=1e-12)


def test_power_and_size_of_the_steps() -> None:
    assert learning_rate_factor("polynomial", 0, 10, power=2.0)(5) == 0.25
    factor = learning_rate_factor("step", 2, 100, step_size=4)
    assert [factor(u) for u in (2, 5, 6, 9, 10)] == pytest.approx([1, 1, 0.1, 0.1, 0.01])


@given(st.sampled_from(POLICIES), st.integers(0, 50), st.integers(0, 200), st.integers(0, 500))
def test_rises_then_never_rises_again(name: str, warmup: int, more: int, update: int) -> None:
    factor = learning_rate_factor(name, warmup, warmup + more)
    assert 0.0 <= factor(update) <= 1.0
    if update < warmup:
        assert factor(update) < factor(update + 1)
    else:
        assert factor(update) >= factor(update + 1)


def test_drives_an_optimizer() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], 0.5)
    scheduler = learning_rate_policy("polynomial", 1, 5)(optimizer)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == [0.25, 0.5, 0.375, 0.25, 0.125]
    assert optimizer.param_groups[0]["lr"] == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("polynomial", 11, 10), "the warm-up has 11 updates and the whole run 10"),
        (("polynomial", -1, 10), "the warm-up has -1 updates"),
        (("polinomial", 0, 10), "unknown learning-rate policy 'polinomial': did you mean 'polynomial'"),
        (
            ("xyz", 0, 10),
            "unknown learning-rate policy 'xyz': choose from polynomial, step, cosine, constant",
        ),
    ],
)
def test_mistakes(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(VPipeError, match=message):
        learning_rate_policy(*arguments)


def test_a_step_has_a_size() -> None:
    with pytest.raises(VPipeError, match="step_size is 0"):
        learning_rate_policy("step", 0, 10, step_size=0)
