"""The report: one file that holds everything, and a page that shows it, in a real browser where there is one."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from vpipe.errors import ConfigError
from vpipe.observe.events import Events, read_events
from vpipe.observe.report import write_report
from vpipe.observe.report.lanes import ACTIONS, timeline
from vpipe.observe.report.run import POINTS, thinned
from vpipe.schedule import Action, Op

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
STEPS = (
    (Op.RECV_F, 1.0, 0.75),
    (Op.F, 2.0, 0.0),
    (Op.SEND_F, 0.25, 0.0),
    (Op.B, 4.0, 0.0),
    (Op.STEP, 0.75, 0.25),
)
"""What each minibatch does in the made-up runs: milliseconds, and those of them that it waits."""


def make_run(folder: Path, *, ranks: int = 2, minibatches: int = 6, loss: float = 2.5) -> Path:
    """The folder of a made-up run whose ranks spend an eighth of their time waiting."""
    folder.mkdir(parents=True)
    for rank in range(ranks):
        ring, time = Events(rank, [(stage, stage + 1) for stage in range(ranks - 1)]), 100.0
        for minibatch in range(minibatches):
            for op, took, waited in STEPS:
                action, end = Action(rank, op, minibatch), time + took / 1000
                ring.add(action, time, end, waited / 1000, 0, 0, minibatch, False)
                time = end
        ring.write(folder)
    by_rank = [{"rank": rank, "stages": [rank], "peak_memory": 2**20} for rank in range(ranks)]
    summary = {
        "loss": loss, "samples_per_s": 12.0, "seconds_per_update": 0.008, "bubble_share": 0.125, "updates": minibatches,
        "schedule": "1f1b", "ranks": by_rank, "peak_memory": [2**20] * ranks, "losses": [[0, 3.0], [1, loss]],
        "blocks": [[f"layer.{rank}</script>"] for rank in range(ranks)],
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    plan = {"partition": [1] * ranks, "policies": ["recompute"] * ranks, "schedule": "1f1b"}
    (folder / "plan.json").write_text(json.dumps(plan))
    lines = [
        {"kind": "train", "update": 1, "loss": 3.0, "samples_per_s": 0.0},
        {"kind": "train", "update": 2, "loss": loss, "samples_per_s": 12.0},
        {"kind": "evaluation", "update": 2, "loss": float("nan")},
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"kind": "tr')
    (folder / "config.yml").write_text(f"schedule: 1f1b\nstages: {ranks}\n")
    return folder


def embedded(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def report(folders: list[Path], output: Path) -> str:
    write_report(folders, output)
    return output.read_text(encoding="utf-8")


def test_everything_is_in_the_file(tmp_path: Path) -> None:
    page = report([make_run(tmp_path / "run")], tmp_path / "report.html")
    (run,) = embedded(page)["runs"]
    assert run["name"] == "run"
    assert run["losses"] == [[1, 3.0], [2, 2.5]]
    assert run["evaluations"] == [[2, None]]  # nan
    assert run["throughput"] == [[2, 12.0]]
    assert run["config"] == {"schedule": "1f1b", "stages": "2"}
    assert run["blocks"] == [["layer.0</script>"], ["layer.1</script>"]]
    lane = run["timeline"]["lanes"][1]
    assert lane["duration"] == [1000 * took for _ in range(6) for _, took, _ in STEPS]
    assert sum(lane["wait"]) == pytest.approx(run["timeline"]["end"] / 8)


def test_nothing_is_fetched(tmp_path: Path) -> None:
    page = report([make_run(tmp_path / "run")], tmp_path / "report.html")
    assert not re.search(r"(https?|ftp|wss?):|[\"'(]//", page)
    assert not re.search(r"<link|<img|<iframe|\bsrc=|@import|url\(|fetch\(|XMLHttpRequest|import\(", page)
    assert "{{" not in page.split('id="data"')[0]


@pytest.mark.parametrize(
    "missing", ["summary.json", "plan.json", "metrics.jsonl", "config.yml", "events.*.json", "*"]
)
def test_a_missing_file_leaves_out_its_part(missing: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for path in folder.glob(missing):
        path.unlink()
    (run,) = embedded(report([folder], tmp_path / "report.html"))["runs"]
    assert (run["timeline"] is None) == (missing in ("events.*.json", "*"))
    assert bool(run["losses"]) == (missing != "*")


@pytest.mark.parametrize(
    ("name", "text"),
    [("summary.json", "{"), ("plan.json", "[]"), ("config.yml", "a: [")],
)
def test_a_broken_file_is_named(name: str, text: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(name)):
        write_report([folder], tmp_path / "report.html")


def test_what_cannot_be_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to report"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        write_report([tmp_path / "none"], tmp_path / "report.html")
    folder = make_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="name each run once"):
        write_report([folder, folder], tmp_path / "report.html")


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / place / "run") for place in ("a", "b")]
    runs = embedded(report(folders, tmp_path / "report.html"))["runs"]
    assert [run["name"] for run in runs] == ["a/run", "b/run"]


def test_of_a_long_record_the_end_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ACTIONS >= 8 * 10_000
    monkeypatch.setattr("vpipe.observe.report.lanes.ACTIONS", 20)
    shown = timeline(read_events(make_run(tmp_path / "run", minibatches=20)))
    assert shown is not None
    assert [len(lane["start"]) for lane in shown["lanes"]] == [10, 10]
    assert shown["before"] == 180
    assert [lane["start"][0] for lane in shown["lanes"]] == [0, 0]


def test_a_long_curve_is_thinned_and_keeps_its_end() -> None:
    points = [[float(update), 1.0] for update in range(10_001)]
    kept = thinned(points)
    assert len(kept) <= POINTS
    assert kept[-1] == points[-1]
    assert thinned(points[:POINTS]) == points[:POINTS]


# In a browser


def browse(page: Path, script: str = "") -> str:
    """The page's elements after its scripts, and then `script`, have run. Any error of a script fails the test."""
    if BROWSER is None:
        pytest.skip("there is no chromium here")
    watch = "<script>onerror = (text) => { document.documentElement.dataset.error = text; };</script>"
    text = page.read_text(encoding="utf-8").replace("<style>", watch + "<style>", 1)
    opened = page.with_name(f"opened-{page.name}")
    opened.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    shown = subprocess.run(
        [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'browser'}",
         "--window-size=1300,1200", "--virtual-time-budget=4000", "--dump-dom", opened.as_uri()],
        capture_output=True, text=True, timeout=100, check=True,
    ).stdout  # fmt: skip
    head = shown[: shown.index("<head>")]
    assert "data-error" not in head
    assert 'data-ready="yes"' in head
    return html.unescape(shown)


def test_the_page_shows_the_figures(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    report([make_run(tmp_path / "run")], page)
    shown = browse(page)
    assert '<div class="figure" data-figure="samples_per_s"><b>12</b>' in shown
    assert '<div class="figure" data-figure="loss"><b>2.5000</b>' in shown
    assert re.findall(r'data-rank="\d" data-wait="([\d.]+)"', shown) == ["0.125000", "0.125000"]
    assert '<span class="block recompute" title="recompute">layer.1</script></span>' in shown
    assert "<path" in shown.split('id="loss"')[1]


def test_the_wheel_zooms_and_the_pointer_tells(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    report([make_run(tmp_path / "run")], page)
    script = """
      const canvas = byId("lanes"), box = canvas.getBoundingClientRect(), at = { bubbles: true, cancelable: true };
      const place = (time, row) => ({ ...at, clientX: box.left + LABELS + (time - timeline.view.from)
        / (timeline.view.to - timeline.view.from) * timeline.width, clientY: box.top + AXIS + 10 + row * 60 });
      const before = timeline.view.to - timeline.view.from;
      canvas.dispatchEvent(new WheelEvent("wheel", { ...place(20500, 1), deltaY: -300 }));
      canvas.dispatchEvent(new PointerEvent("pointermove", place(20500, 1)));
      const result = { factor: (timeline.view.to - timeline.view.from) / before, tip: byId("tip").textContent };
      document.body.append(element("pre", { id: "result" }, JSON.stringify(result)));
    """
    found = re.search(r'<pre id="result">(.*?)</pre>', browse(page, script))
    assert found is not None
    result = json.loads(found[1])
    assert result["factor"] == pytest.approx(1.0018**-300)
    # The third minibatch begins at 16 ms, its backward at 19.25 ms.
    assert result["tip"].startswith("1B2 backward")
    assert "took4.00 ms" in result["tip"]


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    folders = [make_run(tmp_path / "a"), make_run(tmp_path / "b", ranks=4, loss=1.5)]
    report(folders, page)
    shown = browse(page, "byId('runs').children[1].click();")
    assert '<h1 id="title">b</h1>' in shown
    assert '<td class="number best">1.5000</td>' in shown
    assert '<td class="setting">stages</td><td class="number">2</td><td class="number">4</td>' in shown
    assert len(re.findall(r'data-rank="\d"', shown)) == 4


@pytest.mark.parametrize("missing", ["summary.json", "events.*.json", "*"])
def test_the_page_does_without_a_part(missing: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for path in folder.glob(missing):
        path.unlink()
    page = tmp_path / "report.html"
    report([folder], page)
    browse(page)
