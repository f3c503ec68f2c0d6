"""The family of errors for users' mistakes, text as it may be shown, and the hint at the name that was meant."""

from collections.abc import Collection
from difflib import get_close_matches
from typing import Any, ClassVar


def printable(text: object, *, lines: bool = False) -> str:
    """The text with control characters, lone surrogates and invisible marks written as escapes, such as \\x1b.

    Names of files, hosts and modules, and values of files, may hold anything: a terminal would obey it, and a newline
    would forge a line of a log. With `lines` a newline or a tab stays.
    """
    shown = str(text)
    if shown.isprintable():
        return shown
    kept = "\n\t" if lines else ""
    return "".join(
        letter if letter.isprintable() or letter in kept else letter.encode("unicode_escape").decode()
        for letter in shown
    )


class VPipeError(ValueError):
    """A mistake that the user can mend: the message names the value, the place and the fix, in one line.

    `below` is what may stand in the lines below it: a drawing, the end of a log.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str = "", below: str = "") -> None:
        shown = printable(message)
        super().__init__(f"{shown}\n{printable(below, lines=True)}" if below else shown)


class CaptureError(VPipeError):
    """The model cannot be captured as a graph."""


class BatchError(VPipeError):
    """A batch does not have the fields, types or sizes that the captured model reads."""


class PartitionError(VPipeError):
    """The partition does not fit the model's blocks."""


class ScheduleError(VPipeError):
    """The schedule is wrong, would deadlock, or does not fit the stages."""


class ConfigError(VPipeError):
    """A configuration file has a wrong key or value."""


class PeerError(VPipeError):
    """Another rank disagrees, failed or does not answer."""


class NonFiniteError(VPipeError):
    """A loss or a gradient is not a finite number."""


class OutOfMemoryError(VPipeError):
    """A rank needs more memory than there is."""

    def __init__(
        self, message: str, *, wanted: int | None = None, held: int | None = None, free: int | None = None
    ) -> None:
        """Bytes that it asked for, that it had, and that it might still have had, where they are known."""
        super().__init__(message)
        self.wanted, self.held, self.free = wanted, held, free


class CompileError(VPipeError):
    """torch.compile failed on a block."""


class NotWrittenError(VPipeError):
    """A file that the user must not lose could not be written: a result, a last checkpoint."""

    exit_code = 74


class Stopped(VPipeError):
    """The run was asked to end, and did so with a checkpoint from which it can go on."""

    exit_code = 75

    def __init__(self, message: str, summary: dict[str, Any]) -> None:
        super().__init__(message)
        self.summary = summary


class RankFailedError(VPipeError):
    """A rank was killed, crashed or stood still: not a mistake, so another try may do."""

    exit_code = 1


def meant(word: str, known: Collection[str], otherwise: str = "choose from") -> str:
    """The end of an error about an unknown name: the known one that is close to it, or else all of them."""
    close = get_close_matches(word[:40], known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"{otherwise} {', '.join(known)}"
