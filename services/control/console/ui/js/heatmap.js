// Lag heat map: a column per range of steps, a row per lag, colour by the number of groups.

import { get } from "./api.js";
import { h, short } from "./dom.js";
import { sequential } from "./palette.js";

const CELL = 14;
const LABEL = 34;

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
  paint(canvas, counts, most);
  const locate = (/** @type {MouseEvent} */ event) => {
    const box = canvas.getBoundingClientRect();
    const scale = canvas.width / devicePixelRatio / box.width;
    const column = Math.floor(((event.clientX - box.left) * scale - LABEL) / CELL);
    const lag = highest - Math.floor((event.clientY - box.top) * scale / CELL);
    return column >= 0 && column < columns && lag >= 0 && lag <= highest ? { column, lag, step: first + Math.ceil(column * (last - first + 1) / columns) } : null;
  };
  canvas.addEventListener("mousemove", (event) => {
    const cell = locate(event);
    if (cell) readout.textContent = `Steps from ${cell.step}: ${short(counts[cell.column][cell.lag])} groups with lag ${cell.lag}. Click to list a step.`;
  });
  canvas.addEventListener("click", (event) => {
    const cell = locate(event);
    if (cell) context.go("groups", { step: cell.step });
  });
  place.replaceChildren(canvas, readout);
}

/** @param {HTMLCanvasElement} canvas @param {number[][]} counts @param {number} most */
function paint(canvas, counts, most) {
  const rows = counts[0].length;
  const [width, height] = [LABEL + counts.length * CELL, rows * CELL + 4];
  canvas.width = width * devicePixelRatio;
  canvas.height = height * devicePixelRatio;
  canvas.setAttribute("width", String(canvas.width));
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
}
