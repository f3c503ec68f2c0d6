"""Commands on another host by the system's ssh, and what its errors mean.

ssh takes user, port, key and the way to a host from the user's own configuration. It asks nobody: a host key that is
not known, or a password that would be needed, is an error.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Sequence

from vpipe.errors import ConfigError

OPTIONS = (
    "BatchMode=yes",  # no password, no question
    "StrictHostKeyChecking=yes",
    "ConnectTimeout=15",
    "LogLevel=ERROR",  # no banners among the errors
    "ClearAllForwardings=yes",
    "ForwardAgent=no",
    "ForwardX11=no",
    "ControlMaster=no",  # a connection that stays would hold our pipes; one that is there is used
    "EscapeChar=none",
    "RequestTTY=no",
    "PermitLocalCommand=no",
)
FAILED = 255
"""The exit code of ssh itself, if it is not the command's."""

_UNREACHED = ("it cannot be reached", "check that it runs and that the network leads to it: `ssh {host}`")
_REASONS = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": (
        "its host key has changed",
        "find out why, then renew its line in known_hosts",
    ),
    "Host key verification failed": (
        "its host key is not known here",
        "run `ssh {host}` once, compare the fingerprint and accept it",
    ),
    "Permission denied": (
        "it does not accept your key",
        "run `ssh-copy-id {host}`, or `ssh-add` your key: no password is asked for",
    ),
    "Could not resolve hostname": (
        "its name is not known here",
        "write its address, or a Host of your ~/.ssh/config",
    ),
    "Connection refused": (
        "no ssh server answers there",
        "start sshd on it, or give its Port in your ~/.ssh/config",
    ),
    "timed out": _UNREACHED,
    "No route to host": _UNREACHED,
    "Network is unreachable": _UNREACHED,
}
"""What ssh says, what it means, and the fix."""


def ssh_command(host: str, command: Sequence[str]) -> list[str]:
    """The arguments that run a command on a host. The shell at the other end gets it quoted."""
    tool = shutil.which("ssh")
    if tool is None:
        raise ConfigError(
            f"machines names {host!r}, which ssh reaches, and ssh is not installed here: install it"
        )
    options = [part for option in OPTIONS for part in ("-o", option)]
    return [tool, *options, "--", host, shlex.join(command)]


def why_not(host: str, python: str, code: int | None, said: str) -> str:
    """One line: why the agent of a host has not begun, and the fix."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit code {code}"
    if code == FAILED:
        for text, (reason, fix) in _REASONS.items():
            if text in said:
                return f"{reason} ({last}): {fix.format(host=host)}"
        return f"ssh failed ({last}): see `ssh {host}`"
    if missing := re.search(r"No module named '?([\w.]+)", last):
        module = missing[1]
        if module.partition(".")[0] == "vpipe":
            return f"{python} has no vpipe, or another one ({last}): install the same vpipe for it"
        return f"{python} has no {module}: install what vpipe needs for it"
    if code in (126, 127):
        return f"there is no {python} ({last}): install vpipe in the same place, or give the key `python`"
    return f"its part of the launcher did not begin ({last}): see `ssh {host} {python} -m vpipe doctor`"
