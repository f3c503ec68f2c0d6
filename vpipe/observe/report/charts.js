"use strict";
// Curves over updates, as SVG.

const CHART = { width: 600, height: 250, left: 56, right: 12, top: 10, bottom: 30 };

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(document.querySelector("svg#ns").namespaceURI, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** `series` are {name, colour, points: [[update, value]], dots}; empty ones are left out. */
function showChart(figure, title, series) {
  series = series
    .map((each) => ({ ...each, points: each.points.filter((point) => known(point[1])) }))
    .filter((each) => each.points.length);
  figure.hidden = !series.length;
  if (!series.length) return;
  const all = series.flatMap((each) => each.points);
  const range = (place) => all.reduce(([low, high], p) => [Math.min(low, p[place]), Math.max(high, p[place])], [Infinity, -Infinity]);
  const [first, last] = range(0);
  let [low, high] = range(1);
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  [low, high] = [low >= 0 ? Math.max(0, low - margin) : low - margin, high + margin];
  const x = (update) => CHART.left + ((update - first) / (last - first || 1)) * (CHART.width - CHART.left - CHART.right);
  const y = (value) => CHART.height - CHART.bottom - ((value - low) / (high - low)) * (CHART.height - CHART.top - CHART.bottom);
  const chart = svg("svg", { viewBox: `0 0 ${CHART.width} ${CHART.height}`, role: "img" });
  for (const value of ticks(low, high, 5)) {
    chart.append(svg("line", { class: "grid", x1: CHART.left, x2: CHART.width - CHART.right, y1: y(value), y2: y(value) }));
    chart.append(svg("text", { x: CHART.left - 8, y: y(value) + 4, "text-anchor": "end" }, number(value)));
  }
  for (const update of ticks(first, last, 6).filter(Number.isInteger)) {
    chart.append(svg("text", { x: x(update), y: CHART.height - 10, "text-anchor": "middle" }, number(update)));
  }
  for (const { points, colour: stroke, dots } of series) {
    if (!dots) {
      const path = points.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
      chart.append(svg("path", { d: path, fill: "none", stroke, "stroke-width": 1.8, "stroke-linejoin": "round" }));
    }
    if (dots || points.length === 1) {
      for (const p of points) chart.append(svg("circle", { cx: x(p[0]), cy: y(p[1]), r: 4, fill: "var(--card)", stroke, "stroke-width": 2 }));
    }
  }
  const caption = element("figcaption", {}, title);
  const values = series.map(({ name, colour: background }) => {
    const value = element("span");
    const key = element("span", { class: "key" });
    if (name) key.append(element("i", { style: { background } }), name);
    key.append(value);
    caption.append(key);
    return value;
  });
  figure.replaceChildren(caption, chart);
  follow(chart, series, values, x, first, last);
}

/** The values at the update that is pointed at, behind the names of the curves. */
function follow(chart, series, values, x, first, last) {
  const cross = svg("line", { class: "cross", y1: CHART.top, y2: CHART.height - CHART.bottom, visibility: "hidden" });
  chart.append(cross);
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * CHART.width;
    const share = (at - CHART.left) / (CHART.width - CHART.left - CHART.right);
    const wanted = first + Math.min(1, Math.max(0, share)) * (last - first);
    series.forEach(({ points }, place) => {
      const near = points.reduce((a, b) => (Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a));
      values[place].textContent = ` ${number(near[1])} (${near[0]})`;
      if (!place) {
        cross.setAttribute("x1", x(near[0]));
        cross.setAttribute("x2", x(near[0]));
      }
    });
    cross.setAttribute("visibility", "visible");
  });
  chart.addEventListener("pointerleave", () => {
    cross.setAttribute("visibility", "hidden");
    for (const value of values) value.textContent = "";
  });
}

/** Loss and throughput: of one run with its evaluations, of several runs on one scale. */
function showCurves(runs, chosen) {
  const seriesColour = (place) => `var(--series-${place % 6})`;
  const together = (key) => runs.map((run, place) => ({ name: run.name, points: run[key], colour: seriesColour(place) }));
  const run = runs[chosen];
  const alone = runs.length === 1;
  showChart(byId("loss"), "Loss", alone
    ? [
        { name: "training", points: run.losses, colour: "var(--series-0)" },
        { name: "evaluation", points: run.evaluations, colour: "var(--series-1)", dots: true },
      ]
    : together("losses"));
  showChart(byId("throughput"), "Samples a second, mean so far", alone
    ? [{ name: "", points: run.throughput, colour: "var(--series-2)" }]
    : together("throughput"));
  byId("curves").hidden = byId("loss").hidden && byId("throughput").hidden;
}
