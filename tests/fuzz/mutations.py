"""Bad files, made from good ones: what editors, disks and adversaries do to them.

A mutation is a few numbers drawn by hypothesis, applied to the good file; so a failing one shrinks to few and small
changes, and ten thousand of them take seconds.
"""

import copy
import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

DEEP: Any = 0
for _ in range(200):
    DEEP = [DEEP]

ODD_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 0.5, -0.0, 1e-320, 1e308, -1e308, 2**31, -(2**31), 2**53, 2**63, -(2**64),
    10**12, 10**30, 10**400, float("nan"), float("inf"), -float("inf"), "", " ", "0", "-1", "1e9", "nan", "x",
    "x" * 5000, "../../etc/passwd", "/etc/passwd", "a\0b", "; rm -rf /", "-oProxyCommand=touch x",
    "!!python/object:os.system",
    "\ud83d", "汉字", "\n", "stage-000.safetensors", "keep", "gpipe", [], {}, [[]], [0], ["x"], [None], {"": ""},
    {"x": 1}, {"0": [0]}, [1, 2, 3], [0.5, 2], list(range(40)), DEEP,
]  # fmt: skip
"""Values that a reader did not expect where they now stand."""

ODD_PIECES: list[bytes] = [
    b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\xc3\x28", b"\r", b"\n", b"\t", b" ", b",", b":", b"-", b"--", b"=",
    b"'", b'"', b"{", b"}", b"[", b"]", b"&a", b"*a", b"<<: *a\n",
    b"!!python/object/apply:os.system ['x']", b"!!bool x",
    b"!!timestamp x", b"!!int ''", b"!!binary '*'", b"%YAML 9.9\n", b"---\n", b"...", b"? [a]\n", b"1e999", b"NaN",
    b"Infinity", b"-1", b"9" * 30, b"9" * 5000, b"0x", b"1:30", b"x" * 5000, b"[" * 3000, b"{" * 3000,
    b'{"a":' * 3000, b"\xe2\x80\xa8", b"\xed\xa0\x80", b"0F0", b"1F", b"F", b"0STEP",
    b"0F99999999999", b"99999F0", "٣F٣".encode(),
]  # fmt: skip
"""Bytes that stand where nobody expected them."""

_small = st.integers(0, 1 << 16)


@st.composite
def damaged_bytes(draw: st.DrawFn, good: bytes) -> bytes:
    """A file that was cut short, overwritten, repeated or written into."""
    raw = bytearray(good)
    for _ in range(draw(st.integers(1, 3))):
        kind, where, much = draw(st.integers(0, 6)), draw(_small), draw(_small)
        where %= len(raw) + 1
        length = 1 + much % 64
        if kind == 0:
            del raw[where:]
        elif kind == 1 and where < len(raw):
            raw[where] ^= 1 << (much % 8)
        elif kind == 2:
            del raw[where : where + length]
        elif kind == 3:
            raw[where:where] = raw[where : where + length]
        elif kind == 4:
            raw[where : where + length] = bytes((much * step) % 256 for step in range(length))
        else:
            raw[where : where + (length if kind == 6 else 0)] = ODD_PIECES[much % len(ODD_PIECES)]
    return bytes(raw)


@st.composite
def damaged_lines(draw: st.DrawFn, good: bytes) -> bytes:
    """A text whose lines or cells were deleted, doubled, exchanged or rewritten."""
    lines = good.split(b"\n")
    for _ in range(draw(st.integers(1, 3))):
        kind, where, other = draw(st.integers(0, 4)), draw(_small) % len(lines), draw(_small)
        if kind == 0 and len(lines) > 1:
            del lines[where]
        elif kind == 1:
            lines.insert(where, lines[other % len(lines)])
        elif kind == 2:
            lines[where], lines[other % len(lines)] = lines[other % len(lines)], lines[where]
        else:
            for separator in (b", ", b",", b": ", b"=", b" "):
                if separator in lines[where]:
                    parts = lines[where].split(separator)
                    parts[other % len(parts)] = ODD_PIECES[draw(_small) % len(ODD_PIECES)]
                    lines[where] = separator.join(parts)
                    break
    return b"\n".join(lines)


@st.composite
def damaged_value(draw: st.DrawFn, good: Any) -> Any:
    """A tree of plain values of which parts were deleted, renamed, doubled, moved or replaced."""
    tree: Any = [copy.deepcopy(good)]
    for _ in range(draw(st.integers(1, 3))):
        places = _places(tree)
        holder, key = places[draw(_small) % len(places)]
        kind, other = draw(st.integers(0, 6)), draw(_small)
        if kind == 0 and holder is not tree:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            names = ["", "x", f"{key} ", f"{key}s", str(key).upper(), str(other)]
            holder[names[other % len(names)]] = holder.pop(key)
        elif kind == 2 and isinstance(holder, list) and holder is not tree:
            holder[key:key] = [holder[key]] * (1 + other % 3)
        elif kind == 3:
            source, name = places[other % len(places)]
            holder[key] = copy.deepcopy(source[name])
        elif kind == 4:
            holder[key] = [holder[key]]
        else:
            holder[key] = copy.deepcopy(ODD_VALUES[other % len(ODD_VALUES)])
    return tree[0]


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value of the tree; not of what lies too deep for anybody."""
    found: list[tuple[Any, Any]] = []
    level = [tree]
    for _ in range(12):
        inner: list[Any] = []
        for container in level:
            keys = list(container) if isinstance(container, dict) else range(len(container))
            found += [(container, key) for key in keys]
            inner += [container[key] for key in keys if isinstance(container[key], dict | list)]
        level = inner
    return found


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(ODD_VALUES),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
"""What has nothing to do with the good file."""


def written_json(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def bad_text(good: bytes) -> st.SearchStrategy[bytes]:
    """Bad variants of a text."""
    return st.one_of(damaged_lines(good), damaged_bytes(good), damaged_lines(good))


def bad_json(good: Any, write: Callable[[Any], bytes] = written_json) -> st.SearchStrategy[bytes]:
    """Bad variants of a JSON file; `write` makes the file of a damaged value."""
    values = damaged_value(good)
    return st.one_of(
        values.map(write), values.map(write), damaged_bytes(write(good)), plain_values.map(written_json)
    )
