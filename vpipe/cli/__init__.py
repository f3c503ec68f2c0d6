"""The command line: a file for each group of commands."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

from vpipe.errors import RankFailedError, VPipeError

if TYPE_CHECKING:
    import typer


def make_app() -> typer.Typer:
    import typer

    from vpipe.cli import checkpoints, looking, planning, running, schedules

    app = typer.Typer(
        help="Pipeline-parallel training for any PyTorch module, with every schedule as data.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        callback=lambda: None,
    )
    for group in (schedules, running, planning, looking):
        app.add_typer(group.app)
    app.add_typer(checkpoints.app, name="checkpoint")
    return app


def main() -> None:
    """Runs the command line; a user's mistake is one message and exit code 2, a rank's fault exit code 1."""
    try:
        sys.exit(make_app()(prog_name="vpipe", standalone_mode=False))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        from vpipe.cli.doctor import is_dependency, without_dependency
        from vpipe.cli.usage import tell_usage
        from vpipe.launch.rank import fail

        if (code := tell_usage(error)) is not None:
            sys.exit(code)
        if "RANK" in os.environ:
            fail(error)
        if isinstance(error, ModuleNotFoundError) and is_dependency(error.name):
            sys.exit(without_dependency(error, sys.argv[1:]))
        if not isinstance(error, VPipeError):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, RankFailedError) else 2)
