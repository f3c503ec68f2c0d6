"""docs/scaling.md: it is what its command writes, and one simulated pipeline stands for all of a layout."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.pages import ROOT, read_page
from vpipe.cost import KEEP, SWAP, BlockCost, DeviceCost, Hosts, LinkCost, Profile, write_profile
from vpipe.schedule import kind_of
from vpipe.simulate import simulate

sys.path.insert(0, str(ROOT / "benchmarks"))
from scaling import POLICIES, SCHEDULES, rows_of
from scaling_layouts import Layout, best_point, layouts, measure
from scaling_models import MEASURED, MODELS, Model, card, card_speed, profile_path, with_layers
from scaling_page import page
from scaling_pipeline import ALONE, HOST, INSIDE, LATENCY, Card, Pipeline, plan_of, profile_of, run, simulated
from scaling_rows import read_rows

ROWS = MEASURED / "scaling.csv"
NAMED = [name for name in SCHEDULES if name != ALONE]
SMALL = Model("small", "gpt", 16, 1024, 8, 32000, 1024, 64, (1,))


def test_the_page_is_made_of_the_rows() -> None:
    assert read_page("docs/scaling.md") == page(read_rows(ROWS), card(), card_speed())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_the_rows_are_those_of_the_command(schedule: str) -> None:
    model, gpus = MODELS[1], 32
    written = [
        row
        for row in read_rows(ROWS)
        if (row.model, row.gpus, row.schedule, row.policy) == (model.name, gpus, schedule, KEEP)
    ]
    assert rows_of((model, schedule, KEEP), MEASURED, (gpus,)) == written


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_rows_of_a_model_are_those_of_the_command(schedule: str, policy: str) -> None:
    model = MODELS[0]
    written = [
        row
        for row in read_rows(ROWS)
        if (row.model, row.schedule, row.policy) == (model.name, schedule, policy)
    ]
    assert rows_of((model, schedule, policy), MEASURED) == written


def test_every_point_is_there() -> None:
    found = {
        (row.model, row.gpus, row.policy, row.gigabits) for row in read_rows(ROWS) if row.schedule == "1f1b"
    }
    counts = {8, 16, 32, 64, 128, 256, 512, 1024}
    assert found == {
        (model.name, gpus, policy, link) for model in MODELS for gpus in counts for policy in POLICIES
        for link in (100, 400)
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a made-up profile of the small model, whose messages and gradients take about as long as computing."""
    path = tmp_path_factory.mktemp("profiles")
    blocks = tuple(
        BlockCost(f"block {n}", 1e-3 * t, 1e-3 * t, 1e-3 * t, 1e-4, 2**24, 2**21, size, update_bytes=2**20)
        for n, (t, size) in enumerate(((1, 2**26), (2, 2**24), (1, 2**23), (2, 2**24), (3, 2**26)))
    )
    device = DeviceCost(80 * 2**30, 4e10, 4e10, 1e-5, swapped_in=3)
    write_profile(Profile(blocks, device, INSIDE, 1, 6.0), profile_path(SMALL, 1, path))
    return path


def all_pipelines(pipeline: Pipeline, layout: Layout, card: float) -> float:
    """Seconds of an update when every rank of the layout is simulated."""
    host_stages = HOST // layout.together
    hosts: dict[tuple[int, int], list[int]] = {}
    for stage in range(layout.stages):
        for replica in range(layout.pipelines):
            host = stage // host_stages, replica // layout.together
            hosts.setdefault(host, []).append(stage * layout.pipelines + replica)
    network = Hosts(tuple(map(tuple, hosts.values())), LinkCost(card, LATENCY))
    plan = replace(plan_of(pipeline), replicas=(layout.pipelines,) * layout.stages)
    count = layout.pipelines * (1 if pipeline.each else layout.minibatches)
    synchronous = kind_of(pipeline.schedule).synchronous
    plan = replace(plan, **{"minibatches" if synchronous else "update_interval": count})
    found = simulate(replace(profile_of(pipeline), hosts=network), plan)
    return found.step_time * (layout.minibatches if pipeline.each else 1)


@pytest.mark.parametrize("schedule", NAMED)
@pytest.mark.parametrize(("stages", "pipelines", "together"), [(4, 4, 4), (8, 2, 1), (2, 8, 8)])
def test_one_pipeline_stands_for_all(
    schedule: str, stages: int, pipelines: int, together: int, folder: Path
) -> None:
    pipeline = Pipeline(SMALL, schedule, KEEP, 1, stages, folder)
    layout, bandwidth = Layout(1, stages, pipelines, together, 2 * stages), 5e9
    found = measure(pipeline, layout, bandwidth).seconds
    assert found == pytest.approx(all_pipelines(pipeline, layout, bandwidth), rel=0.05)


@pytest.mark.parametrize("schedule", [name for name in NAMED if name != "pipedream"])
def test_many_minibatches_go_on_at_the_pace_of_fewer(schedule: str, folder: Path) -> None:
    for policy, stages in ((KEEP, 4), (SWAP, 8)):
        pipeline = Pipeline(SMALL, schedule, policy, 1, stages, folder)
        network = Card(5e9, 4)
        short, whole = run(pipeline, 7 * stages, network), simulated(pipeline, 7 * stages, network, True)
        assert short[:-1] == pytest.approx(whole[:-1], rel=0.02)
        last, expected = (
            max((span.ready for span in spans), default=0) for spans in (short.spans, whole.spans)
        )
        assert last == pytest.approx(expected, rel=0.02)


def test_layouts_use_all_gpus_and_the_whole_batch() -> None:
    for model in MODELS:
        for gpus in (8, 128, 1024):
            for schedule in SCHEDULES:
                for layout in layouts(model, gpus, schedule):
                    assert layout.stages * layout.pipelines == gpus
                    assert layout.samples * layout.pipelines * layout.minibatches == model.batch
                    assert layout.pipelines % layout.together == 0
                    assert layout.stages % min(layout.stages, HOST // layout.together) == 0


def test_shares_add_up_and_free_things_have_none(folder: Path) -> None:
    for gpus, schedule in ((8, "1f1b"), (32, "gpipe"), (32, "2bw")):
        point = best_point(SMALL, gpus, schedule, KEEP, 12.5e9, folder)
        assert point is not None
        assert not point.lacks
        assert sum(point.shares.values()) == pytest.approx(1, abs=0.01)
        assert point.shares["swap"] == 0
    one_host, slow = (best_point(SMALL, 8, "1f1b", KEEP, card, folder) for card in (50e9, 1e6))
    assert one_host == slow, "one host has no use for its network card"


def test_layers_repeat_the_measured_blocks() -> None:
    two = Profile(
        tuple(BlockCost(name, 1, 1, 1, 0, 0, 0, 0) for name in "abcde"), DeviceCost(1, 1, 1), INSIDE, 1
    )
    assert "".join(block.name for block in with_layers(two, 2).blocks) == "abcde"
    assert "".join(block.name for block in with_layers(two, 4).blocks) == "abcbcbcde"
