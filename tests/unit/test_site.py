"""The documentation as a site: every link leads somewhere, and a browser needs no network to show and search it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vpipe
from tests.pages import ROOT

pytestmark = pytest.mark.long  # CI builds the site too; links of the pages are checked by test_docs.py


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    return folder


def test_nothing_is_fetched(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(\w+:)?//", page.read_text()
        )
        assert loaded == [], page
    for style in site.rglob("*.css"):
        assert re.search(r"url\(\"?https?:", style.read_text()) is None, style


def test_the_reference_shows_every_name_with_its_arguments(site: Path) -> None:
    page = (site / "api.html").read_text()
    for name in vpipe.__all__:
        assert f'<h2 id="{name.lower()}"' in page
    assert page.count("Parameters:") > 15
    assert "recompute_ratio" in page


def test_the_search_works_from_files(site: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("there is no chromium to open the site with")
    address = f"{(site / 'index.html').as_uri()}?q=stashing"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    profile = f"--user-data-dir={site.parent / 'profile'}"
    ended = subprocess.run([browser, *options, profile, address], capture_output=True, text=True, timeout=120)
    assert re.search(r'md-search-result__meta">\d+ matching documents', ended.stdout)
