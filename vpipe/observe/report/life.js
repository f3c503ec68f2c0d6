"use strict";
// The life of one tensor, from the stage that makes it to the one that reads it, and of its gradient back.

/** The tensor that an action has to do with goes from `producer` to `reader`; null if it has to do with none. */
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

/** Its steps in the order of their times, as far as they are recorded. */
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
