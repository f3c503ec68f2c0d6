"use strict";
// Curves over updates, samples or time, memory over time, and bars of memory.

const CHART = { width: 600, height: 270, left: 56, right: 12, top: 24, bottom: 40 };
const SMALL = { width: 300, height: 165, left: 62, right: 10, top: 22, bottom: 36 };
const COINCIDE = 0.004; // of the height of a chart: curves that are nowhere farther apart cannot be told apart
const SMOOTHED = 10; // points of a curve from which smoothing is offered

/** A size as wide as its place on the page, so that letters keep their size. */
const fitted = (size, place) => ({ ...size, width: Math.max(280, Math.min(720, place.clientWidth || size.width)) });

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(document.querySelector("svg#ns").namespaceURI, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** The largest and smallest value of points, by place. */
const range = (points, place) => points.reduce(([low, high], p) => [Math.min(low, p[place]), Math.max(high, p[place])], [Infinity, -Infinity]);

/** An empty chart of a size. `across` and `up` are axes, {title, from, to, marks, show}; `x` and `y` give places in it. */
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
    const text = across.show(value);
    const reach = 3.5 * text.length; // half of its width: the last one must not leave the chart
    chart.append(svg("text", { x: Math.min(x(value), size.width - reach), y: size.height - size.bottom + 16, "text-anchor": "middle" }, text));
  }
  chart.append(svg("text", { class: "axis", x: (size.left + right) / 2, y: size.height - 4, "text-anchor": "middle" }, across.title));
  chart.append(svg("text", { class: "axis", x: 0, y: 11 }, up.title));
  return { chart, x, y };
}

/** The mean of the points so far in which older ones count less and less: `weight` is from 0, as they are, to below 1. */
function smooth(points, weight) {
  let [sum, count] = [0, 0];
  return points.map(([update, value]) => {
    [sum, count] = [weight * sum + value, weight * count + 1];
    return [update, sum / count];
  });
}

/** Groups of places in `series` whose curves have the same updates and lie on each other. */
function coinciding(series, height) {
  const same = (a, b) => {
    const values = new Map(a.points);
    const shared = b.points.filter(([update]) => values.has(update));
    return shared.length > 1 && shared.length === Math.min(a.points.length, b.points.length) && shared.every(([update, value]) => Math.abs(values.get(update) - value) <= COINCIDE * height);
  };
  const groups = [];
  series.forEach((each, place) => {
    if (each.dots) return;
    const group = groups.find(([first]) => same(series[first], each));
    if (group) group.push(place);
    else groups.push([place]);
  });
  return groups.filter((group) => group.length > 1);
}

/** `series` are {name, colour, points: [[update, value]], dots}; empty ones are left out. `across` names updates, or what stands for them. */
function showChart(figure, title, unit, series, across, smoothing = 0) {
  series = series
    .map((each) => ({ ...each, points: each.points.filter((point) => known(point[1])) }))
    .filter((each) => each.points.length);
  figure.hidden = !series.length;
  if (!series.length) return;
  const size = fitted(CHART, figure);
  const all = series.flatMap((each) => each.points);
  const [first, last] = range(all, 0);
  let [low, high] = range(all, 1);
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  [low, high] = [low >= 0 ? Math.max(0, low - margin) : low - margin, high + margin];
  const levels = ticks(low, high, 5);
  const { chart, x, y } = frame(
    size,
    { title: across, from: first, to: last, marks: ticks(first, last, size.width / 100).filter(Number.isInteger), show: number },
    { title: unit, from: low, to: high, marks: levels, show: (value) => markOf(value, levels.step) },
  );
  const together = coinciding(series, high - low);
  series.forEach(({ points, colour: stroke, dots }, place) => {
    if (!dots) {
      const line = (of) => of.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
      const drawn = { fill: "none", stroke, "stroke-width": 1.8, "stroke-linejoin": "round" };
      const turn = Math.max(0, ...together.map((group) => group.indexOf(place)));
      if (turn) drawn["stroke-dasharray"] = `${6 / turn} 7`; // the one below shows through
      if (smoothing) chart.append(svg("path", { ...drawn, d: line(points), opacity: 0.25 }));
      chart.append(svg("path", { ...drawn, d: line(smoothing ? smooth(points, smoothing) : points) }));
    }
    if (dots || points.length === 1) {
      for (const p of points) chart.append(svg("circle", { cx: x(p[0]), cy: y(p[1]), r: 4, fill: "var(--card)", stroke, "stroke-width": 2 }));
    }
  });
  const caption = element("figcaption", {}, title);
  const values = series.map(({ name, colour: background }) => {
    const value = element("span");
    const key = element("span", { class: "key" });
    if (name) key.append(element("i", { style: { background } }), name);
    key.append(value);
    caption.append(key);
    return value;
  });
  const notes = together.map((group) => element("p", { class: "quiet coincide" }, `${group.map((place) => series[place].name).join(" and ")} coincide: their curves lie on each other.`));
  figure.replaceChildren(caption, chart, ...notes);
  follow(chart, size, series, values, x, first, last);
}

/** The values at the update under the pointer, behind the names of the curves. */
function follow(chart, size, series, values, x, first, last) {
  const cross = svg("line", { class: "cross", y1: size.top, y2: size.height - size.bottom, visibility: "hidden" });
  chart.append(cross);
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * size.width;
    const share = (at - size.left) / (size.width - size.left - size.right);
    const wanted = first + Math.min(1, Math.max(0, share)) * (last - first);
    series.forEach(({ points }, place) => {
      const near = points.reduce((a, b) => (Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a));
      values[place].textContent = ` ${number(near[1])} (${number(near[0])})`;
      if (!place) for (const end of ["x1", "x2"]) cross.setAttribute(end, x(near[0]));
    });
    cross.setAttribute("visibility", "visible");
  });
  chart.addEventListener("pointerleave", () => {
    cross.setAttribute("visibility", "hidden");
    for (const value of values) value.textContent = "";
  });
}

/** What an update is worth on an axis; undefined where a run does not say it. Time is without start, evaluations and saves. */
const WORTH = {
  updates: () => 1,
  samples: ({ samples_per_s: speed, seconds_per_update: seconds }) => Math.round(speed * seconds) || undefined,
  seconds: ({ seconds_per_update: seconds }) => seconds || undefined,
};

/** Loss and throughput: of one run with its evaluations, of several runs on one scale. */
function showCurves(runs, chosen) {
  byId("axis").hidden = !runs.every((each) => WORTH.samples(each.summary));
  const across = byId("axis").hidden ? "updates" : byId("across").value;
  const points = (run, key) => run[key].map(([update, value]) => [update * WORTH[across](run.summary), value]);
  const together = (key) => runs.map((run, place) => ({ name: run.name, points: points(run, key), colour: `var(--series-${place % 6})` }));
  const run = runs[chosen];
  const alone = runs.length === 1;
  byId("curves").hidden = false; // hidden, it has no width
  const smoothing = Number(byId("smoothing").value);
  byId("smoothing-value").textContent = smoothing ? smoothing.toFixed(2) : "off";
  byId("smoother").hidden = !runs.some((each) => each.losses.length >= SMOOTHED);
  showChart(byId("loss"), "Loss", "loss", alone
    ? [
        { name: "training", points: points(run, "losses"), colour: "var(--series-0)" },
        { name: "evaluation", points: points(run, "evaluations"), colour: "var(--series-1)", dots: true },
      ]
    : together("losses"), across, smoothing);
  showChart(byId("throughput"), "Throughput, mean so far", "samples a second", alone
    ? [{ name: "", points: points(run, "throughput"), colour: "var(--series-2)" }]
    : together("throughput"), across);
  byId("curves").hidden = byId("loss").hidden && byId("throughput").hidden;
}

/** The peak of each stage, with the plan's prediction as a mark. */
function showMemory(run) {
  const peaks = run.summary.peak_memory || [];
  byId("memory").hidden = !peaks.length;
  const planned = (run.plan.prediction && run.plan.prediction.peak_memory) || [];
  const device = (run.memory || []).some((line) => line.of === "device");
  // A plan counts tensors. What a process holds is mostly its libraries: the two cannot be compared.
  const predicted = device && planned.length === peaks.length ? planned : [];
  const most = Math.max(...peaks, ...predicted);
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
  const times = ticks(0, last, 3);
  const { chart, x, y } = frame(
    SMALL,
    { title: "time", from: 0, to: last, marks: times, show: (time) => mark(1e6 * time, 1e6 * times.step, 1e6 * last) },
    { title: "memory", from: 0, to: high, marks: byteTicks(high, 4), show: (value) => byteMark(value, high) },
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
  const told = element("span", {});
  followMemory(chart, points, x, last, stepped, (text) => (told.textContent = text || ` ${title}, at most ${bytes(peak)}`));
  return element("figure", { "data-memory": rank }, element("figcaption", {}, element("b", {}, `rank ${rank}`), told), chart);
}

/** The memory at the time under the pointer, in place of what the title says otherwise. */
function followMemory(chart, points, x, last, stepped, tell) {
  const cross = svg("line", { class: "cross", y1: SMALL.top, y2: SMALL.height - SMALL.bottom, visibility: "hidden" });
  chart.append(cross);
  tell("");
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * SMALL.width;
    const share = (at - SMALL.left) / (SMALL.width - SMALL.left - SMALL.right);
    const wanted = Math.min(1, Math.max(0, share)) * last;
    const before = points.filter(([time]) => time <= wanted).pop() || points[0];
    const near = points.reduce((a, b) => (Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a));
    const [time, value] = stepped ? [wanted, before[1]] : near;
    for (const end of ["x1", "x2"]) cross.setAttribute(end, x(time));
    cross.setAttribute("visibility", "visible");
    tell(` ${bytes(value)} at ${duration(1e6 * time)}`);
  });
  chart.addEventListener("pointerleave", () => {
    cross.setAttribute("visibility", "hidden");
    tell("");
  });
}

function showMemoryOverTime(run) {
  const counted = (run.memory || []).filter((line) => line.counted.length > 1);
  const sampled = (run.memory || []).filter((line) => line.process.length > 1);
  byId("memory-time").hidden = !counted.length && !sampled.length;
  const planned = run.predicted ? Object.fromEntries(run.predicted.lanes.map((lane) => [lane.rank, lane.peak_memory])) : {};
  byId("memory-counted").replaceChildren(...counted.map(({ rank, stages, counted: points }) => {
    const levels = [];
    if (planned[rank]) levels.push({ label: `${run.predicted.word} peak ${bytes(planned[rank])}`, value: planned[rank], colour: "var(--accent)" });
    if (run.cap) levels.push({ label: `cap ${bytes(run.cap)}`, value: run.cap, colour: "var(--ink)" });
    return memoryChart(rank, `stage ${stages.join(", ")}`, points, "var(--forward)", levels);
  }));
  byId("memory-process").replaceChildren(...sampled.map((line) => memoryChart(line.rank, line.of, line.process, "var(--send)")));
  const device = sampled.some((line) => line.of === "device");
  byId("memory-measured").textContent = device ? "As measured on the GPU, CUDA graphs included" : "As measured, libraries included";
  byId("memory-time-note").textContent =
    "By count: weights, gradients, optimizer state, old weight versions, and for each minibatch in flight the bytes of the first one." +
    (run.predicted ? ` The ${run.predicted.word} peak is that of a simulation with ${run.predicted.source}.` : "") + (run.cap ? "" : " The configuration sets no cap (gpu_memory).");
}
