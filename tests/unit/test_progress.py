"""How far long work is: a bar on a terminal, now and then a line elsewhere, and shares of it that only grow."""

import io
from types import SimpleNamespace

import pytest
import torch

from tests import models
from vpipe.cost import DeviceCost, LinkCost
from vpipe.profile.model import MeasuredModel
from vpipe.system import console
from vpipe.verify import verify


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3)


def test_lines_come_now_and_then_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now))
    with console.progress() as report:
        for second in range(100):
            now = float(second)
            report(second / 100, f"step {second}\x1b[31m")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("\\")[0] for line in lines] == ["30%: step 30", "60%: step 60", "90%: step 90"]
    assert "\x1b" not in "".join(lines)


def test_a_bar_on_a_terminal_is_gone_when_the_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stderr", Terminal())
    with console.progress() as report:
        report(0.5, "half of [it]")
    shown = console.sys.stderr.getvalue()
    assert "half of [it]" in shown
    assert shown.endswith("\x1b[2K")  # the line is cleared
    assert "━" in shown


def test_verification_and_profile_say_how_far_they_are(capture_once: None) -> None:
    model, batch, loss_fn = models.sequential()
    shares: list[float] = []
    texts: list[str] = []

    def report(share: float, text: str) -> None:
        shares.append(share)
        texts.append(text)

    verify(model, batch, loss_fn=loss_fn, optimizer=adamw, minibatches=2, updates=3, report=report)
    expected = [(n / 6, f"training with the pipeline, update {n} of 3") for n in (1, 2, 3)]
    expected += [(0.5 + n / 6, f"training without the pipeline, update {n} of 3") for n in (1, 2, 3)]
    assert [(pytest.approx(share), text) for share, text in expected] == list(
        zip(shares, texts, strict=True)
    )[1:]
    assert (shares[0], texts[0]) == (0.0, "capturing the model")

    shares.clear()
    texts.clear()
    measured = MeasuredModel(model, batch, loss_fn, optimizer=adamw)
    measured.measure(0.2, DeviceCost(2**34, 1e10, 1e10), LinkCost(1e10, 1e-5), report=report)
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert texts[1] == "measuring the blocks, round 1"
    assert len(texts) >= 2 + 5  # a round at least as often as medians need
