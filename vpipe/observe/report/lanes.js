"use strict";
// The lanes of a timeline on a canvas. Only what is visible is drawn, and what is too narrow to be seen is added up.

let LABELS = 122; // pixels left of the lanes: fewer on a narrow page
const NARROW = 560;
const PALE = [KIND.weight, KIND.evaluation];
const AXIS = 24;
const LANE = 32;
const PREDICTED = 18; // the predicted lane, right below the measured one
const STRIP = 18; // minibatches in flight and weight versions, below both
const GAP = 14;
const COLUMN = 2; // the width of a column in which many actions are added up
const CROWDED = 4; // with fewer pixels an action, there are columns

/** A lane with what drawing needs: the kind of each action, and sums of times over all actions before it. */
function prepareLane(lane, ops) {
  const count = lane.start.length;
  const kind = new Uint8Array(count);
  const sums = KINDS.map(() => new Float64Array(count + 1));
  for (let i = 0; i < count; i++) {
    kind[i] = lane.evaluation[i] ? KIND.evaluation : KIND_OF_OP[ops[lane.op[i]]];
    for (const sum of sums) sum[i + 1] = sum[i];
    sums[KIND.wait][i + 1] += lane.wait[i];
    sums[kind[i]][i + 1] += Math.max(0, lane.duration[i] - lane.wait[i]);
  }
  const most = (lane.counts || []).reduce((m, c) => [Math.max(m[0], c[1]), Math.max(m[1], c[2])], [0, 0]);
  return { ...lane, kind, sums, count, most };
}

/** The first action that ends after `time`. */
function firstAfter(lane, time) {
  let low = 0;
  let high = lane.count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.start[middle] + lane.duration[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Microseconds of each kind before a time, written into `found`; of the action that goes on then, its share. */
function timeBefore(lane, time, found) {
  const at = firstAfter(lane, time);
  for (let place = 0; place < KINDS.length; place++) found[place] = lane.sums[place][at];
  if (at < lane.count && lane.start[at] < time) {
    const share = (time - lane.start[at]) / lane.duration[at];
    found[KIND.wait] += share * lane.wait[at];
    found[lane.kind[at]] += share * Math.max(0, lane.duration[at] - lane.wait[at]);
  }
  return found;
}

/** Microseconds of each kind between two times. */
function timeOfKinds(lane, from, to) {
  const before = timeBefore(lane, from, new Float64Array(KINDS.length));
  return Array.from(timeBefore(lane, to, new Float64Array(KINDS.length)), (time, place) => time - before[place]);
}

function stripes(context) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.fillStyle = colour("wait");
  pen.fillRect(0, 0, 6, 6);
  pen.strokeStyle = colour("stripe");
  pen.lineWidth = 1.5;
  for (const shift of [-6, 0, 6]) {
    pen.beginPath();
    pen.moveTo(shift - 1, 7);
    pen.lineTo(shift + 7, -1);
    pen.stroke();
  }
  return context.createPattern(tile, "repeat");
}

/** Colours as they are now, light or dark. */
function palette(context) {
  const fills = KINDS.map((kind) => colour(kind.key));
  fills[KIND.wait] = stripes(context);
  const names = ["between", "ink", "quiet", "line", "accent", "on", "on-pale", "card", "flight", "wait"];
  return { fills, ...Object.fromEntries(names.map((name) => [name, colour(name)])) };
}

/** Draw one lane's actions into a box. `label(i, left, width)` writes on those that are wide enough. */
function drawActions(context, lane, view, box, colours, dimmed, label) {
  context.fillStyle = colours.between;
  context.fillRect(box.x, box.y, box.width, box.height);
  const begin = firstAfter(lane, view.from);
  const end = Math.min(lane.count, firstAfter(lane, view.to) + 1);
  if ((end - begin) * CROWDED > box.width) return drawColumns(context, lane, view, box, colours);
  const scale = box.width / (view.to - view.from);
  for (let i = begin; i < end; i++) {
    const left = (lane.start[i] - view.from) * scale;
    const width = lane.duration[i] * scale;
    const from = Math.max(0, left);
    const to = Math.min(box.width, left + width);
    if (to <= from) continue;
    const waited = Math.min(to, Math.max(from, left + lane.wait[i] * scale));
    context.globalAlpha = dimmed(i) ? 0.22 : 1;
    context.fillStyle = colours.fills[KIND.wait];
    context.fillRect(box.x + from, box.y, waited - from, box.height);
    context.fillStyle = colours.fills[lane.kind[i]];
    context.fillRect(box.x + waited, box.y, Math.max(0, to - waited - (width > 4 ? 1 : 0)), box.height);
    if (label && to - waited > 16) label(i, box.x + waited, to - waited);
    context.globalAlpha = 1;
  }
}

/** Actions too narrow to be seen: each column shows what its stretch of time went to, by height. */
function drawColumns(context, lane, view, box, colours) {
  const count = Math.ceil(box.width / COLUMN);
  const span = ((view.to - view.from) * COLUMN) / box.width;
  const kinds = KINDS.length;
  const tops = new Float64Array(count).fill(box.y + box.height);
  const times = new Float64Array(count * kinds);
  let before = timeBefore(lane, view.from, new Float64Array(kinds));
  let after = new Float64Array(kinds);
  for (let at = 0; at < count; at++) {
    timeBefore(lane, view.from + (at + 1) * span, after);
    for (let place = 0; place < kinds; place++) times[at * kinds + place] = after[place] - before[place];
    [before, after] = [after, before];
  }
  for (let place = 0; place < kinds; place++) {
    context.fillStyle = place === KIND.wait ? colours.wait : colours.fills[place];
    context.beginPath();
    for (let at = 0; at < count; at++) {
      const height = Math.min(1, times[at * kinds + place] / span) * box.height;
      if (height <= 0) continue;
      tops[at] -= height;
      context.rect(box.x + at * COLUMN, tops[at], COLUMN, height);
    }
    context.fill();
  }
}

/** Steps below a lane: minibatches in flight as an area, weight versions held as a line. */
function drawCounts(context, lane, view, box, highest, colours) {
  const area = countPath(lane, view, box, 1, highest);
  const filled = new Path2D(area);
  filled.lineTo(box.x + box.width, box.y + box.height);
  filled.lineTo(box.x, box.y + box.height);
  context.fillStyle = colours.flight;
  context.fill(filled);
  context.lineWidth = 1.25;
  context.strokeStyle = colours.quiet;
  context.stroke(area);
  context.strokeStyle = colours.accent;
  context.stroke(countPath(lane, view, box, 2, highest));
}

function countPath(lane, view, box, place, highest) {
  const scale = box.width / (view.to - view.from);
  const steps = []; // x and the count from there on; of steps that lie on one pixel, the highest
  let first = 0; // what holds at the left end
  for (const entry of lane.counts) {
    if (entry[0] > view.to) break;
    const x = (entry[0] - view.from) * scale;
    const last = steps[steps.length - 1];
    if (x <= 0) first = entry[place];
    else if (last && x - last[0] < 1) last[1] = Math.max(last[1], entry[place]);
    else steps.push([x, entry[place]]);
  }
  const path = new Path2D();
  const height = (count) => box.y + box.height - (count / highest) * (box.height - 2);
  let y = height(first);
  path.moveTo(box.x, y);
  for (const [x, count] of steps) {
    path.lineTo(box.x + x, y);
    y = height(count);
    path.lineTo(box.x + x, y);
  }
  path.lineTo(box.x + box.width, y);
  return path;
}

/** From where a message was sent to where it was received; of a minibatch that is pointed at, only its own. */
function drawArrows(timeline, minibatch) {
  const { context, view, lanes, colours } = timeline;
  const scale = timeline.width / (view.to - view.from);
  const inView = (time) => time >= view.from && time <= view.to;
  const found = [];
  for (const [source, sent, target, received] of timeline.data.messages) {
    const left = lanes[source].start[sent];
    const arrived = lanes[target].start[received] + lanes[target].duration[received];
    if (arrived < view.from || left > view.to || (!inView(left) && !inView(arrived))) continue;
    if (minibatch !== null && lanes[source].minibatch[sent] !== minibatch) continue;
    found.push([left, source, arrived, target]);
    if (found.length > ARROWS) return; // they would hide what they belong to
  }
  context.save();
  context.beginPath();
  context.rect(LABELS, 0, timeline.width, timeline.canvas.clientHeight);
  context.clip();
  context.strokeStyle = context.fillStyle = colours.ink;
  context.globalAlpha = minibatch === null ? 0.3 : 0.9;
  const place = (time) => LABELS + (time - view.from) * scale;
  for (const [left, source, arrived, target] of found) {
    const down = target > source;
    const x0 = place(left);
    const x1 = place(arrived);
    const y0 = AXIS + source * timeline.pitch + (down ? LANE : 0);
    const y1 = AXIS + target * timeline.pitch + (down ? 0 : LANE);
    const bend = (y1 - y0) * 0.5;
    context.beginPath();
    context.moveTo(x0, y0);
    context.bezierCurveTo(x0, y0 + bend, x1, y1 - bend, x1, y1);
    context.stroke();
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x1 - 3, y1 + (down ? -6 : 6));
    context.lineTo(x1 + 3, y1 + (down ? -6 : 6));
    context.fill();
  }
  context.restore();
}

/** The whole record, drawn once and kept, with a frame around what the lanes show. */
function drawOverview(timeline) {
  const { overview, colours, data, view, width } = timeline;
  const context = overview.getContext("2d");
  if (!timeline.whole) {
    const ratio = window.devicePixelRatio || 1;
    timeline.whole = element("canvas", { width: overview.width, height: overview.height });
    const pen = timeline.whole.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const tall = 36 / timeline.lanes.length;
    timeline.lanes.forEach((lane, row) => {
      const box = { x: LABELS, y: 2 + row * tall, width, height: Math.max(1, tall - 1) };
      drawActions(pen, lane, { from: 0, to: data.end }, box, colours, () => false, null);
    });
  }
  context.save();
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.clearRect(0, 0, overview.width, overview.height);
  context.drawImage(timeline.whole, 0, 0);
  context.restore();
  const x = LABELS + (view.from / data.end) * width;
  const wide = Math.max(3, ((view.to - view.from) / data.end) * width);
  context.fillStyle = colours.card;
  context.globalAlpha = 0.65;
  context.fillRect(LABELS, 0, x - LABELS, 40);
  context.fillRect(x + wide, 0, LABELS + width - x - wide, 40);
  context.globalAlpha = 1;
  context.strokeStyle = colours.ink;
  context.lineWidth = 1.5;
  context.strokeRect(x, 1, wide, 38);
  context.fillStyle = colours.quiet;
  context.font = "12px system-ui, sans-serif";
  context.fillText(LABELS < 100 ? "all of" : "whole record", 0, 18);
  context.fillText(duration(data.end), 0, 33);
}
