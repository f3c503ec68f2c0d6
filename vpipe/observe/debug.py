"""The guides' three debugging scenes: `vpipe train --debug tensors`, `versions` or `schedule`.

Each wraps the calls that it reports when a run is set up; a run without it pays nothing. Lines go into the rank's log,
the first of them also to the user. The command line reads the names from here, so this file imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from vpipe.errors import ConfigError
from vpipe.schedule import Op, draw
from vpipe.system.units import show_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from vpipe.pipeline import Pipeline
    from vpipe.runtime.prefetch import Work

TENSORS, VERSIONS, SCHEDULE = SCENES = ("tensors", "versions", "schedule")
SHORT = 12
"""Lines of each scene that the user sees; the log has all."""

Say = Callable[[str], None]


def read_scenes(written: Iterable[str]) -> list[str]:
    """The names after `--debug`: one scene, or several with commas between them."""
    scenes = [scene for text in written for scene in text.split(",")]
    for scene in scenes:
        if scene not in SCENES:
            raise ConfigError(
                f"--debug {scene!r} is not known: give {', '.join(SCENES[:-1])} or {SCENES[-1]}"
            )
    return list(dict.fromkeys(scenes))


def attach(pipe: Pipeline, scenes: Iterable[str], log: Say, show: Say) -> None:
    """Report the scenes from now on; `show` prints for the user."""
    for scene in scenes:
        {TENSORS: _tensors, VERSIONS: _versions, SCHEDULE: _schedule}[scene](pipe, _speaker(scene, log, show))


def _speaker(scene: str, log: Say, show: Say) -> Say:
    shown = 0

    def say(line: str) -> None:
        nonlocal shown
        log(f"{scene}: {line}")
        if shown < SHORT:
            show(f"{scene}: {line}")
        elif shown == SHORT:
            show(f"{scene}: the rest is in the ranks' logs (output.log.<rank>)")
        shown += 1

    return say


# Tensors


def _tensors(pipe: Pipeline, say: Say) -> None:
    """Each tensor that is sent, received and freed, with its shape and norm."""
    handler = pipe.handler
    plain_send, plain_recv, plain_release = handler.send, handler.recv, handler.release
    held: dict[Hashable, list[str]] = {}

    def send(name: str, tensor: Tensor, minibatch: int, to: int, *, backward: bool = False) -> None:
        say(f"sent {_title(name, minibatch, backward)} to rank {to}: {_look(tensor)}")
        plain_send(name, tensor, minibatch, to, backward=backward)

    def recv(
        name: str, minibatch: int, source: int, *rest: Any, owner: Hashable, backward: bool = False
    ) -> Tensor:
        tensor = plain_recv(name, minibatch, source, *rest, owner=owner, backward=backward)
        title = _title(name, minibatch, backward)
        say(f"received {title} from rank {source}: {_look(tensor)}")
        held.setdefault(owner, []).append(title)
        return tensor

    def release(owner: Hashable) -> None:
        plain_release(owner)
        for title in held.pop(owner, ()):
            say(f"freed {title}")

    for reporting in (send, recv, release):
        setattr(handler, reporting.__name__, reporting)


def _title(name: str, minibatch: int, backward: bool) -> str:
    return f"{'the gradient of ' if backward else ''}{name}, minibatch {minibatch}"


def _look(tensor: Tensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "a number"
    norm = f", norm {tensor.detach().double().norm().item():.6g}" if tensor.is_floating_point() else ""
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}, {show_bytes(tensor.nbytes)}{norm}"


# Versions


def _versions(pipe: Pipeline, say: Say) -> None:
    """Each switch of the weights: what F and B read, what STEP makes, which versions are held.

    3+2 is version 3, predicted for two updates later.
    """

    def look(work: Work) -> Callable[[], None]:
        optimizer = work.stage.optimizer
        before = [str(version) for version in optimizer.queue]

        def report() -> None:
            after = [str(version) for version in optimizer.queue]
            if work.action.op is Op.STEP:
                say(f"{work.action} makes version {optimizer.latest_version}; held: {_list(after)}")
            else:
                read = f"reads version {optimizer.current} of {optimizer.latest_version}"
                gone = [version for version in before if version not in after]
                dropped = f", dropped {_list(gone)}" if gone else ""
                say(f"{work.action} {read}; held: {_list(after)}{dropped}")

        return report

    pipe.on_action(look, (Op.F, Op.B, Op.I, Op.STEP))


def _list(versions: Iterable[str]) -> str:
    return ", ".join(versions) or "none"


# Schedule


def _schedule(pipe: Pipeline, say: Say) -> None:
    """The stage and ranks of each block, the schedule's grid, and each action with its time as it ends."""
    layout = pipe.layout
    for stage in layout.stage_graphs:
        ranks = layout.schedule.placement[stage.index]
        blocks = ", ".join(layout.graph.blocks[block].name for block in stage.blocks)
        say(f"stage {stage.index} on rank {', '.join(map(str, ranks))}: {blocks}")
    say(f"{layout.schedule.name}\n{draw(layout.schedule, columns=60)}")

    def time(work: Work) -> Callable[[], None]:
        start = perf_counter()
        return lambda: say(f"{work.action} took {1000 * (perf_counter() - start):.3f} ms")

    pipe.on_action(time)
