"use strict";
// The page: reads the data, shows one run, and changes to another.

const DATA = JSON.parse(byId("data").textContent);
let timeline = null;

function showLegend() {
  const kinds = KINDS.map((kind) => {
    const swatch = element("i", { style: kind.key === "wait" ? {} : { background: `var(--${kind.key})` } });
    if (kind.key === "wait") swatch.className = "waiting";
    return element("span", {}, swatch, kind.label);
  });
  const between = element("i", { style: { background: "var(--between)", outline: "1px solid var(--line)" } });
  kinds.push(element("span", {}, between, "between actions"));
  kinds.push(element("span", {}, element("i", { class: "flight" }), "minibatches in flight"));
  kinds.push(element("span", {}, element("i", { class: "versions" }), "weight versions"));
  byId("legend").replaceChildren(...kinds);
}

function showTimeline(run) {
  if (timeline) timeline.close();
  timeline = null;
  const data = run.timeline;
  byId("timeline").hidden = !data;
  if (!data) return;
  const actions = data.lanes.reduce((sum, lane) => sum + lane.start.length, 0);
  const error = Math.max(...data.lanes.map((lane) => lane.round_trip)) / 2;
  let note = "Wheel zooms, dragging moves, a double click shows all; pointing at an action shows its minibatch alone, a click the life of its tensor. ";
  note += `${number(actions)} actions`;
  if (data.before) note += `, the ${number(data.before)} before them are not shown`;
  byId("timeline-note").textContent = `${note}; clocks agree to ${duration(1e6 * error)}.`;
  timeline = new Timeline(data, run.predicted, showShares, showLife);
  byId("prediction-note").textContent = run.predicted
    ? `Predicted: the run's own schedule, simulated with ${run.predicted.source}.`
    : "There is no prediction: the run left no plan that can be simulated.";
}

function showRun(chosen) {
  const run = DATA.runs[chosen];
  const { schedule, ranks } = run.summary;
  byId("title").textContent = run.name;
  const facts = [schedule && `schedule ${schedule}`, ranks && `${ranks.length} ranks`, run.config.model_type];
  byId("subtitle").textContent = facts.filter(Boolean).join(" · ");
  [...byId("runs").children].forEach((button, place) => button.setAttribute("aria-pressed", place === chosen));
  showFigures(run);
  showTimeline(run);
  showCurves(DATA.runs, chosen);
  showMemory(run);
  showMemoryOverTime(run);
  showPlan(run);
  showConfig(run);
}

if (DATA.runs.length > 1) {
  DATA.runs.forEach((run, place) => {
    const button = element("button", { type: "button" }, run.name);
    button.addEventListener("click", () => showRun(place));
    byId("runs").append(button);
  });
}
showLegend();
showComparison(DATA.runs);
showRun(0);
document.documentElement.dataset.ready = "yes";
