"use strict";
// The page: figures and tables of a run, runs side by side, and the change from one run to another.

const FIGURES = [
  { key: "loss", label: "loss", show: (v) => v.toFixed(4), better: Math.min },
  { key: "evaluation_loss", label: "evaluation loss", show: (v) => v.toFixed(4), better: Math.min },
  { key: "samples_per_s", label: "samples a second", show: number, better: Math.max },
  { key: "tokens_per_s", label: "tokens a second", show: number, better: Math.max },
  { key: "mfu", label: "of the peak (mfu)", show: percent, better: Math.max },
  { key: "seconds_per_update", label: "an update takes", show: (v) => duration(1e6 * v), better: null },
  { key: "of_limit", label: "computing", show: percent, better: Math.max },
  { key: "bubble_share", label: "waiting", show: percent, better: Math.min },
  { key: "communication_share", label: "sending", show: percent, better: Math.min },
  { key: "updates", label: "updates", show: number, better: null },
];

function showFigures(run) {
  const section = byId("figures");
  const shown = FIGURES.filter((figure) => known(run.summary[figure.key]));
  section.hidden = !shown.length;
  section.replaceChildren(
    ...shown.map(({ key, label, show }) =>
      element(
        "div",
        { class: "figure", "data-figure": key },
        element("b", {}, show(run.summary[key])),
        element("span", {}, label),
        ...(run.predicted && known(run.predicted[key]) ? [element("small", {}, `${run.predicted.word} ${show(run.predicted[key])}`)] : []),
      ),
    ),
  );
}

function row(cells, tag = "td") {
  return element("tr", {}, ...cells.map(([text, style]) => element(tag, style ? { class: style } : {}, text)));
}

/** A column a run: its figures, the best of each marked, and the settings in which the runs differ. */
function showComparison(runs) {
  byId("comparison").hidden = runs.length < 2;
  if (runs.length < 2) return;
  const peak = { key: "peak", label: "peak memory", show: bytes, better: Math.min };
  const value = (run, key) => {
    if (key !== "peak") return run.summary[key];
    return run.summary.peak_memory ? Math.max(...run.summary.peak_memory) : null;
  };
  const lines = [];
  for (const { key, label, show, better } of [...FIGURES, peak]) {
    const found = runs.map((run) => value(run, key)).filter(known);
    if (!found.length) continue;
    const best = better && new Set(found).size > 1 ? better(...found) : null;
    const cells = runs.map((run) => {
      const own = value(run, key);
      return [known(own) ? show(own) : "–", known(own) && own === best ? "number best" : "number"];
    });
    lines.push([[label], ...cells]);
  }
  for (const key of DATA.differing) {
    lines.push([[key, "setting"], ...runs.map((run) => [known(run.config[key]) ? run.config[key] : "–", "number"])]);
  }
  const head = [["run"], ...runs.map((run) => [run.name, "number"])];
  byId("comparison-table").replaceChildren(row(head, "th"), ...lines.map((line) => row(line)));
}

/** For each stage its ranks, the memory policies of its blocks, and their names. */
function showPlan(run) {
  const { plan } = run;
  const partition = plan.partition || run.summary.partition || [];
  byId("plan").hidden = !partition.length;
  const facts = ["schedule", "batch_size", "minibatches", "update_interval", "chunks", "replicas"]
    .filter((key) => known(plan[key]))
    .map((key) => `${key.replace("_", " ")} ${Array.isArray(plan[key]) ? plan[key].join(", ") : plan[key]}`);
  byId("plan-note").textContent = facts.join(" · ");
  const policies = plan.policies || [];
  const ranks = (stage) =>
    (run.summary.ranks || []).filter((rank) => rank.stages.includes(stage)).map((rank) => rank.rank).join(", ");
  let block = 0;
  const lines = partition.map((count, stage) => {
    const own = policies.slice(block, block + count);
    block += count;
    const counted = ["keep", "recompute", "swap"].map((policy) => own.filter((each) => each === policy).length);
    const names = (run.blocks[stage] || []).map((name, place) =>
      element("span", { class: `block ${own[place] || "keep"}`, title: own[place] || "keep" }, name),
    );
    const blocks = names.length ? element("div", {}, ...names) : "–";
    return [[stage, "name"], [ranks(stage) || "–"], [count, "number"], ...counted.map((each) => [own.length ? each : "–", "number"]), [blocks]];
  });
  const head = [["stage"], ["rank"], ["blocks", "number"], ["kept", "number"], ["recomputed", "number"], ["swapped", "number"], ["which"]];
  byId("plan-table").replaceChildren(row(head, "th"), ...lines.map((line) => row(line)));
}

function showConfig(run) {
  const entries = Object.entries(run.config);
  byId("config").hidden = !entries.length;
  byId("config-table").replaceChildren(...entries.map(([key, value]) => row([[key, "name"], [value]])));
}

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
    ? `${run.predicted.word === "predicted" ? "Predicted" : "Simulated, not predicted"}: the run's own schedule, simulated with ${run.predicted.source}.`
    : "There is no simulation beside it: the run left no plan that can be simulated.";
}

function showRun(chosen) {
  const run = DATA.runs[chosen];
  shown = chosen;
  const { schedule, ranks } = run.summary;
  byId("title").textContent = run.name;
  const facts = [run.folder !== run.name && run.folder, schedule && `schedule ${schedule}`, ranks && `${ranks.length} ranks`, run.config.model_type];
  for (const [before, updates] of run.resumed) facts.push(`resumed from ${before} after ${updates} updates`);
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
/** Draw again what has a size in pixels or colours of its own. */
function redraw() {
  if (timeline) timeline.resize();
  drawStacked();
}

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `theme: ${theme}`;
  byId("theme").dataset.theme = theme;
}

/** The reader's choice; a browser may keep nothing for pages that are files. */
function keptTheme(chosen = null) {
  try {
    if (chosen) localStorage.setItem("vpipe-theme", chosen);
    const kept = localStorage.getItem("vpipe-theme");
    return THEMES.includes(kept) ? kept : "auto";
  } catch {
    return chosen || "auto";
  }
}

setTheme(keptTheme());
byId("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(byId("theme").dataset.theme) + 1) % THEMES.length];
  keptTheme(next);
  setTheme(next);
  redraw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
let shown = 0;
let wide = innerWidth;
window.addEventListener("resize", () => {
  if (innerWidth === wide) return; // a phone changes its height while it is scrolled
  wide = innerWidth;
  redraw();
  showCurves(DATA.runs, shown);
});
for (const choice of ["smoothing", "across"]) byId(choice).addEventListener("input", () => showCurves(DATA.runs, shown));
showLegend();
showComparison(DATA.runs);
prepareStacked(DATA.runs);
showRun(0);
drawStacked();
document.documentElement.dataset.ready = "yes";
