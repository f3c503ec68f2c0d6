"""Documents and pairs: read in a fixed order from files, folders and the standard library; every mistake named."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vpipe.data import read_documents, read_pairs
from vpipe.data.pairs import library_pairs
from vpipe.data.text import library_sources, split_text
from vpipe.errors import ConfigError


def write(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def mistake(path: Path, read: Callable[[Path], object] = read_documents) -> str:
    """The one line that says what is wrong with the data at `path`."""
    with pytest.raises(ConfigError) as raised:
        read(path)
    message = str(raised.value)
    assert message.startswith(f"data_dir is {str(path)!r}: ")
    assert "\n" not in message
    return message


def test_folder_is_read_in_the_order_of_its_paths_without_what_is_hidden(tmp_path: Path) -> None:
    files = {"b.txt": "b", "a/z.md": "az", "a/中文.txt": "你好", "a.py": "a", ".git/x": "no", "a/.x": "no"}
    assert read_documents(write(tmp_path, files)) == ["a", "az", "你好", "b"]
    assert read_documents(tmp_path / "a" / "中文.txt") == ["你好"]


def test_blank_files_are_no_documents_and_marks_of_other_systems_go(tmp_path: Path) -> None:
    write(tmp_path, {"1": " \n", "2": b"\xef\xbb\xbfone\r\ntwo\r\n"})
    assert read_documents(tmp_path) == ["one\ntwo\n"]


def test_large_file_is_split_at_blank_lines(tmp_path: Path) -> None:
    paragraph = "words " * 100 + "\n\n"
    write(tmp_path, {"large.txt": paragraph * 4000})
    documents = read_documents(tmp_path)
    assert len(documents) == 3
    assert all(document.endswith("\n\n") for document in documents)
    assert "".join(documents) == paragraph * 4000


@given(st.text(alphabet="ab \n", max_size=60), st.integers(1, 8))
def test_pieces_make_up_the_text(text: str, longest: int) -> None:
    pieces = list(split_text(text, longest))
    assert "".join(pieces) == text
    assert all(1 <= len(piece) <= longest for piece in pieces) or not text


def test_standard_library_is_text_that_every_machine_has() -> None:
    sources = library_sources(1_000_000)
    assert sources == library_sources(1_000_000)
    assert 500_000 < sum(len(source.encode()) for source in sources) <= 1_000_000
    assert sources[0].startswith('"""Record of phased-in incompatible language changes.')


def test_a_python_without_sources_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ConfigError, match="data_dir is not given, and this Python has no source"):
        read_documents(None)


def test_library_leaves_out_tests_and_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: dict[str, str | bytes] = {
        "b.py": "b",
        "a.py": "a",
        "json/c.py": "c",
        "test/x.py": "x",
        "json/tests/x.py": "x",
        "site-packages/x.py": "x",
        "idlelib/x.py": "x",
        "__pycache__/x.py": "x",
        "_sysconfigdata_linux.py": "x",
        "config-3.11/x.py": "x",
        "latin.py": b"\xe9",
        "LICENSE.txt": "x",
    }
    write(tmp_path, files)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert library_sources() == ["a", "b", "c"]


def test_missing_path(tmp_path: Path) -> None:
    assert "there is nothing at that place: give a file or folder" in mistake(tmp_path / "none")
    assert "there is nothing at that place: give a file or folder" in mistake(tmp_path / "none", read_pairs)


def test_empty_folder_and_empty_file(tmp_path: Path) -> None:
    assert "the folder has no files" in mistake(tmp_path)
    write(tmp_path, {".hidden": "text"})
    assert "the folder has no files" in mistake(tmp_path)
    write(tmp_path, {"blank": " \n\t\n", "empty": ""})
    for path in (tmp_path, tmp_path / "blank", tmp_path / "empty"):
        assert "it holds no text" in mistake(path)


def test_binary_files_are_named(tmp_path: Path) -> None:
    write(tmp_path, {"good": "text", "zero": b"ab\0c", "latin": "café".encode("latin-1")})
    assert f"{tmp_path / 'zero'} is binary (byte 2 is zero)" in mistake(tmp_path / "zero")
    assert f"{tmp_path / 'latin'} is not UTF-8 (byte 3 is 0xe9)" in mistake(tmp_path)


def test_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(file))

    write(tmp_path, {"locked": "text"})
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert f"{tmp_path / 'locked'} cannot be read: Permission denied" in mistake(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_pipe_is_no_data(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "it is neither a file nor a folder" in mistake(tmp_path / "pipe")
    assert "the folder has no files" in mistake(tmp_path)


def test_pairs_are_the_lines_of_two_files(tmp_path: Path) -> None:
    write(tmp_path, {"target.zh": "你好\n世界\u2028和平\n\n x\n", "source.en": "hello\nworld\nno\n\n"})
    assert read_pairs(tmp_path) == [("hello", "你好"), ("world", "世界\u2028和平")]


def test_pairs_that_are_none(tmp_path: Path) -> None:
    write(tmp_path, {"a": "1\n2\n"})
    assert "it is a file: translation reads a folder with two aligned files" in mistake(
        tmp_path / "a", read_pairs
    )
    assert "the folder has 1 files: translation reads exactly two" in mistake(tmp_path, read_pairs)
    write(tmp_path, {"b": "1\n2\n3"})
    assert "a has 2 lines, but b has 3: line by line" in mistake(tmp_path, read_pairs)
    write(tmp_path, {"b": "\n\n"})
    assert "no line has text in both files" in mistake(tmp_path, read_pairs)


def test_pairs_of_the_standard_library() -> None:
    pairs = library_pairs(400_000)
    assert len(pairs) == len(set(pairs)) > 100
    assert all(text and words and "_" not in words and "\n" not in text for text, words in pairs)
