// One trajectory, or two of a group side by side: turns, images, token strips, and the tree of a branching agent.

import { get, getTrajectory } from "./api.js";
import { choice, h, s, short } from "./dom.js";
import { COLUMNS, strip } from "./strip.js";

export const title = "Trajectory";

/** @type {import("./app.js").View["show"]} */
export async function show(context, main) {
  const query = Object.fromEntries(context.params);
  const column = query.color ?? "logprobs";
  const go = (/** @type {Record<string, any>} */ change) => context.go("trajectory", { ...query, ...change });
  const group = await get(`/runs/${context.run}/groups/${encodeURIComponent(query.group ?? 0)}`);
  const members = group.members.map((/** @type {any} */ member) => /** @type {[string, string]} */ ([String(member.index), `${member.index}, reward ${short(member.reward)}`]));
  const indexes = [query.index ?? members[0]?.[0] ?? "0", ...(query.beside ? [query.beside] : [])];
  const path = (/** @type {string} */ index) => `/runs/${context.run}/trajectories/${group.number}/${encodeURIComponent(index)}`;
  const trajectories = await Promise.all(indexes.map((index) => getTrajectory(path(index))));
  const places = trajectories.map(() => h("article"));
  main.replaceChildren(
    h("p", {}, h("a", { href: context.link("groups", { group: group.number }) }, `Group ${group.number}`)),
    h("div", { class: "bar" }, choice("Trajectory", members, indexes[0], (index) => go({ index })),
      choice("Beside it", [["", "none"], ...members], indexes[1] ?? "", (beside) => go({ beside })),
      choice("Colour", COLUMNS, column, (color) => go({ color }))),
    h("div", { class: "columns" }, places));
  trajectories.forEach((trajectory, i) => fill(places[i], trajectory, column, `${path(indexes[i])}/frames`));
}

/** @param {HTMLElement} place @param {any} trajectory @param {string} column @param {string} frames path of its rendered frames */
function fill(place, trajectory, column, frames) {
  const width = Math.max(240, Math.min(place.clientWidth - 4, 1400));
  const facts = { reward: short(trajectory.reward), "trained at step": trajectory.step, tag: trajectory.tag, seed: trajectory.seed, end: trajectory.stop_reason,
    attempt: trajectory.attempt, seconds: short(trajectory.duration_s), worker: trajectory.worker };
  const prompt = trajectory.segments.length && trajectory.text.length === 1;
  place.replaceChildren(h("div", {}, h("h2", {}, `Trajectory ${trajectory.group}/${trajectory.index}`),
    h("p", { class: "soft" }, Object.entries(facts).filter(([, value]) => value !== "").map(([name, value]) => `${name} ${value}`).join(" · ")),
    trajectory.error ? h("p", { class: "bad" }, trajectory.error) : null, trajectory.reason ? h("p", { class: "bad" }, trajectory.reason) : null,
    trajectory.segments.length > 1 ? h("section", {}, h("h3", {}, "Tree of segments"), tree(trajectory)) : null,
    h("h3", {}, "Tokens"), trajectory.segments.map((/** @type {any} */ segment, /** @type {number} */ i) => h("div", {},
      trajectory.segments.length > 1 ? h("h3", {}, `Segment ${i}`) : null, strip(trajectory, segment, column, width))),
    h("h3", {}, "Turns"), trajectory.turns.length ? h("p", {}, h("button", { onclick: (/** @type {any} */ event) => render(place, event.target, frames) }, "Play again in the env")) : null,
    h("div", { class: "turn" }, h("span", { class: "soft" }, prompt ? "prompt" : "system"), h("div", { class: "text" }, trajectory.text[0] ?? "")),
    trajectory.turns.map((/** @type {any} */ turn, /** @type {number} */ i) => turnOf(trajectory, turn, i)),
    h("div", { class: "frame" })));
}

/**
 * Put the frames of the env, which plays the episode again, beside the turns.
 * @param {HTMLElement} place
 * @param {HTMLButtonElement} button
 * @param {string} path
 */
async function render(place, button, path) {
  button.disabled = true;
  const answer = h("span", { role: "status" }, " Playing ...");
  button.nextElementSibling?.remove();  // of the last time
  button.after(answer);
  try {
    const { frames } = await get(path);
    const slots = [...place.querySelectorAll(".frame")];
    frames.forEach((/** @type {string} */ png, /** @type {number} */ i) => slots[i]?.replaceChildren(
      h("img", { alt: i < frames.length - 1 ? `frame before turn ${i}` : "last frame", src: `data:image/png;base64,${png}` })));
    answer.remove();
  } catch (error) {
    answer.textContent = ` ${/** @type {Error} */ (error).message}`;
    button.disabled = false;
  }
}

/** @param {any} trajectory @param {any} turn @param {number} i */
function turnOf(trajectory, turn, i) {
  const segment = trajectory.segments[turn.segment];
  const before = trajectory.turns.slice(0, i).findLast((/** @type {any} */ each) => each.segment === turn.segment)?.end ?? 0;
  const images = segment.images.filter((/** @type {any} */ image) => image.start >= before && image.start < turn.start);
  return h("div", { class: "turn" }, h("span"), h("div", { class: "frame" }),
    turn.observation || images.length ? [h("span", { class: "soft" }, "env"), h("div", {}, images.map((/** @type {any} */ image) =>
      h("img", { alt: `observation of turn ${i}`, src: `data:image/png;base64,${image.png}` })), h("div", { class: "text" }, turn.observation))] : null,
    h("span", { class: "soft" }, `turn ${i}`), h("div", {}, h("div", { class: "text" }, turn.text || "(no text)"),
      h("span", { class: "soft" }, `${turn.end - turn.start} tokens, reward ${short(turn.reward)}${turn.is_truncated ? ", cut by the token limit" : ""}`)));
}

/** Return each segment's parent, the earlier one with the longest common beginning, and that length. @param {any[]} segments */
export function parents(segments) {
  return segments.map((segment, i) => {
    let best = { parent: -1, shared: 0 };
    for (let k = 0; k < i; k++) {
      const other = segments[k].tokens;
      let shared = 0;
      while (shared < other.length && shared < segment.tokens.length && other[shared] === segment.tokens[shared]) shared++;
      if (shared > best.shared) best = { parent: k, shared };
    }
    return best;
  });
}

/** @param {any} trajectory */
function tree(trajectory) {
  const { segments } = trajectory;
  const links = parents(segments);
  const longest = Math.max(...segments.map((/** @type {any} */ segment) => segment.tokens.length));
  const x = (/** @type {number} */ token) => 40 + 500 * token / longest;
  const y = (/** @type {number} */ i) => 14 + 22 * i;
  return s("svg", { viewBox: `0 0 620 ${y(segments.length)}`, class: "mesh", role: "img", "aria-label": `${segments.length} segments, by the tokens that they share` },
    segments.map((/** @type {any} */ segment, /** @type {number} */ i) => s("g", {},
      s("path", { d: links[i].parent < 0 ? `M${x(0)} ${y(i)}H${x(segment.tokens.length)}`
        : `M${x(links[i].shared)} ${y(links[i].parent)}V${y(i)}H${x(segment.tokens.length)}` }),
      s("text", { x: 4, y: y(i) + 4, class: "small" }, i),
      s("text", { x: x(segment.tokens.length) + 6, y: y(i) + 4, class: "small" }, `${segment.tokens.length} tokens`))));
}
