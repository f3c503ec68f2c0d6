"use strict";
// The timelines of several runs, one below the other: the same minibatches of each, on one scale of time.

const ROW = 15;
const FEWEST = 8; // minibatches that are shown, if the runs have so many
const STRIP_AXIS = 20;

let stacked = []; // {name, lanes, from, to, count, canvas}

function prepareStacked(runs) {
  const drawn = runs.map((run, place) => ({ run, place })).filter(({ run }) => run.timeline);
  byId("stacked").hidden = drawn.length < 2;
  if (drawn.length < 2) return;
  const period = ({ plan }) => plan.minibatches || plan.update_interval || 1;
  const longest = Math.max(...drawn.map(({ run }) => period(run)));
  const wanted = longest * Math.ceil(FEWEST / longest);
  const count = Math.min(wanted, ...drawn.map(({ run }) => minibatchesOf(run.timeline)[1]));
  stacked = drawn.map(({ run, place }) => {
    const lanes = run.timeline.lanes.map((lane) => prepareLane(lane, run.timeline.ops));
    const stretch = stretchOf(lanes, minibatchesOf(run.timeline), count, period(run));
    const canvas = element("canvas", { "aria-label": `actions of ${run.name}` });
    const time = element("span", {}, ` ${count} minibatches in ${duration(stretch.to - stretch.from)}`);
    const name = element("p", { class: "name" }, element("i", { style: { background: `var(--series-${place % 6})` } }), run.name, time);
    byId("stacked-runs").append(element("div", { class: "stack" }, name, canvas));
    return { lanes, canvas, ...stretch };
  });
  byId("stacked-note").textContent =
    `${count} minibatches from the middle of each run, a row a rank: from the first forward of them to the end of the last action, so a shorter one is faster. ` +
    "The runs were not made at the same time; colours are those of the timeline below.";
}

/** The first minibatch of training in a record, and how many there are. */
function minibatchesOf(timeline) {
  let [low, high] = [Infinity, -1];
  for (const lane of timeline.lanes) {
    lane.minibatch.forEach((minibatch, i) => {
      if (lane.evaluation[i]) return;
      low = Math.min(low, minibatch);
      high = Math.max(high, minibatch);
    });
  }
  return [low, Math.max(0, high - low + 1)];
}

/** When `count` minibatches from the middle of a record began and ended; the first is the first of an update. */
function stretchOf(lanes, [low, available], count, period) {
  const middle = low + Math.floor((available - count) / 2);
  const first = Math.max(low, Math.floor(middle / period) * period);
  let [from, to] = [Infinity, -Infinity];
  for (const lane of lanes) {
    for (let i = 0; i < lane.count; i++) {
      const minibatch = lane.minibatch[i];
      if (lane.evaluation[i] || minibatch < first || minibatch >= first + count) continue;
      if (lane.kind[i] === KIND.forward) from = Math.min(from, lane.start[i]);
      to = Math.max(to, lane.start[i] + lane.duration[i]);
    }
  }
  return from < to ? { from, to } : { from: 0, to: 1 };
}

function drawStacked() {
  const span = Math.max(...stacked.map(({ from, to }) => to - from));
  const times = ticks(0, span, Math.max(2, innerWidth / 160));
  stacked.forEach(({ lanes, from, to, canvas }, place) => {
    const last = place === stacked.length - 1;
    const height = lanes.length * ROW + (last ? STRIP_AXIS : 0);
    const ratio = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(canvas.clientWidth * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const colours = palette(context);
    const width = canvas.clientWidth;
    lanes.forEach((lane, row) => {
      const box = { x: 0, y: row * ROW, width, height: ROW - 2 };
      drawActions(context, lane, { from, to: from + span }, box, colours, () => false, null);
      context.fillStyle = colours.card; // what follows belongs to other minibatches
      context.globalAlpha = 0.8;
      context.fillRect((width * (to - from)) / span, box.y, width, ROW);
      context.globalAlpha = 1;
    });
    context.fillStyle = colours.ink;
    context.fillRect(Math.min(width - 1.5, (width * (to - from)) / span), 0, 1.5, lanes.length * ROW - 2);
    if (!last) return;
    context.font = "12px system-ui, sans-serif";
    context.fillStyle = colours.quiet;
    for (const time of times) {
      const text = mark(time, times.step, span);
      context.fillText(text, Math.min((width * time) / span, width - 7.5 * text.length), height - 4);
    }
  });
}
