// Token strip on a canvas: a cell per token, coloured by one of its numbers, with the number under the cursor.

import { h, short } from "./dom.js";
import { category, diverging, readable, sequential } from "./palette.js";

export const COLUMNS = /** @type {[string, string][]} */ ([["logprobs", "logprob when sampled"], ["trainer_logprobs", "trainer's logprob"],
  ["ratio", "ratio"], ["versions", "version"], ["advantages", "advantage"], ["outcome", "outcome"], ["mask", "mask"]]);
const FONT = "13px ui-monospace, monospace";
const LINE = 24;
const GAP = 2;
/** Pixels of the canvas, which browsers limit; a higher strip scrolls, within style.css's height. */
const MAX_HEIGHT = 960;
const NONE = 255;
const WORST_LOGPROB = -5;
const WIDEST_LOG_RATIO = 1;

/**
 * Return a token's colour, or null where it has no number.
 * @param {any} segment
 * @param {number} i
 * @param {string} column
 * @param {{oldest: number, newest: number, largest: number}} range
 */
function colorOf(segment, i, column, range) {
  const value = segment[column][i];
  if (column === "mask") return value ? category(0) : null;
  if (!segment.mask[i] || Number.isNaN(value)) return null;
  switch (column) {
    case "outcome": return value === NONE ? null : category([0, 6, 1, 4, 3, 5, 7][value] ?? 7);
    case "versions": return sequential((value - range.oldest) / Math.max(1, range.newest - range.oldest));
    case "ratio": return diverging(Math.log(value) / WIDEST_LOG_RATIO);
    case "advantages": return diverging(value / (range.largest || 1));
    default: return sequential(1 - value / WORST_LOGPROB);
  }
}

/**
 * Describe a token in words.
 * @param {any} trajectory
 * @param {any} segment
 * @param {number} i
 */
function describe(trajectory, segment, i) {
  const piece = JSON.stringify(trajectory.pieces[segment.tokens[i]] ?? "");
  if (!segment.mask[i]) return `token ${i}: ${piece} (${segment.tokens[i]}), not sampled`;
  const outcome = segment.outcome[i] === NONE ? "not trained" : trajectory.outcomes[segment.outcome[i]];
  return `token ${i}: ${piece} (${segment.tokens[i]}), version ${segment.versions[i]}, logprob ${short(segment.logprobs[i])}, trainer ` +
    `${short(segment.trainer_logprobs[i])}, ratio ${short(segment.ratio[i])}, advantage ${short(segment.advantages[i])}, ${outcome.replaceAll("_", " ")}`;
}

/**
 * Make the strip of a segment.
 * @param {any} trajectory
 * @param {any} segment
 * @param {string} column
 * @param {number} width
 */
export function strip(trajectory, segment, column, width) {
  const sampled = [...segment.tokens.keys()].filter((i) => segment.mask[i]);
  const range = { oldest: Infinity, newest: -Infinity, largest: 0 };
  for (const i of sampled) {
    range.oldest = Math.min(range.oldest, segment.versions[i]);
    range.newest = Math.max(range.newest, segment.versions[i]);
    range.largest = Math.max(range.largest, Math.abs(segment.advantages[i]) || 0);
  }
  const canvas = h("canvas", { role: "img", tabindex: 0, "aria-label": `${segment.tokens.length} tokens, ${sampled.length} sampled, coloured by ${column}` });
  const readout = h("p", { class: "soft text", "aria-live": "polite" }, "Point at a token, or use the arrow keys.");
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.font = FONT;
  /** @type {{x: number, y: number, w: number, text: string}[]} */
  const cells = [];
  let [x, y] = [0, 0];
  for (const token of segment.tokens) {
    const text = (trajectory.pieces[token] ?? String(token)).replaceAll("\n", "↵").replaceAll(" ", "·") || "∅";
    const w = Math.min(context.measureText(text).width + 8, width);
    if (x + w > width) [x, y] = [0, y + LINE];
    cells.push({ x, y, w, text });
    x += w + GAP;
  }
  const height = Math.min(y + LINE, MAX_HEIGHT);
  const whole = h("div", {}, canvas);
  const scroller = h("div", { class: "strip" }, whole);
  whole.style.height = `${y + LINE}px`;
  canvas.width = width * devicePixelRatio;
  canvas.height = height * devicePixelRatio;
  canvas.style.width = `${width}px`;
  const ink = getComputedStyle(document.body).color;
  let chosen = -1;
  const paint = () => {
    const top = scroller.scrollTop;
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, -top * devicePixelRatio);
    context.clearRect(0, top, width, height);
    context.font = FONT;
    context.textBaseline = "middle";
    cells.forEach((cell, i) => {
      if (cell.y + LINE < top || cell.y > top + height) return;
      const color = colorOf(segment, i, column, range);
      if (color) {
        context.fillStyle = color;
        context.fillRect(cell.x, cell.y + 1, cell.w, LINE - 3);
      }
      context.fillStyle = color ? readable(color) : ink;
      context.globalAlpha = segment.mask[i] ? 1 : 0.65;
      context.fillText(cell.text, cell.x + 4, cell.y + LINE / 2, cell.w - 8);
      context.globalAlpha = 1;
      if (i === chosen) {
        context.strokeStyle = ink;
        context.lineWidth = 2;
        context.strokeRect(cell.x + 1, cell.y + 1, cell.w - 2, LINE - 3);
      }
    });
  };
  const choose = (/** @type {number} */ i, scrolls = false) => {
    if (i < 0 || i >= cells.length || i === chosen) return;
    chosen = i;
    readout.textContent = describe(trajectory, segment, i);
    const hidden = cells[i].y - scroller.scrollTop;
    if (scrolls && (hidden < 0 || hidden + LINE > height)) scroller.scrollTop = cells[i].y - height / 2;
    paint();
  };
  canvas.addEventListener("mousemove", (event) => {
    const box = canvas.getBoundingClientRect();
    const [left, top] = [(event.clientX - box.left) * width / box.width, (event.clientY - box.top) * height / box.height + scroller.scrollTop];
    choose(cells.findIndex((cell) => left >= cell.x && left < cell.x + cell.w && top >= cell.y && top < cell.y + LINE));
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) { event.preventDefault(); choose(Math.max(0, chosen + step), true); }
  });
  scroller.addEventListener("scroll", paint);
  paint();
  return h("div", {}, scroller, readout);
}
