"""One rank of `cards.py`: what it measures together with the others. Rank 0 prints the tables."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations, permutations
from pathlib import Path
from time import perf_counter
from typing import Any

import cards_training
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from vpipe.communication import Channel, Key, ProcessWorld
from vpipe.communication.devices import take_device
from vpipe.communication.distributed import gloo_group
from vpipe.communication.sockets import gloo_on
from vpipe.errors import VPipeError
from vpipe.launch.rank import fail
from vpipe.system.cores import pci_address
from vpipe.system.device import card_identity
from vpipe.system.network import LOOPBACK, own_address

Rows = list[dict[str, Any]]
TIMEOUT = 120.0
"""Seconds that a rank waits for another."""
MIB = 2**20
WARM = 3
WANTED = {"CUDA IPC": "auto", "NCCL": "nccl", "gloo, through host memory": "gloo"}
WANTED_ON_CPU = {"shared memory": "auto", "gloo": "gloo"}
"""Channels, and the choice by which two ranks have them, if they can."""


def run_rank(*, cpu: bool, quick: bool, parts: Collection[str], file: Path | None) -> None:
    try:
        bench = Bench("cpu" if cpu else None, quick)
        for title, rows in bench.run(parts):
            if bench.rank == 0:
                report(title, rows, bench.results, file)
    except VPipeError as error:
        fail(error)
    if bench.rank == 0:
        for line in bench.results["left_out"]:
            print(f"Left out: {line}")


def report(title: str, rows: Rows, results: Mapping[str, Any], file: Path | None) -> None:
    """Print and write what there is by now: what comes next may hang, which is worth knowing."""
    console = Console(width=130)
    if rows:
        console.print(table(title, rows))
    sys.stdout.flush()
    if file is not None:
        file.write_text(json.dumps(results, indent=2))


class Bench:
    def __init__(self, device: str | None, quick: bool) -> None:
        self.world = ProcessWorld(timeout=TIMEOUT)  # for agreements
        self.rank, self.size = self.world.rank, self.world.size
        self.device = take_device(self.world, device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.quick = quick
        self.messages, self.rounds = (4, 5) if quick else (16, 50)
        self.wanted = WANTED if self.device.type == "cuda" else WANTED_ON_CPU
        self.cards: list[dict[str, Any]] = self.world.all_gather("cards", describe(self.device))
        self.apart = len({card["card"] for card in self.cards}) == self.size

        self.results: dict[str, Any] = {
            "torch": torch.__version__,
            "nccl": list(torch.cuda.nccl.version())
            if self.device.type == "cuda" and nccl_is_there()
            else None,
            "cards": self.cards,
            "pairs": [],
            "all_reduce": None,
            "memory": {},
            "schedules": [],
            "limit": [],
            "left_out": self.left_out(),
        }

    def run(self, parts: Collection[str]) -> Iterator[tuple[str, Rows]]:
        """The title and the rows of each table, as soon as it is measured; all of it is in `results`."""
        results = self.results
        yield f"1. Ranks, with torch {results['torch']}, NCCL {results['nccl']}", self.cards
        memory: dict[str, Any] = results["memory"]
        for name, wanted in self.wanted.items() if "pairs" in parts else ():
            self.say(f"pairs over {name}")
            rows = self.pairs(name, wanted, memory)
            results["pairs"] += rows
            yield f"2. Pairs of ranks over {name}: microseconds one way, GB/s there and back", rows
        if "all-reduce" in parts and (reduced := self.all_reduce(memory)) is not None:
            results["all_reduce"] = reduced
            yield "3. All-reduce over all ranks: time, and GB/s of the bus", [reduced]
        taken = [{"what": what, **figures} for what, figures in memory.items()]
        yield "   Memory of NCCL beside the allocator, of the rank that has most", taken
        choices = ["auto", "nccl"] if self.device.type == "cuda" and self.apart else ["auto", "gloo"]
        for choice in choices:
            training = (self.world, self.device, choice, self.quick, self.say)
            if "schedules" in parts:
                rows = cards_training.check_schedules(*training)
                results["schedules"] += rows
                yield f"4. Schedules over {choice} against the plain model: largest differences", rows
            if "limit" in parts:
                rows = cards_training.measure_shares(*training)
                results["limit"] += rows
                yield f"5. Share of the limit over {choice}: computing over all of the time", rows

    def left_out(self) -> list[str]:
        if self.device.type != "cuda":
            return ["all that needs cards: ranks were on the CPU"]
        if not self.apart:
            return ["NCCL, and CUDA IPC between cards: ranks share a card, and NCCL refuses that"]
        return [] if nccl_is_there() else ["NCCL: this torch has none"]

    def say(self, what: str) -> None:
        if self.rank == 0:
            print(f"... {what}", file=sys.stderr, flush=True)

    def free(self) -> int:
        torch.cuda.synchronize(self.device)
        return torch.cuda.mem_get_info(self.device)[0]

    def pairs(self, name: str, wanted: str, memory: dict[str, Any]) -> list[dict[str, Any]]:
        """Rows for the pairs of ranks that have this channel."""
        if name == "NCCL" and not (self.apart and nccl_is_there()):
            return []
        rows = []
        with connected(wanted, self.device) as (channels, connect):
            before = self.free() if name == "NCCL" else 0
            connect()
            if name == "NCCL":
                taken = self.world.all_gather("taken", before - self.free())
                memory["communicators of all ordered pairs"] = {
                    "MiB": max(taken) // MIB,
                    "count": 2 * (self.size - 1),
                }
            for first, second in combinations(range(self.size), 2):
                measured = None
                self.world.all_gather("turn", None)
                if self.rank in (first, second):
                    channel = channels[second if self.rank == first else first]
                    if channel.name == name:
                        measured = self.measure(channel, first=self.rank == first)
                found = self.world.all_gather("measured", measured)[first]
                if found is not None:
                    rows.append({"channel": name, "first": first, "second": second, **found})
        return rows

    def measure(self, channel: Channel, *, first: bool) -> dict[str, float]:
        """Latency in microseconds, and gigabytes a second there and back."""
        return {
            "latency_us": 1e6 * self.ping(channel, first),
            "there_gb": self.stream(channel, sends=first, stream=2) / 1e9,
            "back_gb": self.stream(channel, sends=not first, stream=3) / 1e9,
        }

    def ping(self, channel: Channel, first: bool) -> float:
        """Seconds of one way of a small message, the GPU's own launches included."""
        small = torch.zeros(1, device=self.device)
        started = 0.0
        for number in range(WARM + self.rounds):
            if number == WARM:
                started = perf_counter()
            if first:
                channel.send(Key(0, number), small)
                self.take(channel, Key(1, number), small)
            else:
                self.take(channel, Key(0, number), small)
                channel.send(Key(1, number), small)
        return (perf_counter() - started) / self.rounds / 2

    def stream(self, channel: Channel, *, sends: bool, stream: int) -> float:
        """Bytes a second of large messages in one direction; both ends measure, and the first's figure is used."""
        large = torch.zeros((MIB if self.quick else 64 * MIB) // 4, device=self.device)
        done = torch.zeros(1, device=self.device)
        started = 0.0
        for number in range(WARM + self.messages):
            if number == WARM:
                self.synchronize()
                started = perf_counter()
            if sends:
                channel.send(Key(stream, number), large)
            else:
                self.take(channel, Key(stream, number), large)
        if sends:
            self.take(channel, Key(4, stream), done)
        else:
            channel.send(Key(4, stream), done)
        return self.messages * large.nbytes / (perf_counter() - started)

    def take(self, channel: Channel, key: Key, like: torch.Tensor) -> None:
        channel.receive(key, like.shape, like.dtype, self.device)
        self.synchronize()
        channel.release(key)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def all_reduce(self, memory: dict[str, Any]) -> dict[str, float] | None:
        """Gigabytes a second of the bus, as NCCL's own tests count them: 2 (N - 1) / N of the bytes."""
        self.say("all-reduce")
        store = dist.PrefixStore("all-reduce", self.world._store)
        group: Any
        if self.device.type != "cuda":
            with gloo_on(self.address()):
                group = gloo_group(store, self.rank, self.size, TIMEOUT)
        elif self.apart and nccl_is_there():
            group = dist.ProcessGroupNCCL(store, self.rank, self.size, dist.ProcessGroupNCCL.Options())
        else:
            return None
        whole = torch.ones((MIB if self.quick else 256 * MIB) // 4, device=self.device)
        before = self.free() if self.device.type == "cuda" else 0
        group.allreduce([whole]).wait()
        assert float(whole[-1]) == self.size
        if before:
            taken = self.world.all_gather("all-reduce's", before - self.free())
            memory["communicator of all ranks"] = {"MiB": max(taken) // MIB, "count": 1}
        self.world.all_gather("all-reduce", None)
        started = perf_counter()
        for _ in range(self.messages):
            group.allreduce([whole]).wait()
        self.synchronize()
        seconds = (perf_counter() - started) / self.messages
        self.world.all_gather("all-reduce", None)
        if self.device.type == "cuda":
            group.shutdown()
        return {"ms": 1e3 * seconds, "bus_gb": 2 * (self.size - 1) / self.size * whole.nbytes / seconds / 1e9}

    def address(self) -> str:
        together = len({card["host"] for card in self.cards}) == 1
        return (
            LOOPBACK if together else own_address((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        )


@contextmanager
def connected(
    wanted: str, device: torch.device
) -> Iterator[tuple[Mapping[int, Channel], Callable[[], None]]]:
    """The channels to all others, and a function that makes the communicators of those that need some."""
    world = ProcessWorld(wanted, timeout=TIMEOUT)
    channels = world.channels(8, device)

    def connect() -> None:
        world.connect(permutations(range(world.size), 2), ())

    try:
        yield channels, connect
        world.all_gather("end", None)
    finally:
        for channel in channels.values():
            channel.close()
        world.close()


def describe(device: torch.device) -> dict[str, Any]:
    known: dict[str, Any] = {
        "host": os.uname().nodename,
        "device": str(device),
        "card": card_identity(device),
    }
    known["cores"] = len(os.sched_getaffinity(0))
    if device.type == "cuda":
        known["name"] = torch.cuda.get_device_name(device)
        known["pci"] = pci_address(device)
    return known


def nccl_is_there() -> bool:
    return dist.is_nccl_available()


def table(title: str, rows: Rows) -> Table:
    made = Table(title=title, title_justify="left")
    for column in dict.fromkeys(key for row in rows for key in row):
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*(_text(row.get(str(column.header))) for column in made.columns))
    return made


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)
