// Lag heat map: a column per range of steps, a row per lag, colour by the number of groups.

import { get } from "./api.js";
import { h, short } from "./dom.js";
import { sequential } from "./palette.js";

const CELL = 14;
const LABEL = 34;
/** Columns and lags that a key moves by. */
const KEYS = /** @type {Record<string, number[]>} */ ({ ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] });

/** Show the newest groups' lags. @param {import("./app.js").Context} context @param {HTMLElement} place */
export async function lagMap(context, place) {
  const room = Math.max(1, Math.floor((Math.min(place.clientWidth || 480, 720) - LABEL) / CELL));
  const { total, first, last, counts } = await get(`/runs/${context.run}/lags?columns=${room}`);
  if (!total) return void place.replaceChildren(h("p", { class: "soft" }, "No group has been trained yet."));
  const columns = counts.length;
  const highest = counts[0].length - 1;
  const most = Math.max(...counts.flat());
  const readout = h("p", { class: "soft", "aria-live": "polite" }, `Steps ${first} to ${last}; darkest: none, brightest: ${most} groups.`);
  const canvas = h("canvas", { role: "img", tabindex: 0, "aria-label": `Lags of ${total} groups, up to ${highest} versions` });
  let [column, lag] = [-1, 0];
  const stepOf = () => first + Math.ceil(column * (last - first + 1) / columns);
  const choose = (/** @type {number} */ toColumn, /** @type {number} */ toLag) => {
    if (!(toColumn in counts) || !(toLag in counts[0])) return false;
    [column, lag] = [toColumn, toLag];
    readout.textContent = `Steps from ${stepOf()}: ${short(counts[column][lag])} groups with lag ${lag}. Click or press Enter to list a step.`;
    paint(canvas, counts, most, column, lag);
    return true;
  };
  const open = () => context.go("groups", { step: stepOf() });
  paint(canvas, counts, most, column, lag);
  const point = (/** @type {MouseEvent} */ event) => {
    const box = canvas.getBoundingClientRect();
    const scale = canvas.width / devicePixelRatio / box.width;
    return choose(Math.floor(((event.clientX - box.left) * scale - LABEL) / CELL), highest - Math.floor((event.clientY - box.top) * scale / CELL));
  };
  canvas.addEventListener("mousemove", point);
  canvas.addEventListener("click", (event) => { if (point(event)) open(); });
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && column >= 0) open();
    if (!(event.key in KEYS)) return;
    event.preventDefault();
    choose(Math.max(0, column + KEYS[event.key][0]), lag + KEYS[event.key][1]);
  });
  place.replaceChildren(canvas, readout);
}

/** @param {HTMLCanvasElement} canvas @param {number[][]} counts @param {number} most @param {number} chosen column @param {number} chosenLag */
function paint(canvas, counts, most, chosen, chosenLag) {
  const rows = counts[0].length;
  const [width, height] = [LABEL + counts.length * CELL, rows * CELL + 4];
  canvas.width = width * devicePixelRatio;
  canvas.height = height * devicePixelRatio;
  canvas.style.width = `${width}px`;
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.scale(devicePixelRatio, devicePixelRatio);
  context.font = "11px system-ui";
  context.fillStyle = getComputedStyle(document.body).color;
  for (let lag = 0; lag < rows; lag++) context.fillText(`lag ${lag}`, 0, (rows - lag) * CELL - 3);
  counts.forEach((column, i) => column.forEach((count, lag) => {
    context.fillStyle = sequential(count / most);
    context.fillRect(LABEL + i * CELL, (rows - 1 - lag) * CELL, CELL - 1, CELL - 1);
  }));
  [context.strokeStyle, context.lineWidth] = [getComputedStyle(document.body).color, 2];
  if (chosen >= 0) context.strokeRect(LABEL + chosen * CELL, (rows - 1 - chosenLag) * CELL + 1, CELL - 1, CELL - 2);
}
