"""Training over NCCL, as the stand-in keeps its rules: no schedule waits for ever, and all compute the same."""

import os
from collections.abc import Callable
from itertools import groupby, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import models
from tests.examples import example, varied
from tests.fake_nccl import SCHEDULES, FakeHub, joined_pair, run_on
from vpipe import Pipeline
from vpipe.communication import InProcessHub, Key, ProcessWorld
from vpipe.communication.nccl import prepare_environment
from vpipe.errors import PeerError, VPipeError
from vpipe.pipeline.threads import run_ranks
from vpipe.schedule import Op, Rules
from vpipe.weights import optimizer_factory

COUNT = 12
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
Result = tuple[list[float], dict[str, Tensor] | None]
Work = Callable[[Pipeline, list[Any]], list[float]]


def train(pipe: Pipeline, data: list[Any]) -> list[float]:
    return [loss for _, loss in pipe.train(data)]


def evaluate_and_leave(pipe: Pipeline, data: list[Any]) -> list[float]:
    """Evaluations before, within and after the training; a flush within; the loop left early and begun again."""
    seen = [pipe.evaluate(data[:3])]
    for update, loss in pipe.train(data):
        seen.append(loss)
        if update == 0:
            seen.append(pipe.evaluate(data[:5]))
        if update == 1:
            pipe.flush()
            break
    seen += [loss for _, loss in pipe.train(data[:8])]
    return [*seen, pipe.evaluate(data[:2])]


def run(hub: InProcessHub, model: models.Example, schedule: str, work: Work, **options: Any) -> list[Result]:
    module, batch, loss_fn = model

    def on_rank(world: Any) -> Result:
        with Pipeline(
            module,
            batch,
            optimizer=optimizer_factory("sgd", 0.1),
            loss_fn=loss_fn,
            schedule=schedule,
            world=world,
            **SCHEDULES[schedule] | options,
        ) as pipe:
            losses = work(pipe, varied(batch, COUNT))
            if isinstance(hub, FakeHub):
                check_rules(hub, pipe)
            return losses, pipe.full_state_dict()

    return run_on(hub, on_rank) if isinstance(hub, FakeHub) else run_ranks(hub.size, on_rank, hub=hub)


def check_rules(hub: FakeHub, pipe: Pipeline) -> None:
    """On one rank, when the pipeline is empty and all ranks have come here."""
    pipe.world.all_gather("trained", None)
    world, nccl = hub.worlds[pipe.rank], hub.nccl
    assert nccl.host_waits == 0, "a wait blocked the host"
    assert world.made == len(world.joined), "a communicator was made by its first message"
    for (name, ranks), communicator in nccl.communicators.items():
        assert not any(communicator.queues.values()), f"something is left on {name}"
        if name in ("up", "down"):
            sender, receiver = ranks if name == "up" else reversed(ranks)
            assert set(communicator.posted[sender]) == {"send"}
            assert set(communicator.posted[receiver]) == {"receive"}
    for peer, channel in world.nccl_channels.items():
        sent = hub.worlds[peer].nccl_channels[pipe.rank].sends
        assert channel.receives == sent, "receives are posted in the order of the sends"
    pipe.world.all_gather("compared", None)


def compare(model: models.Example, schedule: str, ranks: int, work: Work = train, **options: Any) -> FakeHub:
    """The same bits as over the channel of threads."""
    hub = FakeHub(ranks)
    expected = run(InProcessHub(ranks), model, schedule, work, **options)
    found = run(hub, model, schedule, work, **options)
    for losses, _ in found:
        assert losses == expected[0][0]
    state, before = found[0][1], expected[0][1]
    assert state is not None
    assert before is not None
    for name, tensor in before.items():
        assert torch.equal(state[name], tensor), name
    return hub


@pytest.mark.parametrize("ranks", [2, 3])
@every_schedule
def test_every_schedule_with_skips_and_tied_weights(capture_once: None, schedule: str, ranks: int) -> None:
    compare(example("bert", layers=4), schedule, ranks)


@every_schedule
def test_without_receives_that_are_posted_ahead(
    capture_once: None, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vpipe.runtime.prefetch.AHEAD", 0)
    compare(example("sequential"), schedule, 2)


@every_schedule
def test_evaluation_and_flush(capture_once: None, schedule: str) -> None:
    compare(example("sequential"), schedule, 2, evaluate_and_leave)


def long(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.long)


REPLICAS = [
    ("gpipe", (2, 1)),
    ("1f1b", (2, 2)),
    ("interleaved", (2, 2)),
    ("zb-h1", (1, 3)),
    ("zb-v", (2, 2)),
    ("pipedream", (3, 2)),
    ("2bw", (2, 1)),
    long("1f1b", (4, 1)),
    long("gpipe", (3, 2)),
    long("zb-h1", (2, 2, 1)),
    long("interleaved", (3, 3)),
    long("zb-v", (3, 3)),
    long("pipedream", (2, 2, 1)),
    long("2bw", (1, 4)),
]


@pytest.mark.parametrize(("schedule", "replicas"), REPLICAS)
def test_replicas(capture_once: None, schedule: str, replicas: tuple[int, ...]) -> None:
    hub = compare(example("sequential"), schedule, sum(replicas), evaluate_and_leave, replicas=replicas)
    lists = {ranks for name, ranks in hub.nccl.communicators if name.startswith("gradients")}
    assert {len(ranks) for ranks in lists} == {count for count in replicas if count > 1}


@pytest.mark.parametrize("replicas", [(2, 1), (1, 2)])
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_replicas_that_share_a_tied_parameter(
    capture_once: None, schedule: str, replicas: tuple[int, ...]
) -> None:
    compare(example("bert", layers=4), schedule, sum(replicas), replicas=replicas)


@pytest.mark.long
@pytest.mark.parametrize("ahead", [0, 8])
@pytest.mark.parametrize("replicas", [None, (2, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("name", ["bert", "t5", "unet"])
@every_schedule
def test_everything_together(
    capture_once: None,
    schedule: str,
    name: str,
    replicas: tuple[int, ...] | None,
    ahead: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Skips, tied weights, replicas, evaluation, flush, with and without look-ahead."""
    if replicas == (2, 1, 1) and schedule in ("interleaved", "zb-v"):
        pytest.skip("these schedules have equal replicas")
    monkeypatch.setattr("vpipe.runtime.prefetch.AHEAD", ahead)
    model = example(name, layers=4) if name == "bert" else example(name)
    options = {} if replicas is None else {"replicas": replicas}
    compare(model, schedule, sum(replicas or (1, 1, 1)), evaluate_and_leave, **options)


@pytest.mark.parametrize("when", [0, 9])
@every_schedule
def test_a_rank_that_fails_ends_the_others(capture_once: None, schedule: str, when: int) -> None:
    """Nobody waits for ever, and communicators on which something is under way are not waited for."""
    hub = FakeHub(3)

    def failing(pipe: Pipeline, data: list[Any]) -> list[float]:
        done = 0

        def fail(_: Any) -> None:
            nonlocal done
            done += 1
            if pipe.rank == 1 and done > when:
                raise VPipeError("on purpose")

        pipe.on_action(fail)
        return train(pipe, data)

    with pytest.raises(VPipeError, match="on purpose"):
        run(hub, example("sequential"), schedule, failing)
    assert set(hub.nccl.closed.values()) == {"aborted"}


def test_a_run_that_ends_well_shuts_its_communicators_down(capture_once: None) -> None:
    hub = compare(example("sequential"), "1f1b", 2)
    assert set(hub.nccl.closed.values()) == {"shut down"}


def derived(pipe: Pipeline, updates: int) -> dict[tuple[int, int], list[tuple[bool, int, int]]]:
    """(backward, the stage that reads the value, minibatch) of all messages of each pair, by the programs alone."""
    schedule, found = pipe.schedule, {}
    assert schedule.minibatches is not None
    for update in range(updates):
        for rank in range(schedule.num_ranks):
            for action in schedule.program(rank):
                if action.op in (Op.SEND_F, Op.SEND_B):
                    for op, stage, sender, reader, receiver in Rules(schedule).channels(action):
                        end = reader if op is Op.SEND_F else stage
                        number = update * schedule.minibatches + action.minibatch
                        found.setdefault((sender, receiver), []).append((op is Op.SEND_B, end, number))
    return found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_messages_are_posted_in_the_order_that_the_programs_give(capture_once: None, schedule: str) -> None:
    """Both ends could have derived the order that the sender announces."""
    hub, ranks = FakeHub(3), range(3)

    def work(pipe: Pipeline, data: list[Any]) -> list[float]:
        losses = train(pipe, data)
        names = list(pipe.handler.tensor_tags)
        channels = hub.worlds[pipe.rank].nccl_channels
        expected = derived(pipe, len(losses))
        for peer in ranks:
            if peer != pipe.rank:
                keys = [(bool(k.stream % 2), names[k.stream // 2], k.number) for k in channels[peer].sends]
                seen = [(b, int(name.split()[-1]), m) for b, name, m in keys if " for stage " in name]
                assert [one for one, _ in groupby(seen)] == expected.get((pipe.rank, peer), [])
        return losses

    run(hub, example("sequential"), schedule, work)


# The channel


def send_some(count: int, size: int = 4) -> tuple[Any, Any]:
    a, b = joined_pair(buffer=8, timeout=100.0)
    for number in range(count):
        a.send(Key(0, number), torch.full((size,), float(number)))
    return a, b


def test_sent_tensors_are_let_go_when_they_have_arrived() -> None:
    a, b = send_some(5)
    assert len(a._sent) == 5
    for number in range(5):
        b.receive(Key(0, number), (4,), torch.float32)
    a.send(Key(1, 0), torch.ones(4))
    assert [sent.stream for sent in a._sent] == [1], "as many as are under way, not as many as fit"


def test_one_receive_is_posted_ahead() -> None:
    _, b = send_some(5)
    for number in range(5):
        b.expect(Key(0, number), (4,), torch.float32)
    assert list(b._posted) == [Key(0, 0)]
    b.receive(Key(0, 0), (4,), torch.float32)
    assert list(b._posted) == [Key(0, 1)], "the next, while the one that was taken is computed on"


def test_nothing_is_posted_that_was_not_sent() -> None:
    a, b = send_some(0)
    b.expect(Key(0, 0), (4,), torch.float32)
    assert not b._posted
    assert not a._communicators._up.nccl.communicator("up", (0, 1)).posted[1]


def test_a_message_that_is_wanted_first_is_received_behind_those_sent_before_it() -> None:
    _, b = send_some(3)
    assert b.receive(Key(0, 2), (4,), torch.float32)[0] == 2
    assert list(b._posted) == [Key(0, 0), Key(0, 1)]
    assert [b.receive(Key(0, n), (4,), torch.float32)[0] for n in range(2)] == [0, 1]
    assert b.leftovers() == []


def test_what_nccl_cannot_start_names_the_peer() -> None:
    a, _ = joined_pair(buffer=8, timeout=1.0)

    def refuse(*_: Any) -> Any:
        raise RuntimeError("NCCL error: unhandled system error\nLast error:")

    a._communicators._up = SimpleNamespace(send=refuse)
    with pytest.raises(PeerError, match=r"NCCL could not start a message to rank 1: NCCL error: unhandled"):
        a.send(Key(0, 0), torch.ones(1))


def test_announcements_that_fill_the_socket_wait_for_the_peer() -> None:
    a, _ = joined_pair(buffer=8, timeout=0.2)

    def announce(count: int) -> None:
        for number in range(count):
            a.send(Key(0, number), torch.empty(0))

    with pytest.raises(PeerError, match=r"waited 0.2 s for rank 1: room in the socket"):
        announce(1 << 20)


def test_ranks_between_which_nothing_was_to_go_have_no_communicator() -> None:
    a, _ = joined_pair(buffer=8, timeout=1.0)
    a._communicators.pairs = frozenset({(1, 0)})
    with pytest.raises(AssertionError, match="nothing was to be sent from rank 0 to 1"):
        a.send(Key(0, 0), torch.ones(1))


def test_all_ranks_make_their_communicators_in_one_order() -> None:
    hub = FakeHub(4)
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    groups = [(2, 3), (0, 1, 3), (0, 2)]

    def work(world: Any) -> list[str]:
        world.channels(8)
        world.connect(pairs if world.rank % 2 else reversed(pairs), groups if world.rank else groups[::-1])
        return list(world.joined)

    joined = run_on(hub, work)
    order = [f"{'up' if a < b else 'down'} {tuple(sorted((a, b)))}" for a, b in sorted(pairs)]
    order += [f"gradients {number} {ranks}" for number, ranks in enumerate(sorted(groups))]
    for names in joined:
        places = [order.index(name) for name in names]
        assert all(before < after for before, after in pairwise(places))


# The world


@pytest.mark.parametrize(
    ("channel", "local", "certain"),
    [("auto", "4", True), ("nccl", "8", True), ("auto", "8", False), ("gloo", "4", False)],
)
def test_cuda_is_prepared_where_nccl_is_certain(
    channel: str, local: str, certain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    prepare_environment(channel)
    found = [os.environ.get(name) for name in ("CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS")]
    assert found == (["EAGER", "32"] if certain else [None, None])


def test_what_the_user_has_set_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    prepare_environment("nccl")
    assert (os.environ["CUDA_MODULE_LOADING"], os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]) == ("LAZY", "1")


@pytest.mark.parametrize(
    ("groups", "native", "pairs"),
    [
        ([(0, 1)], set(), {(0, 2)}),  # one host: CUDA IPC adds them up
        ([(0, 2)], {(0, 2)}, {(0, 2)}),
        ([(0, 1, 2)], {(0, 1, 2)}, {(0, 2)}),  # NCCL connects some of them
        ([(0, 2, 3)], set(), {(0, 2), (2, 0), (0, 3), (3, 0)}),  # but refuses two on one card
    ],
)
def test_nccl_adds_up_where_it_connects_cards(
    groups: list[tuple[int, ...]],
    native: set[tuple[int, ...]],
    pairs: set[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks 0 and 1 are on one host, 2 and 3 on one card of another."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world: Any = ProcessWorld()
    world._places = [SimpleNamespace(gpu=gpu) for gpu in ("a", "b", "c", "c")]
    world._nccl_pairs = {(a, b) for a in range(4) for b in range(4) if (a < 2) != (b < 2)}
    opened = []
    world._communicators = SimpleNamespace(open=lambda *what: opened.append(what))
    world.connect([(0, 2), (0, 1)], groups)
    assert opened == [(pairs, native)]
