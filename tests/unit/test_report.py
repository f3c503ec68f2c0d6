"""The report: one file that holds everything, and a page that shows it, in a real browser where there is one."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from vpipe.errors import ConfigError
from vpipe.observe.report import (
    POINTS,
    differing_keys,
    only_runs,
    report_path,
    run_data,
    thinned,
    told_apart,
    write_report,
)
from vpipe.observe.report.lanes import ACTIONS, timeline
from vpipe.record.events import Events, StageBytes, read_events
from vpipe.record.run_folder import check_run_folder, write_resumed
from vpipe.schedule import Action, Op
from vpipe.schedule.palette import DARK

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
        ring.write(
            folder, {rank: StageBytes(1000, 2000, 500)}, Samples("process", [100.0, 100.02], [2**20, 2**21])
        )
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
    blocks = [
        {"name": "b", "stage": rank, "flops": 1, "cut_bytes": 8, "parameters": 9} for rank in range(ranks)
    ]
    stages = {
        "schedule": "1f1b", "synchronous": True, "update_interval": 2 * ranks, "cap": 8192, "blocks": blocks,
        "placement": [[rank] for rank in range(ranks)], "edges": [[rank, rank + 1] for rank in range(ranks - 1)],
    }  # fmt: skip
    (folder / "stages.json").write_text(json.dumps(stages))
    return folder


class Samples(NamedTuple):
    of: str
    times: list[float]
    bytes: list[int]


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


def test_what_lies_beside_runs_is_left_out(tmp_path: Path) -> None:
    """`vpipe report runs/*` had failed after a report of several runs, which is written beside them."""
    runs = [make_run(tmp_path / "runs" / name) for name in ("20260101-120000", "20260101-120001")]
    cache = tmp_path / "runs" / "cache"
    cache.mkdir()
    (cache / "tokens.bin").write_text("")
    page = tmp_path / "runs" / "report-20260101-120001.html"
    page.write_text("")
    assert only_runs([*runs, cache, page]) == runs
    assert only_runs([cache, page]) == [cache, page]  # to be refused
    missing = tmp_path / "runs" / "20270101-120000"
    assert only_runs([*runs, missing]) == [*runs, missing]
    with pytest.raises(
        ConfigError, match=r"cache: is not the folder of a run: name one that `vpipe train` has made$"
    ):
        check_run_folder(cache)
    with pytest.raises(ConfigError, match=r"has made, such as .*20260101-120001$"):
        check_run_folder(tmp_path / "runs")
    begun = tmp_path / "begun"
    begun.mkdir()
    check_run_folder(begun)


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


def test_runs_are_named_by_what_differs_between_them() -> None:
    configs = [
        {"schedule": "gpipe", "stages": "2", "log_directory": "a"},
        {"schedule": "1f1b", "stages": "2", "log_directory": "b"},
        {"schedule": "1f1b", "stages": "2", "log_directory": "c"},
    ]
    keys = differing_keys(configs)
    assert keys == ["schedule"]
    names = told_apart(["x", "y", "z"], configs, keys)
    assert names == ["schedule gpipe", "schedule 1f1b (y)", "schedule 1f1b (z)"]
    assert told_apart(["x", "y"], configs[1:], differing_keys(configs[1:])) == ["x", "y"]
    assert told_apart(["x", "y", "z"], configs, ["a", "b", "c", "d"]) == ["x", "y", "z"]
    long = [{"partition": "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]"}, {}]
    assert told_apart(["x", "y"], long, ["partition"]) == [
        "partition [1, 2, 3, 4, 5, 6, 7, 8,…",
        "partition default",
    ]


def test_a_resumed_run_continues_the_curves_of_the_run_before(tmp_path: Path) -> None:
    for name, losses in (("a", [0, 1, 2, 3, 4]), ("b", [3, 4, 5]), ("c", [5, 6])):
        folder = make_run(tmp_path / name)
        summary = json.loads((folder / "summary.json").read_text())
        summary["losses"] = [[update, 10.0 * ord(name) + update] for update in losses]
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "metrics.jsonl").unlink()
    write_resumed(tmp_path / "b", tmp_path / "a" / "checkpoints" / "step-00000003", 3)
    write_resumed(tmp_path / "c", tmp_path / "b" / "checkpoints" / "step-00000005", 5)
    (run,) = embedded(report([tmp_path / "c"], tmp_path / "report.html"))["runs"]
    assert [update for update, _ in run["losses"]] == [1, 2, 3, 4, 5, 6, 7]
    assert [chr(int(loss // 10)) for _, loss in run["losses"]] == list("aaabbcc")
    assert run["resumed"] == [["b", 5], ["a", 3]]
    write_resumed(tmp_path / "a", tmp_path / "c" / "checkpoints" / "step-00000007", 7)  # round and round
    assert len(run_data(tmp_path / "c", "c")["resumed"]) == 2


def test_a_report_goes_beside_its_run(tmp_path: Path) -> None:
    one, other = tmp_path / "runs" / "one", tmp_path / "runs" / "other"
    assert report_path([one]) == one / "report.html"
    assert report_path([one, other]) == tmp_path / "runs" / "report-other.html"


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
    watch = """<script>
      onerror = (text) => { document.documentElement.dataset.error = text; };
      console.error = console.warn = (...said) => onerror(said.join(" "));
    </script>"""
    text = page.read_text(encoding="utf-8").replace("<style>", watch + "<style>", 1)
    opened = page.with_name(f"opened-{page.name}")
    opened.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    shown = subprocess.run(
        [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'browser'}",
         "--window-size=1300,1200", "--virtual-time-budget=4000", "--dump-dom", opened.as_uri()],
        capture_output=True, text=True, timeout=200, check=True,
    ).stdout  # fmt: skip
    head = shown[: shown.index("<head>")]
    assert "data-error" not in head
    assert 'data-ready="yes"' in head
    return html.unescape(shown)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The data of a run, and its page as it is when nobody has touched it."""
    folder = tmp_path_factory.mktemp("opened")
    (run,) = embedded(report([make_run(folder / "run")], folder / "report.html"))["runs"]
    return run, browse(folder / "report.html")


def test_the_page_shows_the_figures(opened: tuple[dict[str, Any], str]) -> None:
    _, shown = opened
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
        / (timeline.view.to - timeline.view.from) * timeline.width,
        clientY: box.top + AXIS + 10 + row * timeline.pitch });
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


def asked(page: Path, script: str) -> dict[str, Any]:
    """What a script that runs in the page finds out."""
    written = (
        f"document.body.append(element('pre', {{ id: 'result' }}, JSON.stringify((() => {{ {script} }})())));"
    )
    found = re.search(r'<pre id="result">(.*?)</pre>', browse(page, written), re.DOTALL)
    assert found is not None
    result: dict[str, Any] = json.loads(found[1])
    return result


def test_the_page_shows_what_metrics_has(tmp_path: Path) -> None:
    """A loss of metrics.jsonl is a point of the curve, and its title tells it where it is pointed at."""
    folder = make_run(tmp_path / "run")
    (folder / "summary.json").unlink()
    page = tmp_path / "report.html"
    report([folder], page)
    script = """
      const chart = byId("loss").querySelector("svg"), box = chart.getBoundingClientRect();
      const inside = CHART.width - CHART.left - CHART.right;
      const at = (share) => { chart.dispatchEvent(new PointerEvent("pointermove", {
        clientX: box.left + box.width * (CHART.left + share * inside) / CHART.width }));
        return byId("loss").querySelector("figcaption").textContent; };
      return { first: at(0), last: at(1) };
    """
    result = asked(page, script)
    assert "3 (1)" in result["first"]
    assert "2.5 (2)" in result["last"]


def test_simulated_stands_below_measured_on_the_same_scale(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    (run,) = embedded(report([make_run(tmp_path / "run", minibatches=8)], page))["runs"]
    predicted = run["predicted"]
    # F and what it receives take 2.25 ms without waiting, B 4 ms, the update 0.5 ms, a send 0.25 ms.
    lane = predicted["lanes"][1]
    forward = [
        d for op, d in zip(lane["op"], lane["duration"], strict=True) if run["timeline"]["ops"][op] == "F"
    ]
    assert forward == pytest.approx([2250.0] * 4)
    assert predicted["minibatches"] == 4
    assert predicted["source"] == "the medians of its own actions"
    assert predicted["word"] == "simulated"
    script = """
      const measured = timeline.lanes[0], other = timeline.predictedLanes[0];
      const name = (lane, i) => timeline.nameOf(lane, i);
      timeline.show(9000, 30000); timeline.paint();
      const at = firstAfter(measured, 9000);
      const first = [...Array(20).keys()].map((i) => at + i).find((i) => timeline.data.ops[measured.op[i]] === "F");
      const twin = other.at.get(keyOf(measured.stage[first], measured.op[first], measured.minibatch[first]));
      const box = timeline.canvas.getBoundingClientRect();
      const begins = other.start[twin] + timeline.shift, { from, to } = timeline.view;
      const x = LABELS + (begins + 1 - from) / (to - from) * timeline.width;
      const at_ = { clientX: box.left + x, clientY: box.top + AXIS + LANE + 8, bubbles: true };
      timeline.canvas.dispatchEvent(new PointerEvent("pointermove", at_));
      return { measured: measured.start[first], predicted: begins, name: timeline.anchoredAt,
        tip: byId("tip").textContent, actions: other.count, note: byId("prediction-note").textContent };
    """
    result = asked(page, script)
    assert result["measured"] == pytest.approx(result["predicted"])
    assert result["name"] == "0F1"
    assert result["tip"].startswith("0F1 forward, simulated")
    assert "measured2.00 ms" in result["tip"]
    assert result["actions"] == 2 * (4 + 4 + 1)  # two updates of four minibatches: F, B, and an update
    assert result["note"].startswith("Simulated, not predicted: ")  # nothing of it was known before the run
    assert "medians of its own actions" in result["note"]


def test_a_click_tells_the_life_of_a_tensor(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    report([make_run(tmp_path / "run")], page)
    script = """
      const box = timeline.canvas.getBoundingClientRect(), lane = timeline.lanes[0];
      const x = LABELS + 2500 / (timeline.view.to - timeline.view.from) * timeline.width;
      const at = { bubbles: true, clientX: box.left + x, clientY: box.top + AXIS + 10, pointerId: 1 };
      timeline.canvas.setPointerCapture = () => {};
      timeline.canvas.dispatchEvent(new PointerEvent("pointerdown", at));
      timeline.canvas.dispatchEvent(new PointerEvent("pointerup", at));
      const steps = [...document.querySelectorAll("[data-step]")].map((step) => step.dataset.step);
      return { title: byId("life-title").textContent, steps };
    """
    result = asked(page, script)
    assert result["title"].startswith("The tensor from stage 0 to stage 1, minibatch 0")
    assert result["steps"] == ["0F0", "0SEND_F0", "1RECV_F0", "1F0", "1B0", "0B0"]


def test_memory_over_time_stands_against_prediction_and_cap(opened: tuple[dict[str, Any], str]) -> None:
    run, shown = opened
    counted = run["memory"][0]["counted"]
    assert (
        max(bytes_ for _, bytes_ in counted) == 2 * 1000 + 2000 + 500
    )  # one minibatch in flight, one version
    assert run["memory"][0]["process"] == [[0.0, 2**20], [0.02, 2**21]]
    assert "cap 8.0 KiB" in shown
    assert "simulated peak" in shown


def test_a_frame_of_a_long_record_draws_what_the_screen_can_show(tmp_path: Path) -> None:
    """At any width of the view: what is too narrow is added up. `benchmarks/speed.py` tells how long a frame takes."""
    page = tmp_path / "report.html"
    report([make_run(tmp_path / "run", minibatches=800)], page)
    script = """
      let drawn = 0;
      for (const name of ["fillRect", "rect", "fillText"]) {
        const plain = CanvasRenderingContext2D.prototype[name];
        CanvasRenderingContext2D.prototype[name] = function (...box) { drawn++; return plain.apply(this, box); };
      }
      const frames = [1, 10, 100, 1000].map((part) => {
        drawn = 0;
        const span = timeline.data.end / part, from = (timeline.data.end - span) / 2;
        timeline.show(from, from + span); timeline.paint();
        return drawn;
      });
      return { actions: timeline.lanes.map((lane) => lane.count), frames, width: timeline.width };
    """
    result = asked(page, script)
    assert result["actions"] == [4000, 4000]
    # A lane is measured or predicted; in a column of two pixels are four kinds of actions and waits.
    assert 0 < max(result["frames"]) <= 2 * 2 * 5 * result["width"] / 2


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    folders = [make_run(tmp_path / "a"), make_run(tmp_path / "b", ranks=4, loss=1.5)]
    report(folders, page)
    shown = browse(page, "byId('runs').children[1].click();")
    assert '<h1 id="title">stages 4</h1>' in shown
    assert "stages 2 and stages 4 coincide" not in shown
    assert shown.count('<div class="stack">') == 2
    assert '<td class="number best">1.5000</td>' in shown
    assert '<td class="setting">stages</td><td class="number">2</td><td class="number">4</td>' in shown
    assert len(re.findall(r'data-rank="\d"', shown)) == 4


@pytest.mark.parametrize(
    "missing",
    [pytest.param(name, marks=pytest.mark.long) for name in ("summary.json", "events.*.json")] + ["*"],
)
def test_the_page_does_without_a_part(missing: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for path in folder.glob(missing):
        path.unlink()
    page = tmp_path / "report.html"
    report([folder], page)
    browse(page)


def test_curves_that_coincide_are_named_and_the_page_has_no_width_of_its_own(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    for number, schedule in enumerate(("gpipe", "1f1b")):
        folder = make_run(tmp_path / f"run{number}", minibatches=30)
        (folder / "config.yml").write_text(f"schedule: {schedule}\n")
        summary = json.loads((folder / "summary.json").read_text())
        summary |= {"samples_per_s": 8.0, "seconds_per_update": 0.5}
        summary["losses"] = [[update, 3.0 - update / 20] for update in range(20)]
        (folder / "summary.json").write_text(json.dumps(summary))
    report([tmp_path / "run0", tmp_path / "run1"], page)
    script = """
      const paths = () => byId("loss").querySelectorAll("path").length, before = paths();
      byId("smoothing").value = 0.5; byId("smoothing").dispatchEvent(new Event("input"));
      const chart = document.querySelector("[data-memory] svg"), box = chart.getBoundingClientRect();
      chart.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2 }));
      const memory = document.querySelector("[data-memory] figcaption").textContent;
      const axis = () => byId("loss").querySelectorAll(".axis")[0].textContent, updates = axis();
      byId("across").value = "seconds"; byId("across").dispatchEvent(new Event("input"));
      const seconds = axis();
      byId("across").value = "updates";
      byId("theme").click(); byId("theme").click();
      document.body.style.width = "360px";
      redraw(); showCurves(DATA.runs, 0);
      const boxes = [...document.querySelectorAll("section, svg, canvas")].map((each) => each.getBoundingClientRect());
      const reach = Math.max(...boxes.map((each) => each.width));
      return { note: document.querySelector(".coincide").textContent, axes: [updates, seconds], before, after: paths(),
        memory, reach,
        dark: colour("card"), axis: [...byId("loss").querySelectorAll(".axis")].map((each) => each.textContent),
        marks: [mark(6.4e6, ticks(6.3e6, 6.5e6, 1).step, 6.5e6), mark(0, 5e5, 1e6),
          byteMark(byteTicks(3e6, 4)[1], 3e6)] };
    """
    result = asked(page, script)
    assert result["note"] == "schedule gpipe and schedule 1f1b coincide: their curves lie on each other."
    assert (result["before"], result["after"]) == (2, 4)  # the raw curves stay, pale
    assert re.fullmatch(r"rank 0 [\d.]+ (B|KiB) at [\d.]+ ms", result["memory"])
    assert result["dark"] == DARK["card"]
    assert result["axis"] == ["updates", "loss"]
    assert result["axes"] == ["updates", "seconds"]
    assert result["marks"] == ["6.4 s", "0.0 s", "1 MiB"]
    assert result["reach"] <= 360
