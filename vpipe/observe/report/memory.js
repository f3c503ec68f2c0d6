"use strict";
// Memory over time: for each rank what it held by count, against the prediction and the cap; and the processes.

const AREA = { width: 300, height: 150, left: 60, right: 8, top: 14, bottom: 22 };

/** `lines` are {label, value, colour}: levels across the chart; `points` are [seconds, bytes] in steps. */
function memoryChart(title, points, levels, stroke, stepped = true) {
  const last = points[points.length - 1][0] || 1;
  const high = 1.08 * points.reduce((m, p) => Math.max(m, p[1]), Math.max(1, ...levels.map((level) => level.value)));
  const x = (time) => AREA.left + (Math.max(0, time) / last) * (AREA.width - AREA.left - AREA.right);
  const y = (value) => AREA.height - AREA.bottom - (value / high) * (AREA.height - AREA.top - AREA.bottom);
  const chart = svg("svg", { viewBox: `0 0 ${AREA.width} ${AREA.height}`, role: "img" });
  for (const value of [0, high / 3, (2 * high) / 3]) {
    chart.append(svg("line", { class: "grid", x1: AREA.left, x2: AREA.width - AREA.right, y1: y(value), y2: y(value) }));
    chart.append(svg("text", { x: AREA.left - 6, y: y(value) + 4, "text-anchor": "end" }, bytes(Math.round(value))));
  }
  for (const time of ticks(0, last, 4)) {
    chart.append(svg("text", { x: x(time), y: AREA.height - 6, "text-anchor": "middle" }, mark(1e6 * time, 1e6 * (ticks(0, last, 4)[1] || last))));
  }
  let path = `M${x(points[0][0]).toFixed(1)} ${y(points[0][1]).toFixed(1)}`;
  for (const [time, value] of points.slice(1)) {
    path += stepped ? `H${x(time).toFixed(1)}V${y(value).toFixed(1)}` : `L${x(time).toFixed(1)} ${y(value).toFixed(1)}`;
  }
  if (stepped) chart.append(svg("path", { d: `${path}V${y(0)}H${x(points[0][0]).toFixed(1)}Z`, fill: stroke, opacity: 0.18 }));
  chart.append(svg("path", { d: path, fill: "none", stroke, "stroke-width": 1.4 }));
  for (const { label, value, colour: line } of levels) {
    chart.append(svg("line", { x1: AREA.left, x2: AREA.width - AREA.right, y1: y(value), y2: y(value), stroke: line, "stroke-width": 1.4, "stroke-dasharray": "5 4" }));
    chart.append(svg("text", { class: "level", x: AREA.width - AREA.right, y: y(value) - 4, "text-anchor": "end", style: `fill: ${line}` }, label));
  }
  return element("figure", {}, element("figcaption", {}, ...title), chart);
}

function showMemoryOverTime(run) {
  const lines = (run.memory || []).filter((line) => line.counted.length > 1);
  const processes = (run.memory || []).filter((line) => line.process.length > 1);
  byId("memory-time").hidden = !lines.length && !processes.length;
  const planned = run.predicted ? Object.fromEntries(run.predicted.lanes.map((lane) => [lane.rank, lane.peak_memory])) : {};
  const counted = lines.map((line) => {
    const levels = [];
    if (planned[line.rank]) levels.push({ label: `predicted peak ${bytes(planned[line.rank])}`, value: planned[line.rank], colour: "var(--accent)" });
    if (run.cap) levels.push({ label: `cap ${bytes(run.cap)}`, value: run.cap, colour: "var(--ink)" });
    const peak = line.counted.reduce((m, p) => Math.max(m, p[1]), 0);
    const title = [element("b", {}, `rank ${line.rank}`), ` stage ${line.stages.join(", ")}, at most ${bytes(peak)}`];
    return memoryChart(title, line.counted, levels, "var(--forward)");
  });
  byId("memory-counted").replaceChildren(...counted);
  const own = processes.map((line) => {
    const peak = line.process.reduce((m, p) => Math.max(m, p[1]), 0);
    return memoryChart([element("b", {}, `rank ${line.rank}`), ` ${line.of}, at most ${bytes(peak)}`], line.process, [], "var(--send)", false);
  });
  byId("memory-process").replaceChildren(...own);
  byId("memory-time-note").textContent =
    (processes.some((line) => line.of === "device") ? "Of a device it is what its allocator has handed out. " : "") +
    "By count: weights, gradients, optimizer state, old weight versions, and for each minibatch in flight what the first one was counted to hold." +
    (run.predicted ? ` Predicted with ${run.predicted.source}.` : "") + (run.cap ? "" : " The configuration sets no cap (gpu_memory).");
}
