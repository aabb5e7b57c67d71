// Curves of runs laid over each other, with marks where settings changed and where components died and came back.

import { get } from "./api.js";
import { choice, clock, h, s, short } from "./dom.js";
import { category } from "./palette.js";

export const title = "Curves";

const DEFAULT = ["learner/reward", "learner/success", "eval-sampled/success", "learner/actor/entropy", "learner/staleness_max", "learner/time/step_s"];
const POINTS = 800;
const REFRESH_MS = 5000;
const AXES = /** @type {[string, string][]} */ ([["step", "step"], ["time", "time"], ["trajectories", "trajectories"]]);

/** @typedef {{x: number[], values: number[], total: number}} Columns */
/** @typedef {{at: number, step: number | null, kind: "changed" | "died" | "recovered", text: string}} Mark */

const MARKS = { changed: { color: "#d55e00", dash: [4, 4] }, died: { color: "#cc79a7", dash: [] }, recovered: { color: "#009e73", dash: [2, 3] } };

/** Return a run's value at x, straight between its points; null outside. @param {Columns} columns @param {number} x */
function at({ x: places, values }, x) {
  if (!places.length || x < places[0] || x > places[places.length - 1]) return null;
  let [low, high] = [0, places.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (places[middle] < x) low = middle + 1;
    else high = middle;
  }
  if (places[low] === x || low === 0) return values[low];
  const share = (x - places[low - 1]) / (places[low] - places[low - 1]);
  return values[low - 1] + share * (values[low] - values[low - 1]);
}

/** Align series on the union of their places. @param {Columns[]} series */
function align(series) {
  const xs = [...new Set(series.flatMap((each) => each.x))].sort((a, b) => a - b);
  return [xs, ...series.map((each) => {
    const own = new Map(each.x.map((x, i) => [x, each.values[i]]));
    return xs.map((x) => own.get(x) ?? at(each, x));
  })];
}

/** Reduce aligned runs to mean, lowest and highest. @param {(number | null)[][]} data */
function spread(data) {
  const [xs, ...rows] = data;
  const columns = xs.map((_, i) => rows.map((row) => row[i]).filter((value) => value !== null).map(Number));
  return [xs, columns.map((each) => each.length ? each.reduce((a, b) => a + b, 0) / each.length : null),
    columns.map((each) => each.length ? Math.min(...each) : null), columns.map((each) => each.length ? Math.max(...each) : null)];
}

/** Draw vertical lines. @param {Mark[]} marks @param {string} axis */
function marker(marks, axis) {
  return { hooks: { draw: (/** @type {any} */ plot) => {
    plot.ctx.save();
    for (const mark of marks) {
      const x = plot.valToPos(axis === "time" ? mark.at : mark.step, "x", true);
      if (x < plot.bbox.left || x > plot.bbox.left + plot.bbox.width) continue;
      plot.ctx.strokeStyle = MARKS[mark.kind].color;
      plot.ctx.setLineDash(MARKS[mark.kind].dash);
      plot.ctx.beginPath();
      plot.ctx.moveTo(x, plot.bbox.top);
      plot.ctx.lineTo(x, plot.bbox.top + plot.bbox.height);
      plot.ctx.stroke();
    }
    plot.ctx.restore();
  } } };
}

/** @param {any} run */
const changesOf = (run) => run.changes.map((/** @type {any} */ change) => (/** @type {Mark} */ ({ at: change.at, step: change.from_step, kind: "changed",
  text: Object.entries(change.values).map(([name, value]) => `${name} ${value}`).join(", ") })));

/** List marks in words. @param {Mark[]} marks */
const legend = (marks) => h("ul", {}, marks.map((mark) => h("li", {}, s("svg", { class: "line", "aria-hidden": true, viewBox: "0 0 20 4" },
  s("line", { x1: 0, x2: 20, y1: 2, y2: 2, stroke: MARKS[mark.kind].color, "stroke-width": 2, "stroke-dasharray": MARKS[mark.kind].dash.join(" ") })), ` ${mark.kind} ${clock(mark.at)}, step ${mark.step ?? "–"}: ${mark.text}`)));

/** @param {string} run @param {URLSearchParams} params */
const runsOf = (run, params) => [...new Set((params.get("runs") ?? run).split(","))].filter(Boolean);

/** @param {string[]} runs @param {URLSearchParams} params */
const pathsOf = (runs, params) => runs.map((run) => `/runs/${encodeURIComponent(run)}/series?names=${encodeURIComponent(
  params.get("names") || DEFAULT.join(","))}&axis=${params.get("axis") ?? "step"}&points=${POINTS}`);

export const reads = (/** @type {string} */ run, /** @type {URLSearchParams} */ params) => pathsOf(runsOf(run, params), params);

/** @type {import("./app.js").View["show"]} */
export async function show(context, main) {
  const chosen = new Set(runsOf(context.run, context.params).filter((id) => context.runs.some((run) => run.id === id)));
  const axis = context.params.get("axis") ?? "step";
  let [due, followed, pending] = [false, chosen.size > Number(chosen.has(context.run)), /** @type {Promise<void> | null} */ (null)];
  const read = (/** @type {string} */ id, /** @type {string} */ path) => get(path).then((answer) => ({ ...answer, id }), (error) => {
    if (id === context.run || ![404, 409].includes(error.status)) throw error;  // else it was deleted, or can't be read
    if (chosen.delete(id)) notice.append(h("p", { class: "bad" }, `${id} is left out: ${error.message}`));
    due = true;
  });
  const asked = context.params.get("names");
  let names = /** @type {string[]} */ ([]);
  let run = context.runs.find((each) => each.id === context.run);
  const band = context.params.get("spread") === "1" && chosen.size > 1;
  const go = (/** @type {Record<string, any>} */ change) => context.go("curves",
    { runs: [...chosen].join(","), axis, names: asked, spread: band ? 1 : "", ...change });
  const metric = h("input", { list: "metrics", size: 28, placeholder: "learner/actor/ratio_max" });
  const [charts, list, metrics, notice] = [h("div", { class: "columns" }), h("div"), h("datalist", { id: "metrics" }), h("div", { role: "alert" })];
  const deaths = /** @type {Mark[]} */ ([]);
  main.replaceChildren(
    h("div", { class: "bar" }, choice("Axis", AXES, axis, (value) => go({ axis: value })),
      h("label", {}, "Add a metric", metric),
      h("button", { onclick: () => metric.value && go({ names: [...new Set([...names, metric.value])].join(",") }) }, "Add"),
      h("button", { onclick: () => go({ names: "" }) }, "Defaults"),
      metrics,
      chosen.size > 1 ? h("label", { class: "row" }, h("input", { type: "checkbox", checked: band, onchange: () => go({ spread: band ? "" : 1 }) }), "mean and spread of the runs") : null),
    h("fieldset", {}, h("legend", {}, "Runs"), context.runs.map((run) => h("label", { class: "row key" },
      h("input", { type: "checkbox", checked: chosen.has(run.id), onchange: () => {
        if (!chosen.delete(run.id)) chosen.add(run.id);
        go({ runs: [...chosen].join(",") });
      } }), run.id))),
    notice, list, charts, chosen.size > 1 ? differences([...chosen]) : "");

  let [plots, drawn] = [/** @type {any[]} */ ([]), ""];
  const draw = async () => {
    const answers = (await Promise.all([...chosen].map((id) => read(id, pathsOf([id], context.params)[0])))).filter(Boolean);
    due ||= answers.some((each) => each.unread_bytes);
    // What is drawn anew loses its zoom
    if (drawn === (drawn = JSON.stringify([answers.map((each) => [each.names, each.series]), run?.changes, deaths]))) return;
    const all = [...new Set(answers.flatMap((answer) => answer.names))];
    names = asked ? asked.split(",") : DEFAULT.filter((name) => all.includes(name));
    if (metrics.childElementCount !== all.length) metrics.replaceChildren(...all.map((name) => h("option", { value: name })));
    const isMarked = axis !== "trajectories" && chosen.has(context.run);
    const marks = isMarked ? [...changesOf(run), ...deaths].filter((mark) => mark.step !== null).sort((a, b) => a.at - b.at) : [];
    list.replaceChildren(marks.length ? legend(marks) : "");
    plots.splice(0).forEach((plot) => plot.destroy());
    charts.replaceChildren(names.length ? "" : h("p", { class: "soft" }, "There are no metrics yet."), ...names.map((name) => {
      const present = answers.map(({ id, series }, i) => ({ id, i, columns: /** @type {Columns} */ (series[name]) })).filter((each) => each.columns);
      const place = h("div", { class: "chart" });
      const last = answers.map((answer) => short(answer.last[name]) + (answer.unread_bytes ? " (still reading)" : "")).join(", ");
      requestAnimationFrame(() => present.length && plots.push(plot(place, present, axis, band, marks)));
      return h("section", {}, h("h2", {}, name), h("p", { class: "soft" }, present.length ? `newest: ${last}` : "The runs have no such metric."), present.length ? place : "");
    }));
  };
  await draw();
  const refresh = async () => {
    const others = [...chosen].filter((id) => id !== context.run);  // of which no events arrive
    const views = await Promise.all(others.map((id) => read(id, `/runs/${encodeURIComponent(id)}`)));
    const [active, isDue] = [views.some((each) => each && !each.ended_at), due || followed];  // once more after an end
    [due, followed] = [false, active];
    if (active || isDue) await draw();
  };
  const follow = () => { pending ??= refresh().catch(() => { due = true; }).finally(() => { pending = null; }); };
  const on = {
    run: (/** @type {any} */ view) => { run = view; due = true; },
    history: (/** @type {any} */ { event, at, detail }) => {
      if (event !== "died" && event !== "recovered") return;
      deaths.push({ at, step: detail.step ?? null, kind: event, text: `${detail.component} ${event === "died" ? `died: ${detail.why}` : "is ready again"}` });
      due = true;
    },
  };
  const timer = setInterval(() => document.hidden || follow(), REFRESH_MS);
  return { on, fromStart: true, leave: () => { clearInterval(timer); plots.forEach((each) => each.destroy()); } };
}

/** @param {HTMLElement} place @param {{id: string, i: number, columns: Columns}[]} present @param {string} axis @param {boolean} band @param {Mark[]} marks */
function plot(place, present, axis, band, marks) {
  const ink = getComputedStyle(document.body).color;
  const aligned = align(present.map((each) => each.columns));
  const lines = present.map((each) => ({ label: each.id, stroke: category(each.i), width: 1.5, spanGaps: true }));
  const grid = { stroke: "#8884", width: 1 };
  const options = {
    width: place.clientWidth || 400, height: 220, plugins: [marker(marks, axis)],
    scales: { x: { time: axis === "time" } },
    axes: [{ stroke: ink, grid, label: axis }, { stroke: ink, grid, size: 60 }],
    series: [{ label: axis }, ...(band && present.length > 1
      ? [{ label: "mean", stroke: category(0), width: 2 }, { label: "lowest", stroke: "#0000" }, { label: "highest", stroke: "#0000" }] : lines)],
    bands: band && present.length > 1 ? [{ series: [3, 2], fill: "#0072b244" }] : [],
  };
  return new (/** @type {any} */ (globalThis).uPlot)(options, band && present.length > 1 ? spread(aligned) : aligned, place);
}

/** @param {string[]} ids */
function differences(ids) {
  const content = h("div", { class: "scroll", tabindex: 0 });
  get(`/compare?runs=${ids.map(encodeURIComponent).join(",")}`).then((compared) => content.append(h("table", {},
    h("thead", {}, h("tr", {}, h("th", {}, "key"), ids.map((id) => h("th", {}, id)))),
    h("tbody", {}, Object.entries(compared.differences).map(([key, values]) => h("tr", {}, h("th", { scope: "row" }, key),
      values.map((/** @type {any} */ value) => h("td", {}, JSON.stringify(value)))))))),
  (error) => content.append(h("p", { class: "bad", role: "alert" }, error.message)));
  return h("section", {}, h("h2", {}, "Differences of the configurations"), content);
}
