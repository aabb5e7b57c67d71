// What `offbeat plan` says of a run under its settings in force.

import { follow, reporter } from "./acts.js";
import { send } from "./api.js";
import { clock, h } from "./dom.js";

export const title = "Plan";

/** @param {{head: string[], rows: string[][]}} table */
const shown = ({ head, rows }) => h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": head[0] || "settings" }, h("table", {},
  h("thead", {}, h("tr", {}, head.map((name, i) => h(name ? "th" : "td", { class: i ? "num" : null }, name)))),
  h("tbody", {}, rows.map(([name, ...cells]) => h("tr", {}, h("th", { scope: "row" }, name), cells.map((cell) => h("td", { class: "num" }, cell)))))));

/** @type {import("./app.js").View["show"]} */
export async function show(context, main) {
  if (context.isFolder) return void main.replaceChildren(h("p", {}, "This page shows a folder: `offbeat plan CONFIG --from FOLDER` simulates its run."));
  const [path, refusal, place, plan] = [`/runs/${context.run}/plan`, h("div", { "aria-live": "polite" }), h("div", { "aria-live": "polite" }), h("div")];
  const describe = (/** @type {any} */ view) => {
    plan.replaceChildren(...(view.result?.tables ?? []).map(shown));
    const states = /** @type {Record<string, string>} */ ({ none: "No plan was made yet.", running: "Simulating ...", failed: `No plan: ${view.error}` });
    return states[view.state] ?? `Made at ${clock(view.ended_at)}: ${[view.result.advice, ...view.result.notes].join(" ")}`;
  };
  const simulate = () => send("POST", path).then(() => { refusal.replaceChildren(); follow(path, place, describe); }, reporter(refusal).refused);
  main.replaceChildren(h("p", { class: "bar" }, context.access === "write" ? h("button", { type: "button", onclick: simulate }, "Simulate") : null,
    h("span", { class: "soft" }, "A simulation from the measured times of the run takes a core for some 15 s.")), refusal, place, plan);
  await follow(path, place, describe);
}
