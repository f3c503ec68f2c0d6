"use strict";
// Beside the measured actions: the predicted ones, the life of one tensor, and shares of time.

// Prediction: one period of the simulated schedule, repeated for the minibatches of the record.

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

/** The place of each action of training in a lane. */
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

// The life of one tensor, from the stage that makes it to the one that reads it, and of its gradient back.

/** The tensor of an action, from stage `producer` to stage `reader`; null if the action has none. */
function tensorOf(timeline, lane, i) {
  const op = timeline.data.ops[lane.op[i]];
  const stage = lane.stage[i];
  const edges = timeline.data.edges;
  const behind = edges.find(([producer]) => producer === stage);
  const before = edges.find(([, reader]) => reader === stage);
  const chosen = ["RECV_F", "SEND_B"].includes(op) ? before || behind : ["F", "SEND_F", "RECV_B"].includes(op) ? behind || before : before || behind;
  return chosen ? { producer: chosen[0], reader: chosen[1], minibatch: lane.minibatch[i] } : null;
}

const LIFE = [
  ["F", "producer", "makes it"],
  ["SEND_F", "producer", "sends it"],
  ["RECV_F", "reader", "receives it"],
  ["F", "reader", "reads it"],
  ["B", "reader", "makes its gradient"],
  ["SEND_B", "reader", "sends the gradient"],
  ["RECV_B", "producer", "receives the gradient"],
  ["B", "producer", "reads the gradient: both are free"],
];

/** Its recorded steps in the order of time. */
function lifeOf(timeline, tensor) {
  const found = [];
  for (const [name, end, what] of LIFE) {
    for (const op of name === "B" ? ["B", "I"] : [name]) {
      const key = keyOf(tensor[end], timeline.data.ops.indexOf(op), tensor.minibatch);
      for (const lane of timeline.lanes) {
        const i = lane.at.get(key);
        if (i !== undefined) found.push({ lane, i, what, op });
      }
    }
  }
  return found;
}

function showLife(timeline, chosen) {
  const section = byId("life");
  const tensor = chosen && !chosen.lane.evaluation[chosen.i] ? tensorOf(timeline, chosen.lane, chosen.i) : null;
  const steps = tensor ? lifeOf(timeline, tensor) : [];
  section.hidden = !steps.length;
  if (!steps.length) return;
  const [first, last] = [steps[0], steps[steps.length - 1]];
  const end = ({ lane, i }) => lane.start[i] + lane.duration[i];
  byId("life-title").textContent =
    `The tensor from stage ${tensor.producer} to stage ${tensor.reader}, minibatch ${tensor.minibatch}: ` +
    `${duration(end(last) - first.lane.start[first.i])} from its making to the use of its gradient`;
  const items = [];
  steps.forEach((step, place) => {
    const { lane, i, what } = step;
    if (place) {
      const gap = lane.start[i] - end(steps[place - 1]);
      items.push(element("li", { class: "gap" }, gap > 0 ? duration(gap) : "at once"));
    }
    const kind = KINDS[lane.kind[i]];
    const lines = [`rank ${lane.rank} ${what}`, `${duration(lane.start[i] - first.lane.start[first.i])} after the start, took ${duration(lane.duration[i])}`];
    if (lane.wait[i] >= 0.1) lines.push(`of which waiting ${duration(lane.wait[i])}`);
    if (lane.bytes[i]) lines.push(bytes(lane.bytes[i]));
    if (lane.version[i] >= 0) lines.push(`weight version ${lane.version[i]}`);
    items.push(
      element(
        "li",
        { style: { borderTopColor: `var(--${kind.key})` }, "data-step": timeline.nameOf(lane, i) },
        element("b", {}, timeline.nameOf(lane, i)),
        ...lines.map((line) => element("span", {}, line)),
      ),
    );
  });
  byId("life-steps").replaceChildren(...items);
}

// Shares of time

function showShares(timeline) {
  const { lanes, view, predictedLanes, anchoredAt } = timeline;
  byId("window").textContent = `in the ${duration(view.to - view.from)} that the timeline shows`;
  byId("anchor").textContent = anchoredAt ? ` Measured and ${timeline.word} begin together at ${anchoredAt}.` : "";
  byId("shares").replaceChildren(...lanes.flatMap((lane, row) => shareRow(lane, view, predictedLanes && predictedLanes[row], timeline.word)));
}

function shareRow(lane, view, other, word) {
  const span = view.to - view.from;
  const times = timeOfKinds(lane, view.from, view.to);
  const parts = KINDS.map((kind, place) => {
    const share = times[place] / span;
    const title = `${kind.label}: ${percent(share)}, ${duration(times[place])}`;
    const part = element("i", { title, style: { width: `${100 * share}%` } });
    if (kind.key === "wait") part.className = "waiting";
    else part.style.background = `var(--${kind.key})`;
    return part;
  });
  const waiting = times[KIND.wait] / span;
  const computing = (times[KIND.forward] + times[KIND.backward] + times[KIND.weight] + times[KIND.update]) / span;
  const between = Math.max(0, 1 - times.reduce((a, b) => a + b, 0) / span);
  return [
    element("span", {}, `rank ${lane.rank}`),
    element("div", { class: "bar", "data-rank": lane.rank, "data-wait": waiting.toFixed(6) }, ...parts),
    element(
      "span",
      { class: "value" },
      `${percent(computing)} computing · ${percent(waiting)} waiting · bubble ${percent(waiting + between)}` +
        (other ? `, ${word} ${percent(other.bubble)}` : ""),
    ),
  ];
}
