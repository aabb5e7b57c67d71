// Lives of groups: table with times as bars, reasons, rewards; odd ones first on demand.

import { get } from "./api.js";
import { choice, h, keepFocus, s, short } from "./dom.js";

export const title = "Groups";

const LIMIT = 50;
const REFRESH_MS = 3000;
const STATES = ["", "playing", "submitted", "consumed", "trained", "dropped", "failed"];
const SORTS = /** @type {[string, string][]} */ ([["number", "newest"], ["spread", "equal rewards"], ["tokens", "longest"],
  ["ratio", "largest ratio"], ["staleness", "most stale"], ["duration", "slowest"]]);
const PHASES = /** @type {[string, string][]} */ ([["g-play", "played"], ["g-wait", "waited for its step"], ["g-keep", "until its checkpoint"], ["g-lost", "until it was dropped"]]);

/** @param {any} group @param {number} from @param {number} to */
function gantt(group, from, to) {
  const place = (/** @type {number} */ time) => 100 * (time - from) / Math.max(to - from, 1e-3);
  const lost = group.state === "dropped" || group.state === "failed";
  const spans = /** @type {[string, number | null, number | null][]} */ ([
    ["g-play", group.admitted_at, group.submitted_at ?? group.ended_at ?? to],
    [lost ? "g-lost" : "g-wait", group.submitted_at, group.trained_at || group.ended_at || to],
    ["g-keep", group.trained_at, group.ended_at ?? to],
  ]);
  const text = spans.filter(([, start]) => start).map(([name, start, end]) =>
    `${(PHASES.find(([each]) => each === name) ?? ["", ""])[1]} ${short(Number(end) - Number(start))} s`).join(", ");
  return s("svg", { class: "gantt", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": text }, s("title", {}, text),
    spans.filter(([, start, end]) => start && end && end >= start).map(([name, start, end]) =>
      s("rect", { class: name, x: place(Number(start)), y: 1, height: 8, width: Math.max(place(Number(end)) - place(Number(start)), 0.6) })));
}

/** @param {(number | null)[]} rewards */
const rewardsOf = (rewards) => rewards.length ? rewards.map((reward) => short(reward, 2)).join("  ") : "–";

/** @param {import("./app.js").Context} context @param {any[]} groups @param {number} now end of the bars of groups in flight */
function table(context, groups, now) {
  const times = groups.flatMap((group) => [group.admitted_at, group.submitted_at, group.trained_at, group.ended_at ?? now]).filter(Boolean);
  const [from, to] = [Math.min(...groups.map((group) => group.admitted_at || Infinity)), Math.max(...times)];
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Groups" }, h("table", {}, h("thead", {}, h("tr", {},
    ["group", "state", "tag"].map((name) => h("th", { scope: "col" }, name)),
    ["step", "lag", "tokens", "max. ratio"].map((name) => h("th", { scope: "col", class: "num" }, name)),
    ["life", "rewards", "reason"].map((name) => h("th", { scope: "col" }, name)))),
  h("tbody", {}, groups.map((group) => h("tr", {},
    h("td", {}, h("a", { href: context.link("groups", { group: group.number }) }, group.number)),
    h("td", {}, group.state), h("td", {}, group.tag),
    [group.step, group.staleness, group.num_sampled || null, group.max_ratio].map((value) => h("td", { class: "num" }, short(value))),
    h("td", {}, group.admitted_at ? gantt(group, from, to) : "–"), h("td", {}, rewardsOf(group.rewards)), h("td", {}, group.reason))))));
}

/** @type {import("./app.js").View["show"]} */
export async function show(context, main) {
  const number = context.params.get("group");
  if (number !== null) return void await showOne(context, main, number);
  const query = Object.fromEntries(context.params);
  const go = (/** @type {Record<string, any>} */ change) => context.go("groups", { ...query, offset: "", ...change });
  const field = (/** @type {string} */ label, /** @type {string} */ name, /** @type {string} */ type) => h("label", {}, label,
    h("input", { type, step: "any", size: 8, value: query[name] ?? "", onchange: (/** @type {any} */ event) => go({ [name]: event.target.value }) }));
  const list = h("div");
  const reasons = h("p", { class: "soft" });
  main.replaceChildren(h("div", { class: "bar" },
    choice("State", STATES.map((state) => /** @type {[string, string]} */ ([state, state || "all"])), query.state ?? "", (state) => go({ state })),
    choice("Order", SORTS, query.sort ?? "number", (sort) => go({ sort })),
    field("Tag", "tag", "text"), field("Step", "step", "number"), field("Lowest mean reward", "min_reward", "number"), field("Highest mean reward", "max_reward", "number"),
    h("span", {}, PHASES.map(([name, text]) => h("span", { class: "key" }, s("svg", { "aria-hidden": true }, s("rect", { class: name, width: 12, height: 12 })), text)))),
  reasons, list);
  const draw = async () => {
    const page = await get(`/runs/${context.run}/groups?${new URLSearchParams({ ...query, limit: String(LIMIT) })}`);
    const [offset, restoreFocus] = [Number(query.offset ?? 0), keepFocus()];
    list.replaceChildren(page.groups.length ? table(context, page.groups, run.ended_at || Date.now() / 1000) : h("p", {}, "No group matches."),
      h("p", {}, `${page.groups.length ? offset + 1 : 0} to ${offset + page.groups.length} of ${short(page.total)} `,
        offset > 0 ? h("button", { onclick: () => go({ offset: Math.max(0, offset - LIMIT) }) }, "Before") : null, " ",
        page.next !== null ? h("button", { onclick: () => go({ offset: page.next }) }, "Next") : null));
    restoreFocus();
  };
  let run = await get(`/runs/${context.run}`);
  const count = () => {
    const table = (/** @type {Record<string, number>} */ why) => Object.entries(why).map(([name, n]) => `${name} ${n}`).join(", ") || "none";
    if (run.counters) reasons.textContent = `Dropped: ${table(run.counters.dropped)}. Failed: ${table(run.counters.failed)}.`;
  };
  count();
  await draw();
  if (context.isFolder) return;
  let due = false;
  const timer = setInterval(() => { if (due && !document.hidden) { due = false; draw(); } }, REFRESH_MS);
  return { on: { run: (/** @type {any} */ view) => { run = view; count(); }, life: () => { due = true; } }, leave: () => clearInterval(timer) };
}

/** @param {import("./app.js").Context} context @param {HTMLElement} main @param {string} number */
async function showOne(context, main, number) {
  const group = await get(`/runs/${context.run}/groups/${encodeURIComponent(number)}`);
  const rows = Object.entries(group).filter(([name, value]) => name !== "members" && value !== null && value !== "");
  const value = (/** @type {string} */ name, /** @type {any} */ each) => name.endsWith("_at") ? new Date(each * 1000).toLocaleString()
    : Array.isArray(each) ? rewardsOf(each) : typeof each === "number" ? short(each) : String(each);
  main.replaceChildren(h("p", {}, h("a", { href: context.link("groups") }, "All groups")), h("h2", {}, `Group ${group.number}`),
    h("div", { class: "columns" },
      h("table", {}, h("tbody", {}, rows.map(([name, each]) => h("tr", {}, h("th", { scope: "row" }, name.replaceAll("_", " ")), h("td", {}, value(name, each)))))),
      h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Members" }, h("h3", {}, "Members"),
        group.members.length ? h("table", {}, h("thead", {}, h("tr", {}, ["trajectory", "reward", "turns", "tokens", "versions", "max. ratio", "end", "tokens by outcome"].map((name) => h("th", { scope: "col" }, name)))),
          h("tbody", {}, group.members.map((/** @type {any} */ member) => h("tr", {},
            h("td", {}, h("a", { href: context.link("trajectory", { group: group.number, index: member.index }) }, `${group.number}/${member.index}`)),
            [member.reward, member.turns, member.num_sampled].map((each) => h("td", { class: "num" }, short(each))),
            h("td", {}, member.oldest_version === member.newest_version ? short(member.oldest_version) : `${member.oldest_version}–${member.newest_version}`),
            h("td", { class: "num" }, short(member.max_ratio)), h("td", {}, member.stop_reason),
            h("td", {}, Object.entries(member.outcomes).map(([name, n]) => `${name} ${n}`).join(", ")))))) : h("p", { class: "soft" }, "Its trajectories are not kept."))));
}
