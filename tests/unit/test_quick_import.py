"""What transformers looks up when it is imported is remembered, and looked up again when files have changed."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import import_utils

from vpipe.train import quick_import

MODEL = '__all__ = ["Bert", "BertConfig"]\n'


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VPIPE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    for name, file in (
        ("bert", "modeling_bert"),
        ("bert", "tokenization_bert_fast"),
        ("gpt", "configuration_gpt"),
    ):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / f"{file}.py").write_text(MODEL)
    (folder / "__init__.py").write_text("")
    return folder


def test_the_names_of_models_are_read_again_only_when_a_file_has_changed(models: Path) -> None:
    real: Any = getattr(
        import_utils.create_import_structure_from_path,
        "__wrapped__",
        import_utils.create_import_structure_from_path,
    )
    calls = []

    def create(path: Any) -> Any:
        calls.append(path)
        import_utils.create_import_structure_from_path.cache_clear()
        return real(path)

    quick = quick_import.structure(create)
    expected = real(str(models))
    assert expected["bert"], "the libraries that each file needs, and its names"
    assert quick(models) == quick(models / "__init__.py") == expected
    assert calls == [models]
    changed = models / "bert" / "modeling_bert.py"
    changed.write_text('__all__ = ["Bart"]\n')
    os.utime(changed, ns=(1, 1))
    assert quick(models) != expected
    assert calls == [models, models]
    assert quick(models / "bert") == real(str(models / "bert")), "parts are not remembered"


def test_packages_are_listed_again_only_when_one_was_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = {"yaml": ["PyYAML"]}
    assert quick_import.packages(lambda: found) == found
    assert quick_import.packages(dict) == found
    (tmp_path / "torch-2.9.dist-info").mkdir()
    assert quick_import.packages(dict) == {}


def test_an_import_goes_through_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: Path) -> None:
    package = tmp_path / "library"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "lookups.py").write_text(
        "import importlib.metadata\nPACKAGES = importlib.metadata.packages_distributions()\n"
        "def create_import_structure_from_path(path):\n    return {'bert': {'Bert'}}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(quick_import, "MODULE", "library.lookups")
    monkeypatch.setattr(quick_import, "packages", lambda real: "remembered")
    before = list(sys.meta_path)
    quick_import.install()
    quick_import.install()
    assert len(sys.meta_path) == len(before) + 1
    import library.lookups  # type: ignore[import-not-found]

    assert sys.meta_path == before
    assert library.lookups.PACKAGES == "remembered"
    assert library.lookups.create_import_structure_from_path(models) == {"bert": {"Bert"}}
    assert len(list((tmp_path / "cache" / quick_import.KIND).iterdir())) == 1
