"""The command line: a file for each group of commands."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from vpipe.errors import VPipeError, printable
from vpipe.system.best_effort import open_closed_streams

if TYPE_CHECKING:
    import typer


OFFLINE = {"HF_HUB_OFFLINE": "1", "USE_HUB_KERNELS": "NO"}
"""What keeps the libraries of Hugging Face, in this process and its ranks, from fetching files and code."""


def make_app() -> typer.Typer:
    import typer

    from vpipe.cli import checkpoints, planning, running, schedules
    from vpipe.cli.options import common

    app = typer.Typer(
        help="Pipeline-parallel training for any PyTorch module, with every schedule as data.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        callback=common,
    )
    for group in (schedules, running, planning):
        app.add_typer(group.app)
    app.add_typer(checkpoints.app, name="checkpoint")
    return app


def main() -> None:
    """Run a command. Exit code 2 and one line for a user's mistake, 1 for a failed rank, 74 for a lost result."""
    open_closed_streams()
    os.environ.update(OFFLINE)
    try:
        sys.exit(make_app()(prog_name="vpipe", standalone_mode=False))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # `vpipe ... | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:
        from vpipe.launch.rank import (
            fail,
        )  # a rank has imported it: there may be no descriptor to read it now
        from vpipe.system.descriptors import exhausted

        # An error of typer about the command itself. Where its classes live depends on its version.
        if hasattr(error, "format_message"):
            _print_usage_error(error)
            sys.exit(2)
        if "RANK" in os.environ:
            fail(error)
        from vpipe.cli.doctor import is_dependency, without_dependency

        if isinstance(error, ModuleNotFoundError) and is_dependency(error.name):
            sys.exit(without_dependency(error, sys.argv[1:]))
        if not isinstance(error, VPipeError) and (no_descriptor := exhausted(error)):
            error = VPipeError(no_descriptor)
        if not isinstance(error, VPipeError):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _print_usage_error(error: Any) -> None:
    """In one line, like all other errors: typer would draw a box."""
    message = str(error.format_message()).strip()
    if type(error).__name__ == "NoArgsIsHelpError":
        # The message is the help, or empty if that is printed already.
        print(message, end="\n" if message else "", file=sys.stderr)
        return
    command = getattr(getattr(error, "ctx", None), "command_path", "vpipe")
    text = f"{message[:1].lower()}{message[1:].rstrip('.')}"
    print(printable(f"error: {text}: see `{command} --help`"), file=sys.stderr)
