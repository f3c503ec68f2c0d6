"""The progress of a run on the screen: a live bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from vpipe.system.units import show_bytes


class _Figures(ProgressColumn):
    """Loss, learning rate, speed and memory, from the task's own fields."""

    def render(self, task: Task) -> Text:
        return Text(task.fields.get("figures", ""), style="cyan")


class ProgressReport:
    """Shows what rank 0 sees; the other ranks make one too, and theirs is silent."""

    def __init__(self, total: int, done: int, *, speaks: bool) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._speaks = speaks
        self._bar: Progress | None = None
        if speaks and sys.stdout.isatty():
            columns = (
                TextColumn("update {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(None),
                _Figures(),
            )
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console)
            self._task = self._bar.add_task("train", total=total, completed=done)
            self._bar.start()

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._speaks:
            self._console.print(line, markup=False)

    def update(self, done: int, loss: float, figures: dict[str, float], line: str | None) -> None:
        """Move the bar; `line` is what a log without a bar says, if it is to say something now."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, figures=f"loss {loss:.4f}, {_speed(figures)}")
        elif line is not None:
            self.say(f"{line}, {_speed(figures)}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> ProgressReport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _speed(figures: dict[str, float]) -> str:
    return (
        f"lr {figures['learning_rate']:.2e}, "
        f"{figures['samples_per_s']:.1f} samples/s, {figures['tokens_per_s']:.0f} tokens/s, "
        f"{show_bytes(figures['peak_memory'])}"
    )
