"""Compressed links as the simulator counts them, and the choice of `compress: auto`."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch

from vpipe.communication import compression
from vpipe.config.keys import RunConfig
from vpipe.cost import BlockCost, DeviceCost, Hosts, LinkCost, Plan, Profile
from vpipe.cost.compression import with_compression, with_mode
from vpipe.errors import VPipeError
from vpipe.plan.compression import choose_compression
from vpipe.simulate import simulate
from vpipe.train.compression import choose_for_run, compressed_profile
from vpipe.train.plan_by_ranks import with_modes

BYTES = 512 * 128
DEVICE = DeviceCost(10**9, inf, inf, pack_bf16=1e-7, pack_int8=2e-7, pack_int4=3e-7)


def profile(bandwidth: float, hosts: Any = ((0,), (1,), (2,))) -> Profile:
    block = BlockCost("block", 1.0, 1.0, 1.0, 0.0, 10, BYTES, 8)
    links = Hosts(hosts, LinkCost(bandwidth, 0.1), {(1, 2): LinkCost(1e15), (2, 1): LinkCost(1e15)})
    return Profile((block,) * 3, DEVICE, LinkCost(inf), 1, hosts=links)


def plan(schedule: str = "gpipe", minibatches: int = 4) -> Plan:
    return Plan((1, 1, 1), ("keep",) * 3, schedule, (1, 1, 1), minibatches)


@pytest.mark.parametrize("mode", ["bf16", "int8", "int4"])
def test_bytes_are_those_of_a_message_and_packing_is_added(mode: str) -> None:
    """Against the messages themselves, and one minibatch by hand: 9 s of computing, one slow link each way."""
    sent = compression.pack(torch.ones(BYTES // 4), mode).nbytes
    packing = getattr(DEVICE, f"pack_{mode}") * BYTES
    found = simulate(
        with_compression(profile(BYTES / 10), {(1, 0): (mode, mode)}), plan(minibatches=1)
    ).step_time
    assert found == pytest.approx(9 + 2 * (10 * sent / BYTES + packing + 0.1))
    assert simulate(profile(BYTES / 10), plan(minibatches=1)).step_time == pytest.approx(9 + 2 * 10.1)


def test_gradients_of_replicas_have_their_own_mode() -> None:
    costs = replace(profile(8 / 10, ((0,), (1,))), blocks=profile(1.0).blocks[:1])
    replicas = Plan((1,), ("keep",), "gpipe", (2,), 2)

    def seconds(values: str, gradients: str) -> float:
        return simulate(with_compression(costs, {(0, 1): (values, values)}, gradients), replicas).step_time

    assert seconds("none", "none") == seconds("int8", "none") == pytest.approx(3 + 10.2)
    assert seconds("none", "bf16") == pytest.approx(3 + 5.2, abs=1e-3)


def test_auto_compresses_the_links_that_bound_an_update() -> None:
    quick, slow = (choose_compression(profile(BYTES / seconds), plan()) for seconds in (0.001, 2.0))
    assert quick.modes == {}
    assert quick.before == quick.after
    assert slow.modes == {(0, 1): "int8"}  # not the link between hosts 1 and 2
    assert slow.after < slow.before
    half = choose_compression(profile(BYTES / 2.0), plan(), itemsize=2)
    assert half.modes == {(0, 1): "int8"}
    assert half.after > slow.after


def test_of_a_run() -> None:
    config = RunConfig(machines=["a:0", "b:0", "c:0"], stages=3, compress="auto")
    slow = profile(BYTES / 2.0)
    modes, line = choose_for_run(config, slow, plan())
    assert modes == {(0, 1): "int8"}
    assert line.startswith("compress: auto: int8 between a and b: an update takes ")
    assert slow.hosts is not None
    chosen = with_modes(config, slow.hosts.ranks, modes)
    assert chosen.compress == {"a/b": "int8"}
    expected = choose_compression(slow, plan()).after
    assert simulate(compressed_profile(slow, chosen), plan()).step_time == expected
    nameless = with_modes(RunConfig(stages=3, compress="auto"), slow.hosts.ranks, modes)
    assert nameless.compress == {"0/1": "int8"}
    assert simulate(compressed_profile(slow, nameless), plan()).step_time == expected
    assert choose_for_run(config, replace(slow, hosts=None), plan())[0] == {}


def test_mistakes() -> None:
    for keys, text in (
        ({"compress": {"0/7": "int8"}, "stages": 2}, "there is no rank '7', and `machines` is not given: "),
        (
            {"links": "links.json"},
            "links is 'links.json': only compress: auto and partition: auto read it: leave it out",
        ),
    ):
        with pytest.raises(ValueError, match="is") as raised:
            RunConfig(**keys)  # type: ignore[arg-type]
        assert text in str(raised.value)
    with pytest.raises(VPipeError, match="compress is 'int9': did you mean 'int8'"):
        with_mode(profile(1.0), "int9")
    with pytest.raises(VPipeError, match="all ranks are on one host"):
        with_mode(replace(profile(1.0), hosts=None), "int8")
