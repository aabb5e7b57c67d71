// Services as boxes, queues as edges, what waits for what lit up, lags, deaths.

import { get } from "./api.js";
import { clock, h, s, short } from "./dom.js";
import { lagMap } from "./heatmap.js";

export const title = "Mesh";

const WHY_INTERVAL_MS = 2000;
const LAGS_INTERVAL_MS = 10_000;
const [WIDTH, HEIGHT] = [190, 84];
const MAX_LENGTH = 26; // characters of a line in a box
/** @type {Record<string, {x: number, y: number, name: string, component: string}>} */
const BOXES = {
  workers: { x: 20, y: 20, name: "env workers", component: "env-workers" },
  buffer: { x: 330, y: 20, name: "buffer", component: "" },
  learner: { x: 640, y: 20, name: "learner", component: "learner" },
  broker: { x: 640, y: 220, name: "weights", component: "weights" },
  generation: { x: 20, y: 220, name: "generation", component: "generation" },
};
/** Box of a component that `why` names. */
const PLACES = /** @type {Record<string, string>} */ ({
  learner: "learner", training: "learner", evaluation: "learner", "env workers": "workers", episodes: "workers", env: "workers",
  agent: "workers", generation: "generation", admission: "buffer", buffer: "buffer", redis: "buffer", groups: "buffer", weights: "broker",
});

/** Return a line cut to a box's width, which the whole line explains. @param {string} line */
const fitting = (line) => line.length > MAX_LENGTH ? [`${line.slice(0, MAX_LENGTH - 1)}\u2026`, s("title", {}, line)] : [line];

/** @param {string} who */
const boxOf = (who) => PLACES[who] ?? (who.startsWith("group") ? "buffer" : "");

/** @param {any} run @param {Set<string>} lit */
function drawing(run, lit) {
  const counters = run.counters ?? { admitted: 0, submitted: 0, trained: 0, in_flight: 0 };
  const rates = run.rates;
  const rate = (/** @type {number | undefined} */ value, /** @type {string} */ unit) => rates ? `${short(value)} ${unit}/s` : "";
  const edge = (/** @type {string} */ path, /** @type {number} */ x, /** @type {number} */ y, /** @type {string[]} */ ...lines) => [
    s("path", { d: path, "marker-end": "url(#tip)" }),
    ...lines.map((line, i) => s("text", { x, y: y + 16 * i, class: "small", "text-anchor": "middle" }, line)),
  ];
  const detail = run.components.generation?.detail ?? "";
  const application = detail.startsWith("application ") ? detail.slice("application ".length) : "";
  const notes = /** @type {Record<string, string[]>} */ ({
    workers: [`${run.settings.num_workers} worker(s)`],
    buffer: [`${short(counters.in_flight)} groups in flight`],
    learner: [run.phase || "", `step ${Math.max(run.step, 0)} of ${run.max_steps}`],
    broker: [`version ${Math.max(run.version, 0)}`],
    generation: application ? application.split(/, (?=with )|: /) : [`${run.settings.num_replicas} replica(s)`],
  });
  const boxes = Object.entries(BOXES).map(([id, box]) => {
    const component = Object.entries(run.components).find(([name]) => box.component && name.startsWith(box.component))?.[1];
    const state = component ? `${component.health}${component.restarts ? `, ${component.restarts} restart(s)` : ""}` : "";
    return s("g", { class: lit.has(id) ? "lit" : "", transform: `translate(${box.x},${box.y})` },
      s("rect", { width: WIDTH, height: HEIGHT, rx: 6 }),
      s("text", { x: 12, y: 24, "font-weight": "bold" }, box.name),
      [state, ...notes[id]].filter(Boolean).slice(0, 3).map((line, i) => s("text", { x: 12, y: 44 + 16 * i, class: "small" }, fitting(line))));
  });
  return s("svg", { class: "mesh", viewBox: "0 0 850 330", role: "img", "aria-label": "Services of the run and the queues between them" },
    s("defs", {}, s("marker", { id: "tip", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" },
      s("path", { d: "M0 0L8 4L0 8z" }))),
    edge("M210 62H326", 268, 34, "trajectories", rate(rates?.trajectories, "traj.")),
    edge("M520 62H636", 578, 34, "groups", rate(rates?.tokens_trained, "tok.")),
    edge("M735 104V216", 795, 155, "weights", rate(rates?.steps, "steps")),
    edge("M636 262H214", 425, 250, `newest version ${Math.max(run.version, 0)}`),
    edge("M115 216V108", 175, 155, "tokens", rate(rates?.tokens_generated, "tok.")),
    boxes);
}

/** @param {any} run */
function numbers(run) {
  const counters = run.counters;
  const reasons = (/** @type {Record<string, number>} */ table) => Object.entries(table).map(([why, n]) => `${why} ${n}`).join(", ") || "none";
  const rows = counters ? [
    ["admitted", short(counters.admitted)], ["trained", short(counters.trained)], ["dropped", reasons(counters.dropped)],
    ["failed", reasons(counters.failed)], ["in flight", short(counters.in_flight)],
  ] : [];
  if (run.staleness) rows.push(["lag", `mean ${short(run.staleness.mean)}, max ${short(run.staleness.max)}, bound ${short(run.staleness.bound)}`]);
  for (const name of ["reward", "success", "time/step_s"]) if (name in run.metrics) rows.push([name, short(run.metrics[name])]);
  return h("div", {}, h("h2", {}, "Groups and metrics"),
    h("table", {}, h("tbody", {}, rows.map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, value))))),
    run.error ? h("p", { class: "bad" }, run.error) : null,
    run.diagnosis.map((/** @type {any} */ each) => h("p", { class: each.is_warning ? "bad" : "soft" }, `${each.name}: ${each.seen}. ${each.cause}`)));
}

/** @param {any} event */
function describe(event) {
  const detail = event.detail;
  switch (event.event) {
    case "died": return `${detail.component} died (${detail.why}); restart ${detail.restarts}`;
    case "recovered": return `${detail.component} is ready again`;
    case "state": return `state ${detail.state}${detail.error ? `: ${detail.error}` : ""}`;
    case "asked": return `asked for ${JSON.stringify(detail.values)}`;
    default: return `${event.event} ${JSON.stringify(detail)}`;
  }
}

/** @type {import("./app.js").View["show"]} */
export async function show(context, main) {
  const picture = h("div", { class: "scroll" });
  const sentence = h("p", { class: "panel", role: "status" });
  const facts = h("div");
  const events = h("ol", { reversed: true });
  const lags = h("div");
  let run = await get(`/runs/${context.run}`);
  /** @type {Set<string>} */
  let lit = new Set();
  const draw = () => {
    picture.replaceChildren(drawing(run, lit));
    facts.replaceChildren(numbers(run));
  };
  const explain = async () => {
    try {
      const why = await get(`/runs/${context.run}/why`);
      sentence.textContent = why.sentence;
      lit = new Set(why.chain.map((/** @type {any} */ link) => boxOf(link.who)));
      draw();
    } catch (error) {
      sentence.textContent = /** @type {Error} */ (error).message;
    }
  };
  main.replaceChildren(h("h2", {}, context.isFolder ? "Services" : "What waits for what"), context.isFolder ? "" : sentence, picture,
    h("div", { class: "columns" }, facts, h("div", {}, h("h2", {}, "Lag at consumption"), lags),
      context.isFolder ? null : h("div", {}, h("h2", {}, "Deaths, recoveries and commands"), events)));
  draw();
  lagMap(context, lags);
  if (context.isFolder) return;
  await explain();
  const on = {
    run: (/** @type {any} */ view) => { run = view; draw(); },
    history: (/** @type {any} */ event) => events.prepend(h("li", {}, h("time", {}, clock(event.at)), " ", describe(event))),
  };
  const timer = setInterval(() => { if (!document.hidden) explain(); }, WHY_INTERVAL_MS);
  let mapped = run.step;
  const follow = setInterval(() => {
    if (document.hidden || run.step === mapped || lags.matches(":hover, :focus-within")) return;
    mapped = run.step;
    lagMap(context, lags);
  }, LAGS_INTERVAL_MS);
  return { on, fromStart: true, leave: () => { clearInterval(timer); clearInterval(follow); } };
}
