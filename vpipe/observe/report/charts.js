"use strict";
// Curves over updates, memory over time, and bars of memory.

const CHART = { width: 600, height: 250, left: 56, right: 12, top: 10, bottom: 30 };
const SMALL = { width: 300, height: 150, left: 60, right: 8, top: 14, bottom: 22 };

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(document.querySelector("svg#ns").namespaceURI, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** The largest and smallest value of points, by place. */
const range = (points, place) => points.reduce(([low, high], p) => [Math.min(low, p[place]), Math.max(high, p[place])], [Infinity, -Infinity]);

/** An empty chart of a size. `across` and `up` are axes, {from, to, marks, show}; `x` and `y` give places in it. */
function frame(size, across, up) {
  const right = size.width - size.right;
  const x = (value) => size.left + ((value - across.from) / (across.to - across.from || 1)) * (right - size.left);
  const y = (value) => size.height - size.bottom - ((value - up.from) / (up.to - up.from)) * (size.height - size.top - size.bottom);
  const chart = svg("svg", { viewBox: `0 0 ${size.width} ${size.height}`, role: "img" });
  for (const value of up.marks) {
    chart.append(svg("line", { class: "grid", x1: size.left, x2: right, y1: y(value), y2: y(value) }));
    chart.append(svg("text", { x: size.left - 7, y: y(value) + 4, "text-anchor": "end" }, up.show(value)));
  }
  for (const value of across.marks) {
    chart.append(svg("text", { x: x(value), y: size.height - size.bottom / 3, "text-anchor": "middle" }, across.show(value)));
  }
  return { chart, x, y };
}

/** `series` are {name, colour, points: [[update, value]], dots}; empty ones are left out. */
function showChart(figure, title, series) {
  series = series
    .map((each) => ({ ...each, points: each.points.filter((point) => known(point[1])) }))
    .filter((each) => each.points.length);
  figure.hidden = !series.length;
  if (!series.length) return;
  const all = series.flatMap((each) => each.points);
  const [first, last] = range(all, 0);
  let [low, high] = range(all, 1);
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  [low, high] = [low >= 0 ? Math.max(0, low - margin) : low - margin, high + margin];
  const { chart, x, y } = frame(
    CHART,
    { from: first, to: last, marks: ticks(first, last, 6).filter(Number.isInteger), show: number },
    { from: low, to: high, marks: ticks(low, high, 5), show: number },
  );
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

/** The values at the update under the pointer, behind the names of the curves. */
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
      if (!place) for (const end of ["x1", "x2"]) cross.setAttribute(end, x(near[0]));
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
  const together = (key) => runs.map((run, place) => ({ name: run.name, points: run[key], colour: `var(--series-${place % 6})` }));
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

/** The peak of each stage, with the plan's prediction as a mark. */
function showMemory(run) {
  const peaks = run.summary.peak_memory || [];
  byId("memory").hidden = !peaks.length;
  const planned = (run.plan.prediction && run.plan.prediction.peak_memory) || [];
  const predicted = planned.length === peaks.length ? planned : [];
  const most = Math.max(...peaks, ...predicted);
  const device = (run.memory || []).some((line) => line.of === "device");
  byId("memory-note").textContent =
    (device ? "The most of its GPU that each stage's rank used, CUDA graphs included" : "The most that the process of each stage held, libraries included") +
    (predicted.length ? "; the red mark is the plan's prediction." : ".");
  byId("memory-bars").replaceChildren(
    ...peaks.flatMap((peak, stage) => {
      const bar = element("div", { class: "bar" }, element("i", { style: { width: `${(100 * peak) / most}%`, background: "var(--forward)" } }));
      let text = bytes(peak);
      if (predicted.length) {
        bar.append(element("u", { style: { left: `calc(${(100 * predicted[stage]) / most}% - 2px)` } }));
        text += ` · predicted ${bytes(predicted[stage])}`;
      }
      return [element("span", {}, `stage ${stage}`), bar, element("span", { class: "value" }, text)];
    }),
  );
}

/** One rank: `points` are [seconds, bytes]; `levels` are {label, value, colour}, lines across the chart. */
function memoryChart(rank, title, points, stroke, levels = null) {
  const last = points[points.length - 1][0] || 1;
  const peak = range(points, 1)[1];
  const high = 1.08 * Math.max(1, peak, ...(levels || []).map((level) => level.value));
  const times = ticks(0, last, 4);
  const { chart, x, y } = frame(
    SMALL,
    { from: 0, to: last, marks: times, show: (time) => mark(1e6 * time, 1e6 * (times[1] || last)) },
    { from: 0, to: high, marks: [0, high / 3, (2 * high) / 3], show: (value) => bytes(Math.round(value)) },
  );
  const stepped = levels !== null; // a count holds until it changes, a sample is a point of a curve
  const places = points.map(([time, value]) => [x(Math.max(0, time)).toFixed(1), y(value).toFixed(1)]);
  const path = `M${places[0].join(" ")}` + places.slice(1).map(([a, b]) => (stepped ? `H${a}V${b}` : `L${a} ${b}`)).join("");
  if (stepped) chart.append(svg("path", { d: `${path}V${y(0)}H${places[0][0]}Z`, fill: stroke, opacity: 0.18 }));
  chart.append(svg("path", { d: path, fill: "none", stroke, "stroke-width": 1.4 }));
  for (const { label, value, colour: line } of levels || []) {
    const ends = { x1: SMALL.left, x2: SMALL.width - SMALL.right, y1: y(value), y2: y(value) };
    chart.append(svg("line", { ...ends, stroke: line, "stroke-width": 1.4, "stroke-dasharray": "5 4" }));
    chart.append(svg("text", { class: "level", x: ends.x2, y: y(value) - 4, "text-anchor": "end", style: `fill: ${line}` }, label));
  }
  return element("figure", {}, element("figcaption", {}, element("b", {}, `rank ${rank}`), ` ${title}, at most ${bytes(peak)}`), chart);
}

function showMemoryOverTime(run) {
  const counted = (run.memory || []).filter((line) => line.counted.length > 1);
  const sampled = (run.memory || []).filter((line) => line.process.length > 1);
  byId("memory-time").hidden = !counted.length && !sampled.length;
  const planned = run.predicted ? Object.fromEntries(run.predicted.lanes.map((lane) => [lane.rank, lane.peak_memory])) : {};
  byId("memory-counted").replaceChildren(...counted.map(({ rank, stages, counted: points }) => {
    const levels = [];
    if (planned[rank]) levels.push({ label: `predicted peak ${bytes(planned[rank])}`, value: planned[rank], colour: "var(--accent)" });
    if (run.cap) levels.push({ label: `cap ${bytes(run.cap)}`, value: run.cap, colour: "var(--ink)" });
    return memoryChart(rank, `stage ${stages.join(", ")}`, points, "var(--forward)", levels);
  }));
  byId("memory-process").replaceChildren(...sampled.map((line) => memoryChart(line.rank, line.of, line.process, "var(--send)")));
  const device = sampled.some((line) => line.of === "device");
  byId("memory-measured").textContent = device ? "As measured on the GPU, CUDA graphs included" : "As measured, libraries included";
  byId("memory-time-note").textContent =
    "By count: weights, gradients, optimizer state, old weight versions, and for each minibatch in flight the bytes of the first one." +
    (run.predicted ? ` Predicted with ${run.predicted.source}.` : "") + (run.cap ? "" : " The configuration sets no cap (gpu_memory).");
}
