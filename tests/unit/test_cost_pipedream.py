"""PipeDream's graph.txt as a profile."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawing import draws
from tests.unit.test_cost_files import examples
from vpipe.cost import read_any_profile, read_pipedream_graph
from vpipe.errors import VPipeError
from vpipe.plan import plan


def node(
    number: int, forward: float = 1.0, backward: float = 2.0, size: object = 4.0, weights: float = 8.0
) -> str:
    costs = f"forward_compute_time={forward}, backward_compute_time={backward}"
    return (
        f"node{number} -- Layer{number}(a, b) -- {costs}, activation_size={size}, parameter_size={weights}\n"
    )


def edge(source: int, reader: int) -> str:
    return f"\tnode{source} -- node{reader}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "graph.txt"


def test_the_example_of_the_docs(file: Path) -> None:
    file.write_text(examples("Profile")[2])
    found = read_any_profile(file).blocks
    assert [block.name for block in found] == ["Linear(8, 8)", "Linear(8, 2)"]
    assert [block.forward for block in found] == pytest.approx([0.0012, 0.0004])
    assert [block.input_gradient for block in found] == pytest.approx([0.0012, 0.0004])
    assert [block.weight_gradient for block in found] == pytest.approx([0.0012, 0.0004])
    assert [block.boundary_bytes for block in found] == [12, 0]
    assert [block.kept_bytes for block in found] == [12, 4]
    assert [block.parameter_bytes for block in found] == [288, 72]


def test_parallel_branches_lie_in_one_block(file: Path) -> None:
    """1 - 2 - (3 | 4) - 5 - 6, with lines and edges in any order, and a stage that PipeDream chose."""
    file.write_text(
        node(6) + node(1, 500.0, size=10) + node(2, size=20) + node(3).rstrip() + " -- stage_id=0\n" + node(5)
        + node(4, weights=0)
        + edge(5, 6) + edge(1, 2) + edge(2, 3) + edge(2, 4) + edge(4, 5) + edge(3, 5)
    )  # fmt: skip
    found = read_pipedream_graph(file, batch_size=32)
    assert [block.name for block in found.blocks] == [
        "Layer1(a, b)",
        "Layer2(a, b)",
        "Layer3(a, b) ... Layer5(a, b)",
        "Layer6(a, b)",
    ]
    assert [block.forward for block in found.blocks] == pytest.approx([0.5, 0.001, 0.003, 0.001])
    assert [block.weight_gradient for block in found.blocks] == pytest.approx([0.001, 0.001, 0.002, 0.001])
    assert [block.boundary_bytes for block in found.blocks] == [10, 20, 4, 0]
    assert found.batch_size == 32


def test_a_coarse_block_is_cut_behind_every_layer(file: Path) -> None:
    """The first layer's value is read by all others, as an encoder's is: 1 - 2 - 3 - 4, 1 - 3, 1 - 4."""
    layers = "".join(node(number, size=10**number) for number in (1, 2, 3, 4))
    file.write_text(layers + edge(1, 2) + edge(2, 3) + edge(3, 4) + edge(1, 3) + edge(1, 4))
    found = read_any_profile(file).blocks
    assert [block.name for block in found] == [f"Layer{number}(a, b)" for number in (1, 2, 3, 4)]
    assert [block.boundary_bytes for block in found] == [10, 110, 1010, 0]


def test_no_block_holds_most_of_a_decoder(file: Path) -> None:
    """As in GNMT: 1 is read by all of 5 to 8, which would be a block of 41 % of all compute."""
    sizes = {1: 5.0, 2: 18.0, 3: 18.0, 4: 18.0, 5: 10.0, 6: 11.0, 7: 10.0, 8: 10.0}
    layers = "".join(node(number, forward, 0.0) for number, forward in sizes.items())
    chain = "".join(edge(number, number + 1) for number in range(1, 8))
    file.write_text(layers + chain + "".join(edge(4, reader) for reader in (6, 7, 8)))
    profile = read_any_profile(file)
    assert max(block.forward for block in profile.blocks) == pytest.approx(0.018)
    # Two ranks share it almost evenly, which they could not with that block.
    assert plan(profile, 2, schedule="pipedream").seconds == pytest.approx(0.05, rel=0.2)


def test_loading_data_is_no_compute(file: Path) -> None:
    loads = node(1, 80.0, 0.0, 100, 0).replace("Layer1(a, b)", "Input0")
    file.write_text(loads + node(2) + node(3) + edge(1, 2) + edge(2, 3))
    blocks = read_any_profile(file).blocks
    assert [block.forward for block in blocks] == pytest.approx([0.001, 0.001])
    assert [block.boundary_bytes for block in blocks] == [4, 0]


def test_raw_inputs_are_never_sent(file: Path) -> None:
    file.write_text(
        node(1, 0, 0, 100, 0)
        + node(2)
        + node(3)
        + node(4, 0, 0, 100, 0)
        + edge(1, 2)
        + edge(1, 3)
        + edge(2, 3)
        + edge(4, 3)
    )
    assert [block.boundary_bytes for block in read_any_profile(file).blocks] == [4, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (node(1) + node(1), "line 2: node 'node1' stands twice"),
        (node(1) + edge(1, 2), "line 2: the edge names 'node2', which is no node"),
        (node(1) + "\tnode1 node2\n", "line 2: "),
        (node(1) + "node2\n", "line 2: 'node2' is no node: write `node1 -- name -- forward"),
        (node(1, forward=-1), "line 1: forward_compute_time is '-1': expected a number, 0 or more"),
        (node(1, size="[1; x]"), "line 1: activation_size is '[1; x]'"),
        (node(1, size="nan"), "line 1: activation_size is 'nan'"),
        (node(1).replace("parameter_size", "size"), "line 1: "),
        (node(1) + node(2) + edge(1, 2) + edge(2, 1), "the edges form a circle through 'Layer1(a, b)'"),
    ],
)
def test_mistakes(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(VPipeError) as caught:
        read_any_profile(file)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(file))


numbers = st.integers(1, 6)
lines = st.builds(node, numbers, st.floats(), st.floats(), st.floats() | st.text(max_size=4)) | st.builds(
    edge, numbers, numbers
)


@draws(60)
@given(st.lists(lines | st.text(max_size=8), min_size=1, max_size=8))
def test_any_text_is_a_profile_or_a_clear_error(file: Path, parts: list[str]) -> None:
    file.write_text("".join(parts), encoding="utf-8", errors="surrogatepass")
    with suppress(VPipeError):
        assert read_pipedream_graph(file).blocks


@draws(60)
@given(
    st.integers(1, 8).flatmap(
        lambda n: st.tuples(st.just(n), st.sets(st.tuples(st.integers(1, n), st.integers(1, n))))
    )
)
def test_nothing_is_lost(file: Path, graph: tuple[int, set[tuple[int, int]]]) -> None:
    count, pairs = graph
    file.write_text(
        "".join(node(n) for n in range(1, count + 1)) + "".join(edge(a, b) for a, b in sorted(pairs) if a < b)
    )
    found = read_pipedream_graph(file).blocks
    assert sum(block.forward for block in found) == pytest.approx(0.001 * count)
    assert sum(block.backward for block in found) == pytest.approx(0.002 * count)
    assert sum(block.parameter_bytes for block in found) == 8 * count
    assert found[-1].boundary_bytes == 0
