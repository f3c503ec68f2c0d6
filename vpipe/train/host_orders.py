"""What the agent of a host is asked for before it starts ranks: to listen, to reach another host, to examine itself."""

from __future__ import annotations

import hashlib
import json
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vpipe.config import RunConfig
from vpipe.config.code import find_module
from vpipe.config.file import read_config
from vpipe.errors import ConfigError, VPipeError
from vpipe.launch.hosts import own_addresses
from vpipe.launch.measure import LIMIT, serve_measurement
from vpipe.launch.place import rank_directory, rank_interpreter
from vpipe.train.carried import CONFIG, MODULES
from vpipe.train.checks import check_paths

CONNECT_LIMIT = 5.0
"""Seconds within which another host must answer."""


def listen(names: list[str], port: int) -> tuple[socket.socket, tuple[str, int]]:
    """On the first of these names or addresses that is one of this host's."""
    addresses = list(dict.fromkeys(address for name in names for address in own_addresses(name)))
    if not addresses:
        raise ConfigError(
            f"no interface of it has an address of the name {names[0]!r}: write in `machines` the address by which the "
            "other hosts reach it"
        )
    try:
        listener = socket.create_server((addresses[0], port), backlog=socket.SOMAXCONN)
    except OSError as error:
        raise ConfigError(
            f"port is {port}: it cannot be used on {addresses[0]} ({error.strerror}): give another, or 0 for any"
        ) from None
    return listener, (addresses[0], listener.getsockname()[1])


def reach(where: list[Any]) -> tuple[None, bool]:
    address, port = where
    with reaching(address, port):
        socket.create_connection((address, port), CONNECT_LIMIT).close()
    return None, True


@contextmanager
def reaching(address: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"it does not reach {address}:{port}, where the ranks meet ({error.strerror or error}): open the ports "
            "between the hosts, or write in `machines` an address of a network that they share"
        ) from None


def serve(listener: socket.socket) -> None:
    """Answer one caller that measures the link."""
    with suppress(OSError), listener:
        listener.settimeout(LIMIT)
        with listener.accept()[0] as link:
            serve_measurement(link)


def examine(order: dict[str, Any]) -> dict[str, Any]:
    """What a run would not find here, and the digest of this host's own copy of the configuration."""
    wrong = []
    with tempfile.TemporaryDirectory(prefix="vpipe-host-") as folder:
        try:
            config = write_files(order["files"], Path(folder))
            check_paths(config)
            check_modules(config)
            rank_directory(config)
            rank_interpreter(config, [])
        except VPipeError as error:
            wrong.append(str(error).partition("\n")[0].replace(str(Path(folder, CONFIG)), order["source"]))
    try:
        digest = hashlib.sha256(Path(order["config"]).read_bytes()).hexdigest()
    except OSError:
        digest = None
    return {"wrong": wrong, "config": digest}


def write_files(files: dict[str, str], folder: Path) -> RunConfig:
    for name, text in files.items():
        (folder / Path(name).name).write_text(text, encoding="utf-8")
    return read_config(folder / CONFIG)


def check_modules(config: RunConfig) -> None:
    """Raise for a module of the user's that this host does not have; in a container, the image must have it."""
    if not config.code or config.container is not None:
        return
    elsewhere = json.loads((config.source.parent / MODULES).read_text(encoding="utf-8"))
    for key, written in config.code.items():
        if find_module(config, key) is None:
            there = elsewhere.get(key)
            copy = f"copy {there} to the same path" if there else "copy it to one of these folders"
            raise ConfigError(
                f"{config.source}: {key} is {written!r}: this host has no module {written.partition(':')[0]!r}, "
                f"neither in {' nor in '.join(config.python_path)} nor among its installed packages: {copy} on this "
                "host, or set python_path to a folder that all hosts have"
            )


def forget_callers(listener: socket.socket) -> None:
    """The hosts have tried the port: rank 0 is to find none of their connections."""
    listener.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
    listener.setblocking(True)
