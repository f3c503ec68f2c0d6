"""The profile's file: read, written, and every mistake in it."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawing import draws
from vpipe.cost import (
    BlockCost,
    DeviceCost,
    LinkCost,
    Profile,
    Tie,
    read_any_profile,
    read_profile,
    write_profile,
)
from vpipe.errors import VPipeError

DOCS = Path(__file__).parents[2] / "docs" / "formats.md"


def block(**changes: Any) -> dict[str, Any]:
    times = {"forward": 1.0, "input_gradient": 1.0, "weight_gradient": 1.0}
    return times | {"kept_bytes": 10, "boundary_bytes": 2, "parameter_bytes": 4} | changes


def profile(**changes: Any) -> dict[str, Any]:
    device = {"memory": 1000, "to_host": 10.0, "from_host": 10.0}
    return {
        "batch_size": 2,
        "device": device,
        "link": {"bandwidth": 5.0},
        "blocks": [block(), block()],
    } | changes


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "profile.json"


def mistake(path: Path, values: Any) -> str:
    path.write_text(json.dumps(values))
    with pytest.raises(VPipeError) as caught:
        read_any_profile(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def examples(section: str) -> list[str]:
    text = DOCS.read_text(encoding="utf-8").split(f"## {section}\n", 1)[1]
    return re.findall(r"```\w*\n(.*?)```", text, re.S)


def test_the_example_of_the_docs(file: Path) -> None:
    file.write_text(examples("Profile")[0])
    found = read_any_profile(file)
    assert found.batch_size == 8
    assert [entry.name for entry in found.blocks] == ["embedding", "layer 0", "layer 1", "head"]
    assert found.blocks[1] == BlockCost(
        "layer 0", 0.006, 0.006, 0.006, 0.0, 50_000_000, 4_000_000, 50_000_000
    )
    assert found.link == LinkCost(1e10, 2e-5)


def test_what_is_written_is_read(file: Path) -> None:
    written = Profile(
        blocks=(
            BlockCost("a", 1.5, 0.25, 0.5, 0.125, 100, 10, 40, 0.02, 0, 0.0625),
            BlockCost("b", 1, 1, 1, 0, 0, 0, 0, swapping=0.375, working_bytes=3, update_bytes=4),
        ),
        device=DeviceCost(2**40, 1e10, 2e10, 1e-4, workspace=2**26, swapped_in=3),
        link=LinkCost(1e9, 1e-6, sender_busy=True),
        batch_size=16,
        optimizer_ratio=1.0,
        links={(0, 1): LinkCost(2e9, 0.0), (1, 0): LinkCost(3e9, 1e-3)},
        fingerprint="abc",
        tied=(Tie(40, (0, 1)),),
    )
    write_profile(written, file)
    assert read_any_profile(file) == written
    assert len(file.read_text().splitlines()) < 20  # a line for each block and link


def test_what_may_be_left_out(file: Path) -> None:
    file.write_text(json.dumps(profile()))
    found = read_profile(file)
    assert found.link == LinkCost(5.0, 0.0, sender_busy=False)
    assert (found.optimizer_ratio, found.fingerprint, found.links) == (2.0, "", {})
    assert [entry.name for entry in found.blocks] == ["block 0", "block 1"]
    assert found.blocks[0].swapping == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": []}, "blocks is []: it must be a list with an object for each block"),
        ({"blocks": 3}, "blocks is 3: it must be a list"),
        ({"blocks": [block(), 7]}, "block 1: holds 7, not an object: write {"),
        (
            {"blocks": [block(), block(forward=-1)]},
            "block 1: forward is -1: it must be seconds, 0 or more",
        ),
        (
            {"blocks": [block(name="head", forward=float("nan"))]},
            "block 0 (head): forward is nan: it must be seconds, 0 or more",
        ),
        ({"blocks": [block(weight_gradient=float("inf"))]}, "block 0: weight_gradient is inf"),
        # Found by `make fuzz`: what is computed from such figures is infinite.
        ({"blocks": [block(forward=1e308)]}, "block 0: forward is 1e+308: it must be seconds, 0 or more"),
        ({"link": {"bandwidth": 1e-320}}, "link: bandwidth is 1e-320: it must be bytes a second"),
        ({"blocks": [block(kept_bytes=1.5)]}, "block 0: kept_bytes is 1.5: it must be bytes: a whole number"),
        ({"blocks": [block(kept_bytes=True)]}, "block 0: kept_bytes is true"),
        ({"blocks": [block(deferred_bytes=-1)]}, "block 0: deferred_bytes is -1: it must be bytes"),
        ({"blocks": [block(swapping=-1)]}, "block 0: swapping is -1: it must be seconds, 0 or more"),
        ({"blocks": [block(working_bytes=-1)]}, "block 0: working_bytes is -1: it must be bytes"),
        ({"blocks": [block(update_bytes=-1)]}, "block 0: update_bytes is -1: it must be bytes"),
        ({"blocks": [block(splitting=-1)]}, "block 0: splitting is -1: it must be seconds, 0 or more"),
        ({"blocks": [block(forward="1")]}, 'block 0: forward is "1"'),
        ({"blocks": [block(foward=1)]}, "block 0: unknown key \"foward\": did you mean 'forward'?"),
        ({"blocks": [{"forward": 1}]}, "block 0: input_gradient is missing: it must be seconds, 0 or more"),
        ({"link": {"bandwidth": 0}}, "link: bandwidth is 0: it must be bytes a second, more than 0"),
        ({"link": {}}, "link: bandwidth is missing"),
        ({"link": {"bandwidth": 1, "sender_busy": 1}}, "link: sender_busy is 1: it must be true or false"),
        ({"device": {"memory": 0}}, "device: memory is 0: it must be bytes: a whole number, 1 or more"),
        (
            {"device": {"memory": 1, "to_host": 1, "from_host": 1, "swapped_in": 1}},
            "device: swapped_in is 1: it must be minibatches: a whole number, 2 or more",
        ),
        ({"device": None}, "device: holds null, not an object"),
        ({"batch_size": 0}, "batch_size is 0: it must be samples of a minibatch: a whole number, 1 or more"),
        ({"batch_size": 10**400}, "batch_size is 100000"),
        ({"links": {}}, "links is {}: it must be a list"),
        (
            {"links": [{"from": 1, "to": 1, "bandwidth": 1}]},
            "link 0 of links: to is 1: it must be another rank",
        ),
        ({"format": "other"}, "format is \"other\": it must be 'vpipe profile 1', or left out"),
        (
            {"tied": [{"bytes": 1, "blocks": [0, 2]}]},
            "parameter 0 of tied: blocks is [0, 2]: it must be different",
        ),
        (
            {"tied": [{"bytes": 1, "blocks": [1, 1]}]},
            "parameter 0 of tied: blocks is [1, 1]: it must be different",
        ),
        ({"tied": [{"bytes": 1, "blocks": ["0", 1]}]}, "parameter 0 of tied: blocks is ['0', 1]: it must be"),
        ({"tied": [{"blocks": [0, 1]}]}, "parameter 0 of tied: bytes is missing"),
        ({"blocs": 1}, "unknown key \"blocs\": did you mean 'blocks'?"),
    ],
)
def test_mistakes(file: Path, changes: dict[str, Any], message: str) -> None:
    assert mistake(file, profile(**changes)).startswith(message)


def test_neither_format(file: Path) -> None:
    assert "neither a profile in JSON nor a graph.txt" in mistake(file, [1])
    with pytest.raises(VPipeError, match="cannot be read: No such file"):
        read_any_profile(file.parent / "nowhere.json")


def test_a_place_that_cannot_be_written(file: Path) -> None:
    file.write_text(json.dumps(profile()))
    with pytest.raises(VPipeError, match="cannot be written: Is a directory"):
        write_profile(read_profile(file), file.parent)


anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
keys = st.sampled_from([*profile(), "links", "optimizer_ratio", "format"])


@draws(60)
@given(
    st.dictionaries(keys, anything),
    st.dictionaries(st.sampled_from([*block(), "name"]), anything),
    st.booleans(),
)
def test_anything_else_is_a_clear_error(
    file: Path, top: dict[str, Any], entry: dict[str, Any], whole: bool
) -> None:
    values = profile(**({"blocks": [block(**entry)]} | top)) if whole else top
    file.write_text(json.dumps(values))
    with suppress(VPipeError):
        read_any_profile(file)


@draws(40)
@given(st.text() | st.text(alphabet='{}[]",:node -=\t\n1.eN').map(lambda text: "{" + text))
def test_any_text_is_a_clear_error(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(VPipeError):
        read_any_profile(file)
