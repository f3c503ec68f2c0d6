"""Mistakes on the command line itself, told in one line as all others are: typer would draw a box."""

from __future__ import annotations

import sys
from typing import Any

MISTAKE = 2


def tell_usage(error: Exception) -> int | None:
    """Print what is wrong with the command, if the error is about that; the exit code, or None if it is not.

    Known by what it can do: where typer keeps its classes differs from version to version.
    """
    told: Any = error
    if not hasattr(told, "format_message"):
        return None
    message = str(told.format_message()).strip()
    if type(error).__name__ == "NoArgsIsHelpError":
        # The message is the help, or empty if that is printed already.
        print(message, end="\n" if message else "", file=sys.stderr)
        return MISTAKE
    command = getattr(getattr(told, "ctx", None), "command_path", "vpipe")
    print(
        f"error: {message[:1].lower()}{message[1:].rstrip('.')}: `{command} --help` tells how it is written",
        file=sys.stderr,
    )
    return MISTAKE
