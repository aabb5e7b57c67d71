// Frame of the page: session, choice of run and view by the address's fragment, `#/view/run?parameters`.

import { get, listen, prefetch, send } from "./api.js";
import { byId, h, keepFocus } from "./dom.js";
import * as acts from "./acts.js";
import * as curves from "./curves.js";
import * as groups from "./groups.js";
import * as mesh from "./mesh.js";
import * as plan from "./plan.js";
import * as trajectory from "./trajectory.js";

/**
 * What a view gets.
 * @typedef {object} Context
 * @property {string} run id of the run; empty if there is none
 * @property {any[]} runs views of all runs
 * @property {"none" | "read" | "write"} access
 * @property {boolean} isFolder true without a mesh: no events, no acts
 * @property {URLSearchParams} params
 * @property {(view: string, params?: Record<string, any>, run?: string) => string} link
 * @property {(view: string, params?: Record<string, any>, run?: string) => void} go
 */

/**
 * What a view shows: listeners to the page's one stream of events, from its start if wanted, and what to do when the view is left.
 * @typedef {{on?: Record<string, (data: any) => void>, fromStart?: boolean, leave?: () => void}} Shown
 */

/**
 * reads: paths that `show` reads first, requested while the list of runs is.
 * @typedef {object} View
 * @property {string} title
 * @property {(run: string, params: URLSearchParams) => string[]} [reads]
 * @property {(context: Context, main: HTMLElement) => Promise<void | Shown>} show
 */

/** @type {Record<string, View>} */
const VIEWS = { mesh, curves, groups, trajectory, plan, acts };
const SHOWN = ["mesh", "curves", "groups", "plan", "acts"];

/** @type {() => void} */
let leave = () => {};
let turn = 0;

function readAddress() {
  const [path, query] = location.hash.slice(1).split("?");
  const [, view, run] = path.split("/");
  return { view: Object.hasOwn(VIEWS, view) ? view : "mesh", run: decodeURIComponent(run ?? ""), params: new URLSearchParams(query) };
}

/** @param {string} run @param {string} view @param {Record<string, any>} params */
function address(run, view, params) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, String(value));
  }
  return `#/${view}/${encodeURIComponent(run)}${query.size ? `?${query}` : ""}`;
}

async function render() {
  const [mine, restoreFocus] = [++turn, keepFocus()];
  leave();
  leave = () => {};
  const main = /** @type {HTMLElement} */ (byId("main"));
  const fill = (/** @type {HTMLElement} */ content) => {
    main.replaceChildren(content);
    main.inert = false;
  };
  // Until the next view is there, nothing is asked and nothing is done on what the last one shows
  main.inert = true;
  byId("dialog").close();
  try {
    const session = await get("/session");
    byId("logout").hidden = !session.needs_token || session.access === "none";
    if (session.access === "none") return void fill(loginForm());
    const { view, run: wanted, params } = readAddress();
    prefetch(wanted ? VIEWS[view].reads?.(wanted, params) ?? [] : []);
    const { runs, unreadable } = await get("/runs?limit=200");
    const missing = await find(wanted, runs);
    if (mine !== turn) return;
    const run = missing ? "" : wanted || (runs[0]?.id ?? "");
    const isFolder = session.access === "read" && !session.needs_token;
    /** @type {Context} */
    const context = {
      run, runs, params, access: session.access, isFolder,
      link: (to, more = {}, of = run) => address(of, to, more),
      go: (to, more = {}, of = run) => void (location.hash = address(of, to, more)),
    };
    showFrame(context, view, unreadable);
    if (missing) return void fill(h("div", {}, problem(missing), h("p", {}, runs.length ? "Runs: " : "There is no run.",
      runs.map((/** @type {any} */ each) => [h("a", { href: address(each.id, view, {}) }, each.id), " "]).flat())));
    if (!run && view !== "acts") {
      return void fill(h("p", {}, "There is no run yet. ", h("a", { href: context.link("acts") }, "Start one")));
    }
    const body = h("div");
    fill(body);
    const shown = await VIEWS[view].show(context, body) ?? {};
    if (mine !== turn) return void shown.leave?.();
    const follow = (/** @type {any} */ seen) => { showState(seen); shown.on?.run?.(seen); };
    const stop = isFolder || !run ? null : listen(run, { ...shown.on, run: follow }, shown.fromStart);
    leave = () => { stop?.(); shown.leave?.(); };
  } catch (error) {
    if (mine === turn) fill(problem(error));
  } finally {
    if (mine === turn) restoreFocus();
  }
}

/**
 * Read a run that the list lacks, as it is older, into it; return why there is none.
 * @param {string} wanted
 * @param {any[]} runs
 */
async function find(wanted, runs) {
  if (!wanted || runs.some((each) => each.id === wanted)) return null;
  return get(`/runs/${encodeURIComponent(wanted)}`).then((run) => { runs.push(run); return null; }, (error) => error);
}

/** @param {unknown} error */
const problem = (error) => h("p", { class: "bad", role: "alert" }, error instanceof Error ? error.message : String(error));

/** @param {Context} context @param {string} view @param {{id: string, reason: string}[]} unreadable */
function showFrame(context, view, unreadable) {
  const select = byId("run");
  select.replaceChildren(...context.runs.map(({ id }) => h("option", { value: id }, id)),
    ...unreadable.map(({ id, reason }) => h("option", { value: id, title: reason }, `${id} (unreadable)`)));
  select.value = context.run;  // none, if there is no such run
  select.onchange = () => context.go(view === "trajectory" ? "groups" : view, {}, select.value);
  const current = view === "trajectory" ? "groups" : view;
  byId("views").replaceChildren(...SHOWN.map((name) =>
    h("a", { href: context.link(name), "aria-current": name === current ? "page" : null }, VIEWS[name].title)));
  const run = context.runs.find((each) => each.id === context.run);
  showState(run);
  document.title = run ? `${run.id} – Offbeat` : "Offbeat";
}

/** @param {any} run */
function showState(run) {
  byId("state").textContent = run ? `${run.state}, step ${Math.max(run.step, 0)} of ${run.max_steps}` : "";
}

function loginForm() {
  const token = h("input", { type: "password", autocomplete: "current-password", required: true, size: 40 });
  const answer = h("p", { class: "bad", role: "alert" });
  const form = h("form", { class: "panel" }, h("h2", {}, "Log in"),
    h("label", {}, "Token of the control service", token), h("p", {}, h("button", {}, "Log in")), answer);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await send("POST", "/session", { token: token.value });
      render();
    } catch (error) {
      answer.textContent = /** @type {Error} */ (error).message;
    }
  });
  return form;
}

byId("logout").addEventListener("click", async () => {
  await send("DELETE", "/session");
  render();
});
document.querySelector(".skip")?.addEventListener("click", (event) => {
  event.preventDefault();  // its fragment would be a view's address
  byId("main").focus();
});
addEventListener("hashchange", render);
render();
