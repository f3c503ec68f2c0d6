"use strict";
// The predicted timeline: one stretch of the simulated schedule, repeated for the minibatches of the record.

/** A lane a rank, as the measured ones are, or null; `at` finds an action's place by `keyOf`. */
function expandPrediction(predicted, timeline) {
  if (!predicted) return null;
  let low = Infinity;
  let high = -1;
  for (const lane of timeline.lanes) {
    for (let i = 0; i < lane.minibatch.length; i++) {
      if (lane.evaluation[i]) continue;
      low = Math.min(low, lane.minibatch[i]);
      high = Math.max(high, lane.minibatch[i]);
    }
  }
  if (high < 0) return null;
  const first = Math.floor(low / predicted.minibatches);
  const turns = Math.floor(high / predicted.minibatches) - first + 1;
  return timeline.lanes.map(({ rank, stages }) => repeat(predicted, rank, stages, first, turns, timeline.ops));
}

function repeat(predicted, rank, stages, first, turns, ops) {
  const own = predicted.lanes.find((lane) => lane.rank === rank);
  const each = own.op.length;
  const start = Float64Array.from({ length: each * turns }, (_, i) => own.start[i % each] + Math.floor(i / each) * predicted.period);
  const order = Uint32Array.from(start.keys()).sort((a, b) => start[a] - start[b]);
  const column = (values) => Array.from(order, (i) => values[i % each]);
  const lane = {
    rank,
    stages,
    bubble: own.bubble,
    peak_memory: own.peak_memory,
    predicted: true,
    op: column(own.op),
    stage: column(own.stage),
    minibatch: Array.from(order, (i) => own.minibatch[i % each] + (first + Math.floor(i / each)) * predicted.minibatches),
    start: Array.from(order, (i) => start[i]),
    duration: column(own.duration),
    wait: new Uint8Array(each * turns),
    version: new Int8Array(each * turns).fill(-1),
    bytes: new Uint8Array(each * turns),
    evaluation: new Uint8Array(each * turns),
  };
  return { ...prepareLane(lane, ops), at: placesOf(lane) };
}

const keyOf = (stage, op, minibatch) => (minibatch * 256 + stage) * 16 + op;

/** Where each action of training stands in a lane. */
function placesOf(lane) {
  const places = new Map();
  for (let i = 0; i < lane.start.length; i++) {
    if (!lane.evaluation[i]) places.set(keyOf(lane.stage[i], lane.op[i], lane.minibatch[i]), i);
  }
  return places;
}

/** How much later the record is than the prediction, by the first forward in view: there the two begin together. */
function anchor(timeline) {
  const { lanes, predictedLanes, view, data } = timeline;
  const forward = data.ops.indexOf("F");
  for (let row = 0; row < lanes.length; row++) {
    const lane = lanes[row];
    const other = predictedLanes[row];
    for (let i = firstAfter(lane, view.from); i < lane.count; i++) {
      if (lane.op[i] !== forward || lane.evaluation[i]) continue;
      const place = other.at.get(keyOf(lane.stage[i], forward, lane.minibatch[i]));
      if (place !== undefined) return { shift: lane.start[i] - other.start[place], name: timeline.nameOf(lane, i) };
    }
  }
  return null;
}
