"""Events: what a run records is its schedule, action by action, with times, bytes and versions that add up."""

import json
import threading
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import pytest

from tests import models
from tests.examples import varied
from vpipe import Pipeline
from vpipe.communication import CommunicationHandler
from vpipe.errors import ConfigError
from vpipe.observe.action_figures import counted_memory, counts
from vpipe.observe.figures import figures_of
from vpipe.observe.trace import messages, write_trace
from vpipe.pipeline.threads import run_ranks
from vpipe.record.events import Events, MemorySamples, RankEvents, Recorded, StageBytes, read_events
from vpipe.runtime import clocks
from vpipe.runtime.clocks import ClockOffset, align_clocks, best_offset
from vpipe.schedule import Action, Op
from vpipe.weights import optimizer_factory

MINIBATCHES = 12


class Times(NamedTuple):
    """A rank's seconds by its own counters, and all that its training took."""

    compute: float
    send: float
    wait: float
    took: float


class Run:
    """A small run of threads, its events on disk, and what its parts say of it independently."""

    def __init__(self, schedule: str, ranks: int, folder: Path, **options: Any) -> None:
        model, batch, loss_fn = models.sequential()
        data = varied(batch, MINIBATCHES)

        def train(world: Any) -> tuple[list[Action], tuple[int, int, float], Any, Times]:
            optimizer = optimizer_factory("sgd", 0.05, weight_decay=0.0)
            with Pipeline(
                model,
                batch,
                optimizer=optimizer,
                loss_fn=loss_fn,
                schedule=schedule,
                world=world,
                **options,
            ) as pipe:
                pipe.runtime.events.clock = align_clocks(pipe.handler)
                handler = pipe.handler
                began = perf_counter()
                before = handler.bytes_sent, handler.bytes_received, handler.waited
                for _ in pipe.train(data):
                    pass
                after = handler.bytes_sent, handler.bytes_received, handler.waited
                took = perf_counter() - began
                figures = figures_of(pipe)
                pipe.evaluate(data[:2])
                held = {index: StageBytes(1000, 2000, 500) for index in pipe.runtime.stages}
                samples = MemorySamples("process")
                samples.add(perf_counter(), 2**20)
                pipe.runtime.events.write(folder, held, samples)
                sums = after[0] - before[0], after[1] - before[1], after[2] - before[2]
                return programs(pipe), sums, pipe.layout, Times(figures.compute, figures.send, sums[2], took)

        self.folder = folder
        reported = run_ranks(ranks, train)
        self.programs = [program for program, *_ in reported]
        self.sums = [sums for _, sums, *_ in reported]
        self.times = [times for *_, times in reported]
        self.layout = reported[0][2]
        self.events = read_events(folder)

    def training(self, rank: int) -> list[Recorded]:
        return [entry for entry in self.events[rank].actions if not entry.evaluation]


def programs(pipe: Pipeline) -> list[Action]:
    """The actions that the rank's schedule has for the data, by minibatch of the run."""
    length = pipe.schedule.minibatches
    if length is None:
        return list(pipe.schedule.program(pipe.rank, lambda minibatch: minibatch < MINIBATCHES))
    return [
        Action(stage, op, minibatch + offset)
        for offset in range(0, MINIBATCHES, length)
        for stage, op, minibatch in pipe.layout.program(pipe.rank, length)
    ]


@pytest.fixture(scope="module", params=["1f1b", "pipedream", "zb-h1"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    options = {} if request.param == "pipedream" else {"minibatches": 4}
    return Run(request.param, 3, tmp_path_factory.mktemp("run"), **options)


def test_events_are_the_program_action_by_action(run: Run) -> None:
    for rank, program in enumerate(run.programs):
        assert [entry.action for entry in run.training(rank)] == program


def test_times_follow_each_other_and_waits_lie_within(run: Run) -> None:
    for events in run.events:
        last = 0.0
        for entry in events.actions:
            assert last <= entry.start + 1e-8
            assert entry.start <= entry.end
            assert 0 <= entry.wait <= entry.duration + 1e-8
            last = entry.end


def test_bytes_and_waits_add_up_to_the_channels_own(run: Run) -> None:
    for rank, (sent, received, waited) in enumerate(run.sums):
        training = run.training(rank)
        assert sum(entry.sent for entry in training) == sent
        assert sum(entry.received for entry in training) == received
        assert sum(entry.wait for entry in training) <= waited + 1e-6  # a loss is waited for between actions


def test_backward_reads_the_version_of_its_forward_and_step_makes_the_next(run: Run) -> None:
    for rank in range(3):
        read: dict[int, int] = {}
        made = 0
        for entry in run.training(rank):
            _, op, minibatch = entry.action
            if op is Op.F:
                read[minibatch] = entry.version
                assert entry.version == made
            elif op in (Op.B, Op.I):
                assert entry.version == read[minibatch]
            elif op is Op.STEP:
                made += 1
                assert entry.version == made


def test_an_evaluation_is_marked(run: Run) -> None:
    for events in run.events:
        evaluated = [entry.action for entry in events.actions if entry.evaluation]
        assert {action.minibatch for action in evaluated if action.op is Op.F} == {0, 1}


def test_every_receive_is_the_end_of_one_message(run: Run) -> None:
    """The model is a chain, so each receive has exactly one sender, and no message arrives before it is sent."""
    found = list(messages(run.events))
    for _, sent, _, received in found:
        assert sent.start <= received.end
        assert sent.sent == received.received
    receives = [e.action for r in range(3) for e in run.training(r) if e.action.op in (Op.RECV_F, Op.RECV_B)]
    assert sorted(str(received.action) for _, _, _, received in found) == sorted(map(str, receives))


def test_the_trace_has_a_slice_an_action_and_its_arrows_lie_in_their_slices(run: Run) -> None:
    path = write_trace(run.folder)
    entries = json.loads(path.read_text())["traceEvents"]
    slices = [entry for entry in entries if entry["ph"] == "X"]
    assert len(slices) == sum(len(events.actions) for events in run.events)
    assert min(entry["ts"] for entry in slices) == 0
    for phase in ("s", "f"):
        for end in (entry for entry in entries if entry["ph"] == phase):
            own = [s for s in slices if s["tid"] == end["tid"]]
            assert any(s["ts"] <= end["ts"] <= s["ts"] + s["dur"] + 0.01 for s in own)
    counters = {entry["name"] for entry in entries if entry["ph"] == "C"}
    assert counters >= {
        "minibatches in flight, stage 0 on rank 0", "weight versions, stage 2 on rank 2",
        "memory by count, rank 1", "memory of the process, rank 2",
    }  # fmt: skip


def test_the_trace_keeps_the_rules_of_its_format(run: Run) -> None:
    """Of the Trace Event Format: what each kind of entry must have, and each arrow both its ends."""
    entries = json.loads(write_trace(run.folder).read_text())["traceEvents"]
    ends: dict[Any, list[Any]] = {}
    for entry in entries:
        assert entry["ph"] in ("M", "X", "C", "s", "f")
        assert isinstance(entry["name"], str)
        assert isinstance(entry["pid"], int)
        if entry["ph"] == "M":
            continue
        assert entry["ts"] >= 0
        if entry["ph"] == "C":
            assert all(isinstance(value, int | float) for value in entry["args"].values())
        else:
            assert isinstance(entry["tid"], int)
            assert entry["cat"]
        if entry["ph"] == "X":
            assert entry["dur"] >= 0
            assert entry["cname"]
        if entry["ph"] in "sf":
            ends.setdefault((entry["cat"], entry["name"], entry["id"]), []).append(entry)
    assert ends
    for pair in ends.values():
        start, finish = pair
        assert [start["ph"], finish["ph"], finish["bp"]] == ["s", "f", "e"]
        assert start["ts"] <= finish["ts"]
    by_op = {(entry["cat"], entry["cname"]) for entry in entries if entry["ph"] == "X"}
    assert len({cat for cat, _ in by_op}) == len(by_op)  # an operation has one colour


def test_shares_agree_with_what_the_trace_says(run: Run) -> None:
    """The ranks' own counters of computing, sending and waiting, against sums over the slices of the trace."""
    slices = [e for e in json.loads(write_trace(run.folder).read_text())["traceEvents"] if e["ph"] == "X"]
    for rank, times in enumerate(run.times):
        own = [e for e in slices if e["tid"] == rank and "of" not in e["args"]]
        waited = sum(1000 * e["args"].get("waited ms", 0) for e in own)
        sent = sum(e["dur"] for e in own if "SEND" in e["name"] or "REDUCE" in e["name"])
        computed = sum(
            e["dur"] - 1000 * e["args"].get("waited ms", 0)
            for e in own
            if not any(op in e["name"] for op in ("SEND", "RECV", "REDUCE"))
        )
        rounding = 0.01 * len(own)  # hundredths of a microsecond, for each slice
        assert 1e6 * times.compute == pytest.approx(computed, abs=rounding)
        assert 1e6 * times.send == pytest.approx(sent, abs=rounding)
        between = 1e6 * times.took - sum(e["dur"] for e in own)  # where a loss is waited for
        assert waited - rounding <= 1e6 * times.wait <= waited + between + rounding


def test_what_a_stage_held_is_what_the_schedule_lets_it_hold(run: Run) -> None:
    """Pipedream's stage s of P has P - s minibatches in flight and as many versions; a step ends all others."""
    for rank in range(3):
        held = list(counts(run.events[rank].actions, rank))
        assert held[-1].in_flight == 0
        assert held[-1].versions == 1
        if run.layout.schedule.name == "pipedream":
            assert max(count.in_flight for count in held) == 3 - rank
            assert max(count.versions for count in held) == 3 - rank


def test_a_full_ring_keeps_the_newest(tmp_path: Path) -> None:
    ring = Events(0, capacity=4)
    for minibatch in range(10):
        ring.add(Action(0, Op.F, minibatch), minibatch, minibatch + 0.5, 0.0, 0, 0, 0, False)
    assert [entry.action.minibatch for entry in ring.actions()] == [6, 7, 8, 9]
    ring.write(tmp_path)
    (read,) = read_events(tmp_path)
    assert read.lost == 6
    assert [entry.start for entry in read.actions] == pytest.approx([6, 7, 8, 9], abs=1e-8)


def test_counts_of_a_record_that_begins_in_the_middle() -> None:
    actions = [
        Recorded(Action(0, Op.B, 3), 0.0, 1.0, version=1),
        Recorded(Action(0, Op.STEP, 3), 1.0, 2.0, version=3),
        Recorded(Action(0, Op.F, 5), 2.0, 3.0, version=3),
        Recorded(Action(0, Op.B, 4), 3.0, 4.0, version=2),
    ]
    assert [(c.time, c.in_flight, c.versions) for c in counts(actions, 0)] == [
        (1.0, 1, 2),  # version 2 waits for the backward of minibatch 4
        (2.0, 2, 2),
        (4.0, 1, 1),
    ]


def test_gradients_are_counted_from_a_first_backward_to_the_end_of_its_update() -> None:
    """Weights of 100, optimizer state of 50 and 7 of a minibatch; two minibatches an update, then one."""
    actions = [
        Recorded(Action(0, Op.F, 0), 0.0, 1.0, version=0),
        Recorded(Action(0, Op.B, 0), 1.0, 2.0, version=0),
        Recorded(Action(0, Op.F, 1), 2.0, 3.0, version=0),
        Recorded(Action(0, Op.B, 1), 3.0, 4.0, version=0),
        Recorded(Action(0, Op.STEP, 1), 4.0, 5.0, version=1),
        Recorded(Action(0, Op.F, 2), 5.0, 6.0, version=1),
        Recorded(Action(0, Op.B, 2), 6.0, 7.0, version=1),
        Recorded(Action(0, Op.STEP, 2), 7.0, 8.0, version=2),
    ]
    line = counted_memory(RankEvents(0, tuple(actions), held={0: StageBytes(100, 50, 7)}))
    assert dict(line) == {0.0: 157, 2.0: 257, 4.0: 250, 5.0: 157, 7.0: 250, 8.0: 150}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    ring = Events(2, [(0, 1), (1, 2)])
    ring.clock = ClockOffset(5.0, 0.001)
    ring.add(Action(1, Op.RECV_F, 7), 10.0, 10.5, 0.25, 0, 4096, -1, False)
    ring.add(Action(1, Op.F, 7), 10.5, 11.0, 0.0, 0, 0, 6, True)
    ring.write(tmp_path)
    expected = (
        Recorded(Action(1, Op.RECV_F, 7), 15.0, 15.5, 0.25, 0, 4096, -1, False),
        Recorded(Action(1, Op.F, 7), 15.5, 16.0, 0.0, 0, 0, 6, True),
    )
    edges = ((0, 1), (1, 2))
    assert read_events(tmp_path) == [RankEvents(2, expected, 0, ClockOffset(5.0, 0.001), edges)]


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"format": "another"}', '{"format": "vpipe events 1", "origin": 0}']
)
def test_a_broken_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "events.0.json").write_text(text)
    with pytest.raises(ConfigError, match=r"events\.0\.json"):
        read_events(tmp_path)


def test_a_run_without_events(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []
    with pytest.raises(ConfigError, match="nothing to trace"):
        write_trace(tmp_path)


def test_the_quickest_answer_counts() -> None:
    slow, quick = (0.0, 103.0, 4.0), (10.0, 110.2, 10.4)
    assert best_offset([slow, quick]) == pytest.approx((100.0, 0.4))


def test_an_offset_within_its_own_uncertainty_is_none() -> None:
    assert best_offset([(10.0, 10.3, 10.4)]) == pytest.approx((0.0, 0.4))


def test_clocks_that_differ_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    shift: dict[int, float] = {}
    monkeypatch.setattr(
        clocks, "perf_counter", lambda: perf_counter() + shift.get(threading.get_ident(), 0.0)
    )

    def measure(world: Any) -> ClockOffset:
        shift[threading.get_ident()] = -50.0 * world.rank
        return align_clocks(CommunicationHandler(world))

    for rank, offset in enumerate(run_ranks(3, measure)):
        assert offset.seconds == pytest.approx(50.0 * rank, abs=offset.round_trip / 2 + 1e-6)
