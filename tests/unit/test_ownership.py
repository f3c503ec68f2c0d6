"""What another user has put into a shared folder is not taken for ours (row 36 of docs/reliability.md)."""

import os
import tempfile
from pathlib import Path

import pytest

from vpipe.errors import VPipeError
from vpipe.system import ownership
from vpipe.system.ownership import COMPILER_CACHE, is_ours, own_compiler_cache
from vpipe.train.save_policy import find_checkpoint

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")


@as_root
def test_files_of_others_are_not_ours(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "file"
    file.parent.mkdir()
    file.touch()
    assert is_ours(file)
    os.chown(file, NOBODY, NOBODY)
    assert not is_ours(file)
    os.chown(file, 0, 0)
    os.chown(file.parent, NOBODY, NOBODY)  # who owns the folder can put another file in its place
    assert not is_ours(file)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    assert not is_ours(link)
    assert not is_ours(tmp_path / "none")


@as_root
def test_resume_auto_skips_runs_of_others_and_says_so(tmp_path: Path) -> None:
    run = tmp_path / "20260101-000000"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yml").touch()
    said: list[str] = []
    assert find_checkpoint("auto", tmp_path, said.append) is None
    assert said == []
    os.chown(run / "config.yml", NOBODY, NOBODY)
    assert find_checkpoint("auto", tmp_path, said.append) is None
    assert said == [f"{run} is skipped: it belongs to another user; name it to resume from it"]


def test_torchs_folder_of_compiled_code_is_made_for_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COMPILER_CACHE, "")
    monkeypatch.delenv(COMPILER_CACHE)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ownership.getpass, "getuser", lambda: "me")
    own_compiler_cache()
    folder = tmp_path / "torchinductor_me"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.environ[COMPILER_CACHE] == str(folder)
    own_compiler_cache()


@pytest.mark.parametrize("trap", ["link", "open", pytest.param("foreign", marks=as_root)])
def test_compiled_code_of_others_is_not_run(
    trap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COMPILER_CACHE, "")
    monkeypatch.delenv(COMPILER_CACHE)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ownership.getpass, "getuser", lambda: "me")
    folder, planted = tmp_path / "torchinductor_me", tmp_path / "planted"
    if trap == "link":
        planted.mkdir()
        folder.symlink_to(planted)
    else:
        folder.mkdir()
        folder.chmod(0o777 if trap == "open" else 0o755)
    if trap == "foreign":
        os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(
        VPipeError, match="where another user can write: remove it, or name a folder of your own"
    ):
        own_compiler_cache()
