"""The output, files and refusals of `vpipe plan`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.schedules import NAMES
from vpipe.cli.planning import plan as plan_command
from vpipe.cost import BlockCost, DeviceCost, LinkCost, Profile, read_plan, write_profile
from vpipe.errors import VPipeError
from vpipe.plan import plan
from vpipe.plan.report import runs
from vpipe.simulate import simulate
from vpipe.system.units import read_bandwidth, read_bytes, show_bytes

GIB = 1024**3
BLOCK = BlockCost("block", 0.01, 0.01, 0.01, 0.0, 100_000_000, 1_000_000, 10_000_000)
PROFILE = Profile((BLOCK,) * 12, DeviceCost(GIB, 1e8, 1e8), LinkCost(1e10, 1e-5), 8, fingerprint="abc")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    write_profile(PROFILE, path)
    return path


@pytest.mark.parametrize(
    ("text", "size"),
    [("11GiB", 11 * GIB), ("500MB", 500_000_000), ("1.5 kib", 1536), ("123", 123), ("2b", 2)],
)
def test_sizes(text: str, size: int) -> None:
    assert read_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "11 apples", "1e3", "0", "0.1B", "１１Gib x"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(VPipeError, match="memory"):
        read_bytes(text)


def test_shown() -> None:
    shown = [show_bytes(count) for count in (5, 2048, 412.35 * 2**20, 3 * GIB, 5000 * 1024 * GIB)]
    assert shown == ["5 B", "2 KiB", "412.4 MiB", "3 GiB", "5000 TiB"]
    assert runs([3, 4, 5, 9]) == "3-5, 9"


def test_the_plan_is_written_and_read_back(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    write_profile(replace(PROFILE, device=DeviceCost(GIB, 1.0, 1.0)), profile)
    plan_command(profile=profile, ranks=4, memory="1.1GiB", as_json=True, output=path)
    printed, written = json.loads(capsys.readouterr().out), read_plan(path)
    assert printed["partition"] == list(written.partition)
    assert printed["policies"] == list(written.policies)
    assert written.fingerprint == "abc"
    assert sum(written.replicas) == 4
    assert printed["prediction"]["peak_memory"] == [entry["peak_memory"] for entry in printed["positions"]]
    # Equal blocks, a host too slow to swap to, and memory to spare: what is recomputed is a stage's last blocks.
    assert "recompute" in printed["policies"]
    assert set(printed["recompute_ratio"]) != {0}


@pytest.mark.parametrize(
    ("text", "speed"), [("10Gbit/s", 1.25e9), ("100 Mbit", 1.25e7), ("1.25GB/s", 1.25e9), ("400gbit/s", 5e10)]
)
def test_bandwidths(text: str, speed: float) -> None:
    assert read_bandwidth(text) == speed


def test_hosts_are_shown(profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stage on each host: what is sent are two messages of a megabyte a minibatch, over 1 Gbit/s 8 ms each."""
    path = tmp_path / "plan.json"
    plan_command(
        profile=profile, hosts="2x2", network="1Gbit/s", schedule="1f1b", stages=2, output=path, as_json=True
    )
    printed = json.loads(capsys.readouterr().out)
    assert printed["replicas"] == [2, 2]
    assert [host["ranks"] for host in printed["hosts"]] == [[0, 1], [2, 3]]
    assert [(host["sent"], host["received"], host["reduced"]) for host in printed["hosts"]] == [
        (1e6, 1e6, 0)
    ] * 2
    assert printed["hosts"][0]["seconds"] == pytest.approx(0.008)
    links = tmp_path / "links.json"
    found = {"ranks": [[0, 2], [1, 3]], "link": {"bandwidth": 1.25e8, "latency": 1e-5}}
    links.write_text(json.dumps({"hosts": found}))
    plan_command(profile=profile, ranks=4, links=links, schedule="1f1b", stages=2, output=path)
    shown = capsys.readouterr().out
    assert "Hosts" in shown
    assert "8 ms" in shown
    assert read_plan(path).placement == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hosts": "2x2"}, "2 hosts are given, but not what their network carries: .* --network 10Gbit/s"),
        ({"hosts": "2by2"}, "--hosts is '2by2': write hosts x ranks of each, such as 2x4"),
        ({"hosts": "2x2", "network": "fast"}, "--network 'fast' is not a bandwidth"),
        ({"ranks": 4, "network": "1Gbit/s"}, "a network is given, but no hosts: give them too"),
        ({"ranks": 5, "hosts": "2x2", "network": "1Gbit/s"}, "5 ranks are to be placed, and the hosts"),
        ({"ranks": 4, "machines": True}, "--machines takes the hosts of a run's YAML file"),
    ],
)
def test_mistakes_about_hosts(profile: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(VPipeError, match=message):
        plan_command(profile=profile, **options)


def test_the_table_says_what_limits(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_command(profile=profile, ranks=4, memory="1GiB", output=tmp_path / "plan.json")
    shown = capsys.readouterr().out
    assert "vpipe on 4 ranks" in shown
    assert "memory of 1 GiB" in shown
    assert "memory  " in shown


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("interleaved", "zb-v")])
@pytest.mark.parametrize("memory", [GIB, 4 * GIB])
def test_the_simulator_agrees_about_memory(name: str, memory: int) -> None:
    result = plan(PROFILE, 4, memory, name)
    simulated = simulate(PROFILE, result.to_plan(), minibatches=result.minibatches or 32)
    for position in result.positions:
        for rank in position.ranks:
            assert simulated.ranks[rank].memory.total <= position.memory.total
    if max(result.replicas) == 1:
        first = result.positions[0]
        assert simulated.ranks[0].memory.total == pytest.approx(first.memory.total, rel=1e-3)


@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
def test_chunks_fit_the_simulated_memory(name: str) -> None:
    result = plan(PROFILE, 2, GIB, name)
    simulated = simulate(PROFILE, result.to_plan())
    assert all(rank.memory.total <= GIB for rank in simulated.ranks)
    assert len(result.partition) == 2 * len(result.replicas)


def test_auto_is_as_fast_as_any() -> None:
    best = plan(PROFILE, 4, 2 * GIB, "auto", training=None)
    for name in NAMES:
        try:
            one = plan(PROFILE, 4, 2 * GIB, name)
        except VPipeError:
            continue
        assert best.samples_per_second >= one.samples_per_second * (1 - 1e-9)


def test_batch_size_auto_beats_powers_of_two() -> None:
    best = plan(PROFILE, 2, 2 * GIB, batch_size="auto")
    for size in (1, 2, 4, 8, 16):
        try:
            one = plan(PROFILE, 2, 2 * GIB, batch_size=size)
        except VPipeError:
            continue
        assert best.samples_per_second >= one.samples_per_second


def test_a_refusal_names_what_is_missing_and_what_would_fit() -> None:
    with pytest.raises(
        VPipeError, match=r"bytes .* are missing on stage \d+ \(blocks .*what would fit"
    ) as caught:
        plan(PROFILE, 2, 300_000_000)
    words = str(caught.value)
    plan(PROFILE, int(words.split("), or ")[1].split(" ranks")[0]), 300_000_000)
    size = int(words.split("a batch size of ")[1])
    plan(PROFILE, 2, 300_000_000, batch_size=size)
    with pytest.raises(VPipeError):
        plan(PROFILE, 2, 300_000_000, batch_size=size + 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "ranks is 0"),
        ({"memory": -1}, "memory is -1"),
        ({"schedule": "pipedreem"}, "did you mean 'pipedream'"),
        ({"batch_size": "big"}, "neither a number nor 'auto'"),
        ({"minibatches": 0, "schedule": "1f1b"}, "minibatches is 0"),
    ],
)
def test_mistakes(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(VPipeError, match=message):
        plan(**{"profile": PROFILE, "ranks": 2, **arguments})  # type: ignore[arg-type]


def test_a_profile_without_blocks() -> None:
    with pytest.raises(VPipeError, match="no blocks"):
        plan(replace(PROFILE, blocks=()), 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory": "5parsecs"}, "memory '5parsecs' is not a size"),
        ({"ranks": 0}, "ranks is 0: it must be a whole number, 1 or more"),
        ({"stages": -1}, "stages is -1: it must be a whole number, 1 or more"),
        ({"output": Path("nowhere/plan.json")}, "nowhere/plan.json: cannot be written: No such file"),
        ({"output": Path("run.yml/plan.json")}, "run.yml/plan.json: cannot be written: Not a directory"),
    ],
)
def test_mistakes_are_found_before_the_model_is_measured(
    arguments: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yml").write_text("stages: 2\nsynthetic_data: true\n")
    monkeypatch.setattr("vpipe.train.planning.plan_run", lambda *_, **__: pytest.fail("it was measured"))
    with pytest.raises(VPipeError, match=message):
        plan_command(Path("run.yml"), **arguments)
