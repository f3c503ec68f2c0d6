"use strict";
// The timeline: lanes that can be zoomed, moved and pointed at, below a strip that shows the whole record.

const ARROWS = 240; // the most that are drawn at once
const FIRST_LOOK = 100; // actions of a lane that the first view shows of a long record

class Timeline {
  /** `changed(lanes, view)` is called after each drawing. */
  constructor(data, changed) {
    this.data = data;
    this.lanes = prepareLanes(data);
    this.changed = changed;
    this.canvas = byId("lanes");
    this.overview = byId("overview");
    this.pointed = null; // {lane, i}
    this.highest = Math.max(1, ...this.lanes.map((lane) => lane.counts.reduce((m, c) => Math.max(m, c[1], c[2]), 0)));
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
      this.dragged = { x: event.offsetX, view: { ...this.view } };
    });
    on(canvas, "pointermove", (event) => (this.dragged ? this.drag(event) : this.point(event)));
    for (const name of ["pointerup", "pointercancel"]) {
      on(canvas, name, () => {
        this.dragged = null;
        canvas.classList.remove("dragging");
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
    on(window, "resize", () => this.resize());
    on(matchMedia("(prefers-color-scheme: dark)"), "change", () => this.resize());
  }

  close() {
    this.stopper.abort();
    cancelAnimationFrame(this.asked);
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
    const by = ((x - event.offsetX) / this.width) * (view.to - view.from);
    this.show(view.from + by, view.to + by);
  }

  // What is pointed at

  point(event) {
    const row = Math.floor((event.offsetY - AXIS) / (LANE + STRIP + GAP));
    const inside = (event.offsetY - AXIS) % (LANE + STRIP + GAP) <= LANE;
    const lane = this.lanes[row];
    if (!lane || !inside || event.offsetX < LABELS) return this.pointAt(null);
    const time = this.timeAt(event.offsetX);
    const i = firstAfter(lane, time);
    if (i >= lane.count || lane.start[i] > time) return this.pointAt(null);
    this.pointAt({ lane, i }, event.offsetX, event.offsetY);
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
      tip.style.left = `${Math.min(x + 14, box.width - tip.offsetWidth)}px`;
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
    rows.push(["at", duration(lane.start[i])]);
    return [
      element("i", { style: { background: `var(--${kind.key})` } }),
      element("b", {}, this.nameOf(lane, i)),
      ` ${NAME_OF_OP[op]}${lane.evaluation[i] ? ", evaluation" : ""}`,
      element("dl", {}, ...rows.flatMap(([key, value]) => [element("dt", {}, key), element("dd", {}, value)])),
    ];
  }

  nameOf(lane, i) {
    return `${lane.stage[i]}${this.data.ops[lane.op[i]]}${lane.minibatch[i]}`;
  }

  // Drawing

  resize() {
    this.width = this.canvas.clientWidth - LABELS;
    const height = AXIS + this.lanes.length * (LANE + STRIP + GAP) - GAP + 4;
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

  /** Draw with the next frame, once, however often it is asked for. */
  redraw() {
    this.asked ||= requestAnimationFrame(() => this.paint());
  }

  paint() {
    this.asked = 0;
    this.draw();
    drawOverview(this);
    this.changed(this.lanes, this.view);
  }

  draw() {
    const { context, view, colours } = this;
    context.clearRect(0, 0, LABELS + this.width, this.canvas.clientHeight);
    this.drawAxis();
    const focus = this.pointed && !this.pointed.lane.evaluation[this.pointed.i] ? this.pointed : null;
    const minibatch = focus ? focus.lane.minibatch[focus.i] : null;
    this.lanes.forEach((lane, row) => {
      const y = AXIS + row * (LANE + STRIP + GAP);
      const box = { x: LABELS, y, width: this.width, height: LANE };
      const dimmed = (i) => minibatch !== null && (lane.minibatch[i] !== minibatch || lane.evaluation[i] === 1);
      drawActions(context, lane, view, box, colours, dimmed, (i, x, width) => this.write(lane, i, x, y, width));
      drawCounts(context, lane, view, { ...box, y: y + LANE + 2, height: STRIP - 2 }, this.highest, colours);
      context.fillStyle = colours.ink;
      context.font = "600 13px system-ui, sans-serif";
      context.fillText(`rank ${lane.rank}`, 0, y + 14);
      context.fillStyle = colours.quiet;
      context.font = "12px system-ui, sans-serif";
      context.fillText(`stage ${lane.stages.join(", ")}`, 0, y + 29);
    });
    drawArrows(this, minibatch);
  }

  write(lane, i, x, y, width) {
    const { context } = this;
    const texts = [this.nameOf(lane, i), String(lane.minibatch[i])];
    context.font = "12px system-ui, sans-serif";
    const text = texts.find((candidate) => context.measureText(candidate).width < width - 6);
    if (!text) return;
    context.fillStyle = this.colours.on;
    context.textAlign = "center";
    context.fillText(text, x + width / 2, y + LANE / 2 + 4);
    context.textAlign = "start";
  }

  drawAxis() {
    const { context, view, colours } = this;
    context.font = "12px system-ui, sans-serif";
    const times = ticks(view.from, view.to, Math.max(2, this.width / 140));
    for (const time of times) {
      const x = LABELS + ((time - view.from) / (view.to - view.from)) * this.width;
      context.fillStyle = colours.line;
      context.fillRect(x, AXIS - 6, 1, this.canvas.clientHeight);
      context.fillStyle = colours.quiet;
      if (x + 50 < LABELS + this.width) context.fillText(mark(time, times[1] - times[0]), x + 4, AXIS - 9);
    }
  }
}
