"use strict";
// What lies over and above the lanes of a timeline: messages as arrows, and the strip of the whole record.

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
  context.fillText("whole record", 0, 18);
  context.fillText(duration(data.end), 0, 33);
}
