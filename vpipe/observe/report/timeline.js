"use strict";
// The timeline: lanes with zoom, scrolling and a tooltip, below a strip of the whole record.

const ARROWS = 240; // the most that are drawn at once
const LETTER = 7.4; // pixels of a digit, or a little more
const FIRST_LOOK = 100; // actions of a lane that the first view shows of a long record

class Timeline {
  /** `changed(timeline)` is called after each drawing, `chose(timeline, {lane, i})` when an action is clicked. */
  constructor(data, predicted, changed, chose) {
    this.data = data;
    this.lanes = data.lanes.map((lane) => ({ ...prepareLane(lane, data.ops), at: placesOf(lane) }));
    this.word = predicted ? predicted.word : "";
    this.predictedLanes = expandPrediction(predicted, data);
    this.pitch = LANE + (this.predictedLanes ? PREDICTED + 2 : 0) + STRIP + GAP;
    this.changed = changed;
    this.chose = chose;
    this.chosen = null; // {lane, i}
    this.canvas = byId("lanes");
    this.overview = byId("overview");
    this.pointed = null; // {lane, i}
    this.shift = null; // microseconds that the record is later than the prediction
    this.highest = Math.max(1, ...this.lanes.flatMap((lane) => lane.most));
    this.view = this.firstView();
    this.listen();
    this.resize();
  }

  /** A stretch from the middle of a long record: all of it at once would show nothing. */
  firstView() {
    const longest = this.lanes.reduce((a, b) => (b.count > a.count ? b : a));
    if (longest.count <= 2 * FIRST_LOOK) return { from: 0, to: this.data.end };
    const begin = (longest.count - FIRST_LOOK) >> 1;
    return { from: longest.start[begin], to: longest.start[begin + FIRST_LOOK] };
  }

  listen() {
    const { canvas, overview } = this;
    const stop = (this.stopper = new AbortController());
    const on = (target, name, handle, options = {}) =>
      target.addEventListener(name, handle, { signal: stop.signal, ...options });
    on(canvas, "wheel", (event) => {
      event.preventDefault();
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (sideways) this.move((event.deltaX / this.width) * (this.view.to - this.view.from));
      else this.zoom(1.0018 ** event.deltaY, this.timeAt(event.offsetX));
    }, { passive: false });
    on(canvas, "pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      canvas.classList.add("dragging");
      this.dragged = { x: event.offsetX, view: { ...this.view }, moved: false };
    });
    on(canvas, "pointermove", (event) => (this.dragged ? this.drag(event) : this.point(event)));
    for (const name of ["pointerup", "pointercancel"]) {
      on(canvas, name, (event) => {
        const click = name === "pointerup" && this.dragged && !this.dragged.moved;
        this.dragged = null;
        canvas.classList.remove("dragging");
        if (click) this.choose(event);
      });
    }
    on(canvas, "pointerleave", () => this.pointAt(null));
    on(canvas, "dblclick", () => this.show(0, this.data.end));
    on(canvas, "keydown", (event) => this.press(event));
    const jump = (event) => {
      if (!event.buttons) return;
      const middle = ((event.offsetX - LABELS) / this.width) * this.data.end;
      this.move(middle - (this.view.from + this.view.to) / 2);
    };
    on(overview, "pointerdown", jump);
    on(overview, "pointermove", jump);
    on(byId("zoom-in"), "click", () => this.zoom(0.5));
    on(byId("zoom-out"), "click", () => this.zoom(2));
    on(byId("zoom-all"), "click", () => this.show(0, this.data.end));
  }

  close() {
    this.chose(this, null);
    this.stopper.abort();
    cancelAnimationFrame(this.requested);
    byId("tip").hidden = true;
  }

  press(event) {
    const span = this.view.to - this.view.from;
    const moves = {
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
      0: () => this.show(0, this.data.end),
      ArrowLeft: () => this.move(-span / 5), ArrowRight: () => this.move(span / 5),
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    moves[event.key]();
  }

  // Where the view is

  timeAt(x) {
    return this.view.from + ((x - LABELS) / this.width) * (this.view.to - this.view.from);
  }

  zoom(factor, around = (this.view.from + this.view.to) / 2) {
    this.show(around - (around - this.view.from) * factor, around + (this.view.to - around) * factor);
  }

  move(by) {
    this.show(this.view.from + by, this.view.to + by);
  }

  /** Show a stretch of time; it stays within the record. */
  show(from, to) {
    const span = Math.min(this.data.end, Math.max(10, to - from));
    const begin = Math.min(Math.max(0, from), this.data.end - span);
    this.view = { from: begin, to: begin + span };
    this.redraw();
  }

  drag(event) {
    const { x, view } = this.dragged;
    if (Math.abs(x - event.offsetX) > 3) this.dragged.moved = true;
    if (!this.dragged.moved) return;
    const by = ((x - event.offsetX) / this.width) * (view.to - view.from);
    this.show(view.from + by, view.to + by);
  }

  // What is pointed at

  /** The action at a place of the canvas, measured or predicted; null between actions. */
  under(x, y) {
    const row = Math.floor((y - AXIS) / this.pitch);
    const below = (y - AXIS) % this.pitch;
    const inPredicted = this.predictedLanes && this.shift !== null && below > LANE && below <= LANE + PREDICTED + 2;
    const lane = below <= LANE ? this.lanes[row] : inPredicted ? this.predictedLanes[row] : null;
    if (!lane || y < AXIS || x < LABELS) return null;
    const time = this.timeAt(x) - (lane.predicted ? this.shift : 0);
    const i = firstAfter(lane, time);
    return i >= lane.count || lane.start[i] > time ? null : { lane, i };
  }

  point(event) {
    this.pointAt(this.under(event.offsetX, event.offsetY), event.offsetX, event.offsetY);
  }

  /** A click stays with an action until the next one. */
  choose(event) {
    const found = this.under(event.offsetX, event.offsetY);
    this.chosen = found && !found.lane.predicted ? found : null;
    this.chose(this, this.chosen);
    this.redraw();
  }

  pointAt(pointed, x = 0, y = 0) {
    const tip = byId("tip");
    const same = pointed && this.pointed && pointed.lane === this.pointed.lane && pointed.i === this.pointed.i;
    const changed = !same && (pointed || this.pointed);
    this.pointed = pointed;
    tip.hidden = !pointed;
    if (pointed) {
      if (!same) tip.replaceChildren(...this.describe(pointed.lane, pointed.i));
      const box = this.canvas.getBoundingClientRect();
      tip.style.left = `${Math.max(0, Math.min(x + 14, box.width - tip.offsetWidth))}px`;
      tip.style.top = `${this.canvas.offsetTop + y + 18}px`;
    }
    if (changed) this.redraw();
  }

  describe(lane, i) {
    const op = this.data.ops[lane.op[i]];
    const kind = KINDS[lane.kind[i]];
    const rows = [
      ["minibatch", lane.minibatch[i]],
      ["stage", lane.stage[i]],
      ["took", duration(lane.duration[i])],
    ];
    if (lane.wait[i] >= 0.1) rows.push(["of which waiting", duration(lane.wait[i])]);
    if (lane.version[i] >= 0) rows.push([op === "STEP" ? "made weight version" : "weight version", lane.version[i]]);
    if (lane.bytes[i]) rows.push(["bytes", bytes(lane.bytes[i])]);
    const twin = this.twinOf(lane, i);
    if (twin !== null) rows.push([lane.predicted ? "measured" : this.word, duration(twin)]);
    if (!lane.predicted) rows.push(["at", duration(lane.start[i])]);
    const more = `${lane.evaluation[i] ? ", evaluation" : ""}${lane.predicted ? `, ${this.word}` : ""}`;
    return [
      element("i", { style: { background: `var(--${kind.key})` } }),
      element("b", {}, this.nameOf(lane, i)),
      ` ${NAME_OF_OP[op]}${more}`,
      element("dl", {}, ...rows.flatMap(([key, value]) => [element("dt", {}, key), element("dd", {}, value)])),
    ];
  }

  /** How long the same action took on the other side: measured of a predicted one, predicted of a measured one. */
  twinOf(lane, i) {
    const row = (lane.predicted ? this.predictedLanes : this.lanes).indexOf(lane);
    const other = lane.predicted ? this.lanes[row] : this.predictedLanes && !lane.evaluation[i] ? this.predictedLanes[row] : null;
    const place = other ? other.at.get(keyOf(lane.stage[i], lane.op[i], lane.minibatch[i])) : undefined;
    return place === undefined ? null : other.duration[place] - other.wait[place];
  }

  nameOf(lane, i) {
    return `${lane.stage[i]}${this.data.ops[lane.op[i]]}${lane.minibatch[i]}`;
  }

  // Drawing

  resize() {
    LABELS = this.canvas.clientWidth < NARROW ? 62 : 122;
    this.width = this.canvas.clientWidth - LABELS;
    const height = AXIS + this.lanes.length * this.pitch - GAP + 4;
    const ratio = window.devicePixelRatio || 1;
    for (const [canvas, tall] of [[this.canvas, height], [this.overview, 40]]) {
      canvas.style.height = `${tall}px`;
      canvas.width = Math.round(canvas.clientWidth * ratio);
      canvas.height = Math.round(tall * ratio);
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    this.context = this.canvas.getContext("2d");
    this.colours = palette(this.context);
    this.whole = null;
    this.paint();
  }

  /** Draw with the next frame, once, however often this is called. */
  redraw() {
    this.requested ||= requestAnimationFrame(() => this.paint());
  }

  paint() {
    this.requested = 0;
    this.draw();
    drawOverview(this);
    this.changed(this);
  }

  draw() {
    const { context, view, colours } = this;
    context.clearRect(0, 0, LABELS + this.width, this.canvas.clientHeight);
    this.drawAxis();
    const at = this.pointed || this.chosen;
    const focus = at && !at.lane.evaluation[at.i] ? at : null;
    const minibatch = focus ? focus.lane.minibatch[focus.i] : null;
    const found = this.predictedLanes ? anchor(this) : null;
    this.shift = found ? found.shift : null;
    this.anchoredAt = found ? found.name : null;
    this.lanes.forEach((lane, row) => this.drawLane(lane, row, minibatch));
    drawArrows(this, minibatch);
  }

  drawLane(lane, row, minibatch) {
    const { context, view, colours } = this;
    const y = AXIS + row * this.pitch;
    const box = { x: LABELS, y, width: this.width, height: LANE };
    const dimmed = (of) => (i) => minibatch !== null && (of.minibatch[i] !== minibatch || of.evaluation[i] === 1);
    drawActions(context, lane, view, box, colours, dimmed(lane), (i, x, width) => this.write(lane, i, x, y, LANE, width));
    if (this.chosen && this.chosen.lane === lane) this.frame(lane, this.chosen.i, y);
    let below = y + LANE + 2;
    context.font = "11px system-ui, sans-serif";
    if (this.predictedLanes) {
      const other = this.predictedLanes[row];
      const place = { ...box, y: below, height: PREDICTED };
      if (this.shift !== null) {
        const moved = { from: view.from - this.shift, to: view.to - this.shift };
        context.save();
        context.globalAlpha = 0.8;
        drawActions(context, other, moved, place, colours, dimmed(other), (i, x, width) => this.write(other, i, x, place.y, PREDICTED, width));
        context.restore();
      }
      context.fillStyle = colours.quiet;
      context.fillText(this.word, 0, below + 13);
      below += PREDICTED + 2;
    }
    drawCounts(context, lane, view, { ...box, y: below, height: STRIP - 2 }, this.highest, colours);
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = colours.quiet;
    const narrow = LABELS < 100;
    context.fillText(`${narrow ? "" : "in flight "}≤ ${lane.most[0]}`, 0, below + 12);
    context.fillStyle = colours.accent;
    context.fillText(`v ≤ ${lane.most[1]}`, narrow ? 28 : 76, below + 12);
    context.fillStyle = colours.ink;
    context.font = "600 13px system-ui, sans-serif";
    context.fillText(`rank ${lane.rank}`, 0, y + 14);
    context.fillStyle = colours.quiet;
    context.font = "12px system-ui, sans-serif";
    context.fillText(`stage ${lane.stages.join(", ")}`, 0, y + 29);
  }

  /** A frame around the action that was clicked. */
  frame(lane, i, y) {
    const { context, view, colours } = this;
    const scale = this.width / (view.to - view.from);
    const left = Math.max(0, (lane.start[i] - view.from) * scale);
    const right = Math.min(this.width, (lane.start[i] + lane.duration[i] - view.from) * scale);
    if (right <= left) return;
    context.strokeStyle = colours.ink;
    context.lineWidth = 2;
    context.strokeRect(LABELS + left, y - 1, Math.max(2, right - left), LANE + 2);
  }

  write(lane, i, x, y, height, width) {
    const { context } = this;
    const room = (width - 6) / LETTER; // measuring each text would take longer than writing it
    const short = String(lane.minibatch[i]);
    const text = room > short.length + 3 ? this.nameOf(lane, i) : short;
    if (text.length > room) return;
    context.font = "12px system-ui, sans-serif";
    context.fillStyle = PALE.includes(lane.kind[i]) ? this.colours["on-pale"] : this.colours.on;
    context.fillText(text, x + (width - LETTER * text.length) / 2, y + height / 2 + 4);
  }

  drawAxis() {
    const { context, view, colours } = this;
    context.font = "12px system-ui, sans-serif";
    const times = ticks(view.from, view.to, Math.max(3, this.width / 140));
    for (const time of times) {
      const x = LABELS + ((time - view.from) / (view.to - view.from)) * this.width;
      context.fillStyle = colours.line;
      context.fillRect(x, AXIS - 6, 1, this.canvas.clientHeight);
      context.fillStyle = colours.quiet;
      if (x + 50 < LABELS + this.width) context.fillText(mark(time, times.step, view.to), x + 4, AXIS - 9);
    }
  }
}
