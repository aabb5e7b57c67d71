// What changes runs; each act asks once and shows what it did.

import { get, getText, Refusal, send, sendYaml } from "./api.js";
import { byId, choice, h, short } from "./dom.js";

export const title = "Acts";

const POLL_MS = 1000;
const PASSING = [429, 503];
const KEY = /^(\s*)(["']?)([^\s"'#{[-][^"':]*?)\2\s*:/;
const SETTINGS = ["num_workers", "num_replicas", "learning_rate", "temperature", "max_staleness", "num_env_groups"];

/** Ask for consent; resolve to false if the question is cancelled or its view is left. @param {string} question @param {string} verb */
function ask(question, verb) {
  const dialog = /** @type {HTMLDialogElement} */ (byId("dialog"));
  return new Promise((resolve) => {
    const close = (/** @type {boolean} */ answer) => { resolve(answer); dialog.close(); };
    dialog.replaceChildren(h("h2", { id: "dialog-title" }, question), h("p", { class: "bar" },
      h("button", { onclick: () => close(true), autofocus: true }, verb), h("button", { onclick: () => close(false) }, "Cancel")));
    dialog.onclose = () => resolve(false);
    dialog.showModal();
  });
}

/** @param {HTMLElement} place */
export function reporter(place) {
  return {
    /** @param {string} text */
    done: (text) => place.replaceChildren(h("p", { role: "status" }, text)),
    /** @param {unknown} error */
    refused: (error) => {
      const problems = error instanceof Refusal ? error.problems : [];
      place.replaceChildren(h("div", { role: "alert", class: "bad" }, /** @type {Error} */ (error).message,
        h("ul", {}, problems.map((each) => h("li", {}, `${each.path}: ${each.message}${each.suggestion ? ` Nearest: ${each.suggestion}` : ""}`)))));
    },
  };
}

/** @typedef {{done: (text: string) => void, refused: (error: unknown) => void}} Reporter */

/**
 * Make a button that asks, sends and reports.
 * @param {Reporter} report
 * @param {string} name
 * @param {() => string} question
 * @param {() => Promise<string>} act
 */
function button(report, name, question, act) {
  return h("button", { type: "button", onclick: async () => {
    try {
      if (await ask(question(), name)) report.done(await act());
    } catch (error) {
      report.refused(error);
    }
  } }, name);
}

/** @type {import("./app.js").View["show"]} */
export async function show(context, main) {
  if (context.isFolder) return void main.replaceChildren(h("p", {}, "This page shows a folder: there is no mesh to act on."));
  if (context.access !== "write") return void main.replaceChildren(h("p", {}, "Your token is for reading: acts need one of scope write."));
  const answer = h("div", { class: "panel", "aria-live": "polite" }, h("p", { class: "soft" }, "Nothing done yet."));
  const report = reporter(answer);
  main.replaceChildren(answer);
  if (context.run) {
    const run = await get(`/runs/${context.run}`);
    main.append(stateActs(run, report), settingsActs(run, report), derivedActs(run, report), quarantine(context, report));
  }
  main.append(startActs(report, (await get("/recipes")).recipes));
}

/** @param {any} run @param {Reporter} report */
function stateActs(run, report) {
  const act = (/** @type {string} */ name, /** @type {string} */ path, /** @type {string} */ effect) => button(report, name, () => `${name} ${run.id}? ${effect}`,
    async () => { const view = await send("POST", `/runs/${run.id}/${path}`); return `${run.id} is to be ${view.wanted}; it is ${view.state}.`; });
  return h("section", {}, h("h2", {}, `Run ${run.id}`), h("div", { class: "bar" },
    act("Pause", "pause", "It starts no episode and no step."), act("Resume", "resume", "It continues."),
    act("Stop", "stop", "It drains, saves a checkpoint and ends."), act("Stop now", "stop?now=true", "It ends without draining.")));
}

/** @param {any} run @param {Reporter} report */
function settingsActs(run, report) {
  const inputs = Object.fromEntries(SETTINGS.map((name) => [name, h("input", { type: "number", step: "any", size: 10, value: run.settings[name] })]));
  const changes = () => {
    const unread = SETTINGS.find((name) => inputs[name].validity.badInput);
    if (unread) throw new Error(`${unread.replaceAll("_", " ")}: not a number`);
    const changed = SETTINGS.filter((name) => inputs[name].value && inputs[name].valueAsNumber !== run.settings[name]);
    if (!changed.length) throw new Error("No setting is changed.");
    return Object.fromEntries(changed.map((name) => [name, inputs[name].valueAsNumber]));
  };
  return h("section", {}, h("h2", {}, "Settings"), h("div", { class: "bar" }, SETTINGS.map((name) => h("label", {}, name.replaceAll("_", " "), inputs[name])),
    button(report, "Change", () => `Change ${JSON.stringify(changes())}?`, async () => {
      const asked = changes();
      const view = await send("PATCH", `/runs/${run.id}`, asked);
      run.settings = { ...view.settings, ...asked };
      return `Changed: ${JSON.stringify(view.changes.at(-1)?.values)}`;
    })));
}

/** @param {any} run @param {Reporter} report */
function derivedActs(run, report) {
  const step = h("input", { type: "number", min: 0, value: Math.max(run.step, 0), size: 8 });
  const name = h("input", { size: 20, placeholder: `${run.id}-fork-N` });
  const keys = h("textarea", { rows: 3, cols: 50, placeholder: '{"actor_train.training_args.learning_rate": 1e-4}' });
  const body = () => ({ ...(keys.value.trim() ? JSON.parse(keys.value) : {}), ...(name.value ? { exp_name: name.value } : {}) });
  const fork = button(report, "Fork", () => `Start a run from step ${step.value} of ${run.id} with ${JSON.stringify(body())}?`, async () => {
    const view = await send("POST", `/runs/${run.id}/fork?step=${step.value}`, body());
    return `Started ${view.id} in ${view.paths.output_dir}.`;
  });
  const job = h("div", { "aria-live": "polite" });
  const reproduce = button(report, "Reproduce", () => `Train ${run.id} again up to step ${step.value}, beside it, and compare the weights?`, async () => {
    await send("POST", `/runs/${run.id}/reproduce?step=${step.value}`);
    const describe = (/** @type {any} */ view) => `Reproduction of step ${view.step}: ${view.state}. ${view.error} ${JSON.stringify(view.result?.compared ?? [])}`;
    follow(`/runs/${run.id}/reproduce`, job, describe);
    return `Reproducing step ${step.value} ...`;
  });
  return h("section", {}, h("h2", {}, "From a checkpoint"), h("div", { class: "bar" }, h("label", {}, "Step", step), h("label", {}, "Name of the fork", name),
    h("label", {}, "Changed keys, as JSON", keys), fork, reproduce), job);
}

/**
 * Report a job's states in a place of its own until its end or until the view is left; a service that is busy or restarts is asked again.
 * @param {string} path
 * @param {HTMLElement} place
 * @param {(view: any) => string} describe
 */
export async function follow(path, place, describe) {
  const report = reporter(place);
  const again = () => void setTimeout(() => place.isConnected && follow(path, place, describe), POLL_MS);
  try {
    const view = await get(path);
    report.done(describe(view));
    if (view.state === "running") again();
  } catch (error) {
    report.refused(error);
    if (!(error instanceof Refusal) || PASSING.includes(error.status)) again();
  }
}

/** @param {import("./app.js").Context} context @param {Reporter} report */
function quarantine(context, report) {
  const list = h("div");
  return h("section", {}, h("h2", {}, "Quarantine"), h("button", { type: "button", onclick: async () => {
    try {
      const { trajectories } = await get(`/runs/${context.run}/quarantine`);
      list.replaceChildren(trajectories.length ? h("ul", {}, trajectories.map((/** @type {any} */ each) =>
        h("li", {}, `group ${each.group}, member ${each.member}: ${each.complaint} (${short(each.size)} bytes, ${each.head})`))) : h("p", {}, "Empty."));
    } catch (error) {
      report.refused(error);
    }
  } }, "Show"), list);
}

/**
 * Return the number of the line that sets a key of a configuration, that of the nearest section around it, or 0.
 * @param {string} yaml
 * @param {string} path dotted
 */
export function lineOf(yaml, path) {
  let level = yaml.split("\n").flatMap((line, i) => {
    const match = KEY.exec(line);
    return match ? [{ number: i + 1, indent: match[1].length, name: match[3] }] : [];
  });
  let found = 0;
  for (const part of path.split(".")) {
    const at = level.findIndex((key) => key.indent === level[0].indent && key.name === part);
    if (at < 0) return found;
    const [section, ...below] = level.slice(at);
    const end = below.findIndex((key) => key.indent <= section.indent);
    [level, found] = [end < 0 ? below : below.slice(0, end), section.number];
  }
  return found;
}

/**
 * Send a configuration; problems are listed with their lines.
 * @param {string} path
 * @param {HTMLTextAreaElement} yaml
 * @param {HTMLElement} problems
 */
async function submit(path, yaml, problems) {
  problems.replaceChildren();
  try {
    return await sendYaml(path, yaml.value);
  } catch (error) {
    problems.replaceChildren(...(error instanceof Refusal ? error.problems : []).map((each) => {
      const line = lineOf(yaml.value, each.path);
      const text = `${line ? `line ${line}, ` : ""}${each.path}: ${each.message}${each.suggestion ? ` Nearest: ${each.suggestion}` : ""}`;
      return h("li", {}, line ? h("button", { type: "button", onclick: () => select(yaml, line) }, text) : text);
    }));
    throw error;
  }
}

/** @param {Reporter} report @param {{name: string, about: string}[]} recipes */
function startActs(report, recipes) {
  const yaml = h("textarea", { spellcheck: false, placeholder: "exp_name: lake\noutput_dir: runs/lake\n..." });
  const problems = h("ol", { class: "bad" });
  const check = () => submit("/runs?dry_run=true", yaml, problems).then(() => report.done("The configuration is valid."), report.refused);
  let filled = ["", ""];
  const fill = async (/** @type {string} */ name) => {
    const isTyped = yaml.value.trim() && yaml.value !== filled[1];
    const may = name && (!isTyped || await ask("Replace the configuration that you changed?", "Replace"));
    if (may) filled = [name, yaml.value = await getText(`/recipes/${name}`)];
    else if (name) /** @type {HTMLSelectElement} */ (recipe.control).value = filled[0];
  };
  const names = recipes.map(({ name, about }) => /** @type {[string, string]} */ ([name, `${name}: ${about}`]));
  const recipe = choice("From a recipe", [["", "none"], ...names], "", fill);
  return h("section", { class: "yaml" }, h("h2", {}, "Start a run"), recipe,
    h("label", {}, "Configuration, as YAML", yaml), problems, h("p", { class: "bar" },
      h("button", { type: "button", onclick: check }, "Check"),
      button(report, "Start", () => "Start this run?", async () => {
        const view = await submit("/runs", yaml, problems);
        return `Started ${view.id}: ${view.state}.`;
      })));
}

/** Select a line of a text area. @param {HTMLTextAreaElement} area @param {number} line */
function select(area, line) {
  const lines = area.value.split("\n");
  const start = lines.slice(0, line - 1).reduce((sum, each) => sum + each.length + 1, 0);
  area.focus();
  area.setSelectionRange(start, start + lines[line - 1].length);
}
