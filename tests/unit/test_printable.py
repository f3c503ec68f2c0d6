"""Control characters in names and values are shown escaped: in errors, tables, logs and the report (row 33)."""

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from tests.drawing import draws
from vpipe.errors import RankFailedError, ScheduleError, VPipeError, printable
from vpipe.observe.report import write_report
from vpipe.observe.screen import ProgressReport
from vpipe.schedule import build
from vpipe.schedule.picture import draw_svg
from vpipe.system.best_effort import LogFile
from vpipe.system.console import PlainConsole

ODD = "a\x1b[31m\x07\n\r\x9b2J\u202e\u2028\ud800[/x][red]:smile:"
SHOWN = r"a\x1b[31m\x07\n\r\x9b2J\u202e\u2028\ud800[/x][red]:smile:"


@draws(200)
@given(st.text())
def test_whatever_stands_in_a_text_can_be_shown(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert printable(shown) == shown
    assert (shown == text) == text.isprintable()
    assert all(line.isprintable() for line in printable(text, lines=True).replace("\t", " ").split("\n"))


def test_ordinary_text_is_left_alone() -> None:
    for text in ("data/text.txt", "Überraschung", "模型", r"C:\x", "a 'quoted' name", "🙂"):
        assert printable(text) == text


def test_errors_are_one_line_and_what_stands_below_keeps_its_lines() -> None:
    assert str(VPipeError(f"{ODD}: cannot be read")) == f"{SHOWN}: cannot be read"
    shown = str(ScheduleError("cannot run", f"row 1\n\x1b[2Jrow 2\n{'x'}"))
    assert shown == "cannot run\nrow 1\n\\x1b[2Jrow 2\nx"
    assert str(RankFailedError(*f"gave up: {shown}".split("\n", 1))) == f"gave up: {shown}"


def test_tables() -> None:
    table = Table(title=ODD)
    table.add_column(ODD)
    table.add_row(ODD)
    console = PlainConsole(file=io.StringIO(), width=200)
    console.print(table)
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in written
    assert "[/x][red]:smile:" in written
    assert "\\ud800" in written


def test_logs_and_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = LogFile(tmp_path / "log")
    log.line(printable(ODD))
    log.line("two\nlines\x1b")
    log.close()
    assert (tmp_path / "log").read_text() == f"{SHOWN}\ntwo\nlines\\x1b\n"
    progress = ProgressReport(1, 0, speaks=True)
    progress.say(printable(ODD))
    progress.close()
    assert capsys.readouterr().out == f"{SHOWN}\n"


def test_the_report(tmp_path: Path) -> None:
    run = tmp_path / "run\x1b[31m\n"
    run.mkdir()
    (run / "summary.json").write_text(json.dumps({"schedule": ODD, "blocks": [[ODD]]}))
    (run / "config.yml").write_text(json.dumps({"prompt": "\x1b]0;title\x07\u202e"}))
    write_report([run], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert r"run\x1b[31m\n" in page
    data = page[page.index('{"runs"') :]
    for raw in ("\\u001b", "\\u0007", "\\u202e", "\\ud800", "\x1b"):
        assert raw not in data.split("</script>")[0].replace("\\\\", ""), raw
    assert "\\\\u202e" in data


def test_a_picture_with_the_name_of_a_file() -> None:
    from dataclasses import replace

    svg = draw_svg(replace(build("gpipe", 2, 2), name="<b>\x1b\x00.csv"))
    assert "&lt;b&gt;\\x1b\\x00.csv" in svg
