"use strict";
// Helpers of all parts of the page: elements, readable numbers, colours.

const byId = (id) => document.getElementById(id);

/** An element with attributes and children; text is always text, never markup. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") Object.assign(made.style, value);
    else made.setAttribute(key, value);
  }
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

/** Microseconds as a readable time. */
function duration(micro) {
  if (micro >= 1e6) return `${(micro / 1e6).toFixed(micro >= 1e7 ? 1 : 2)} s`;
  if (micro >= 1e3) return `${(micro / 1e3).toFixed(micro >= 1e4 ? 1 : 2)} ms`;
  return `${micro.toFixed(micro >= 10 ? 0 : 1)} µs`;
}

/** A time on an axis that ends at `last`, with marks `step` microseconds apart: one unit, and as many digits as the marks need to differ. */
function mark(micro, step, last) {
  const [unit, scale] = last >= 1e6 ? ["s", 1e6] : last >= 1e3 ? ["ms", 1e3] : ["µs", 1];
  return `${(micro / scale).toFixed(digitsOf(step / scale))} ${unit}`;
}

/** Digits behind the point that a round step has. */
function digitsOf(step) {
  let digits = 0;
  while (digits < 7 && Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6) digits += 1;
  return digits;
}

/** A number on an axis with marks `step` apart: all with as many digits. */
const markOf = (value, step) => (Math.abs(value) >= 1000 ? number(value) : value.toFixed(digitsOf(step)));

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (count >= 1024 && place < units.length - 1) {
    count /= 1024;
    place += 1;
  }
  return place ? `${count.toFixed(1)} ${units[place]}` : `${count} B`;
}

/** A count of bytes on an axis that ends at `last`. */
function byteMark(count, last) {
  const place = Math.max(0, Math.min(4, Math.floor(Math.log2(Math.max(1, last)) / 10)));
  return `${number(count / 1024 ** place)} ${["B", "KiB", "MiB", "GiB", "TiB"][place]}`;
}

/** Round steps of bytes from 0. */
function byteTicks(last, count) {
  const unit = 1024 ** Math.max(0, Math.min(4, Math.floor(Math.log2(Math.max(1, last)) / 10)));
  return ticks(0, last / unit, count).map((value) => value * unit);
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;
const known = (value) => value !== null && value !== undefined;

function number(value) {
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** What a rank's time goes to; `css` names the colour. */
const KINDS = [
  { key: "forward", label: "forward" },
  { key: "backward", label: "backward" },
  { key: "weight", label: "weight gradient" },
  { key: "update", label: "update" },
  { key: "send", label: "sending, receiving" },
  { key: "evaluation", label: "evaluation" },
  { key: "wait", label: "waiting" },
];
const KIND = Object.fromEntries(KINDS.map((kind, place) => [kind.key, place]));
const KIND_OF_OP = {
  F: KIND.forward, B: KIND.backward, I: KIND.backward, W: KIND.weight, STEP: KIND.update,
  SEND_F: KIND.send, SEND_B: KIND.send, RECV_F: KIND.send, RECV_B: KIND.send, REDUCE: KIND.send,
};
const NAME_OF_OP = {
  F: "forward", B: "backward", I: "gradient of the inputs", W: "gradient of the weights", STEP: "update",
  SEND_F: "send an activation", SEND_B: "send a gradient", RECV_F: "receive an activation",
  RECV_B: "receive a gradient", REDUCE: "share gradients",
};

/** Round places on an axis, about `count` of them between the ends, and how far apart they are (`step`). */
function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const scale = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * scale).find((candidate) => candidate >= raw);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(value);
  found.step = step;
  return found;
}
