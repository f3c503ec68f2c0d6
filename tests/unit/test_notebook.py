"""The notebook of examples/, run cell by cell, and what schedules, plans and runs show in notebooks."""

import base64
import json
import re
import signal
import threading
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.table import Table
from rich.text import Text

import vpipe
from tests.notebook import read_cells, run_cell
from vpipe.errors import ConfigError
from vpipe.schedule import build
from vpipe.schedule.picture import image
from vpipe.system.html import html_table

NOTEBOOK = Path(__file__).parents[2] / "examples/threads.ipynb"


def pictures(html: str) -> list[ElementTree.Element]:
    """The images of a page, each read as the XML that it must be."""
    found = re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', html)
    return [ElementTree.fromstring(base64.b64decode(data)) for data in found]


def words(picture: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in picture.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.long
def test_every_cell_runs_and_shows_its_drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    shown = [run_cell(source, names) for source in read_cells(NOTEBOOK, "code")]
    drawn = {type(value).__name__: value._repr_html_() for _, value in shown if value is not None}
    assert drawn.keys() == {"Schedule", "PlanResult", "Run"}
    assert [len(pictures(html)) for html in drawn.values()] == [1, 1, 2]
    assert "recomputed" in words(pictures(drawn["PlanResult"])[0])
    timeline, loss = pictures(drawn["Run"])
    assert {"rank 0", "rank 1", "forward", "backward", "update"} <= set(words(timeline))
    assert words(loss)[0] == "loss by updates, evaluations as dots"
    printed = "".join(text for text, _ in shown)
    assert printed.startswith("True")  # verified
    first, last = map(float, re.findall(r"loss (\d\.\d+) at first, (\d\.\d+) after", printed)[0])
    assert last < first / 5
    assert names["run"].losses[-1][0] == 30
    assert names["run"].report.is_file()
    assert "<script" not in "".join(drawn.values())


def test_the_file_has_the_drawings_of_its_cells() -> None:
    """Sites that show notebooks do not run them."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    last_lines = ["".join(cell["source"]).splitlines()[-1] for cell in cells]
    for cell, line in zip(cells, last_lines, strict=True):
        html = [part for out in cell["outputs"] for part in out.get("data", {}).get("text/html", ())]
        assert bool(html) == bool(re.match(r"build\(|vpipe\.plan\(|run$", line)), line


def test_a_schedule_without_end_shows_its_beginning() -> None:
    (picture,) = pictures(build("pipedream", 3, None)._repr_html_())
    assert words(picture)[0].startswith("pipedream: 3 stages, ")


def test_nothing_that_is_shown_can_be_obeyed() -> None:
    table = Table(title="<b>")
    table.add_column("<script>")
    table.add_row(Text("a & b\x1b[2J"))
    assert html_table(table) == (
        "<p><b>&lt;b&gt;</b></p>\n<table>\n<tr><th>&lt;script&gt;</th></tr>\n"
        "<tr><td>a &amp; b\\x1b[2J</td></tr>\n</table>\n"
    )
    assert 'alt="&quot;&gt;"' in image("<svg/>", '">')


def test_a_run_that_has_not_ended_or_has_failed_shows_what_it_has(tmp_path: Path) -> None:
    assert vpipe.Run(tmp_path).summary == {}
    assert pictures(vpipe.Run(tmp_path)._repr_html_()) == []
    (tmp_path / "summary.json").write_text('{"ended": "failed", "error": "<no> memory", "updates": 3}')
    shown = vpipe.Run(tmp_path)._repr_html_()
    assert "<td>failed</td>" in shown
    assert "&lt;no&gt; memory" in shown
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        vpipe.Run(tmp_path / "nowhere")


def test_an_interrupt_ends_the_threads_too() -> None:
    """As the stop button of a notebook sends it."""
    before = threading.active_count()

    def work(world: Any) -> None:
        if world.rank == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        world.all_gather(f"only rank {world.rank}", 0)  # nobody answers

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            vpipe.run_ranks(2, work)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert threading.active_count() == before
