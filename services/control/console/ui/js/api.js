// Calls of the REST API; the session is a cookie that scripts can't read.

import { byId } from "./dom.js";
import { decodeTrajectory } from "./msgpack.js";

const JSON_TYPE = "application/json";
const REOPEN_MS = 1000;
const RESUMED_MS = 30_000;  // until the next look at a run that has ended
const UNREACHABLE = "unreachable";

/** Refusal by the service: what is wrong, and for a configuration each key. */
export class Refusal extends Error {
  /** @param {number} status @param {{code: string, message: string, problems?: {path: string, message: string, suggestion: string | null}[]}} body */
  constructor(status, body) {
    super(body.message);
    this.status = status;
    this.code = body.code;
    this.problems = body.problems ?? [];
  }
}

/**
 * @param {string} method
 * @param {string} path
 * @param {{body?: any, type?: string, accept?: string, position?: string, signal?: AbortSignal}} [options]
 */
async function call(method, path, { body, type = JSON_TYPE, accept = JSON_TYPE, position, signal } = {}) {
  /** @type {Record<string, string>} */
  const headers = { accept };
  if (body !== undefined) headers["content-type"] = type;
  if (position) headers["last-event-id"] = position;
  const response = await fetch(path, { method, headers, body, signal, credentials: "same-origin" });
  if (response.ok) return response;
  // Of an answer that is not the service's own, the status says enough
  const error = await response.json().then((/** @type {any} */ answer) => answer.error).catch(() => null);
  throw new Refusal(response.status, error ?? { code: UNREACHABLE, message: `${response.status} ${response.statusText}` });
}

/** @type {Map<string, Promise<any>>} */
const requested = new Map();

/**
 * Request what a view will read, so that its first `get` of each path finds the answer under way; forget earlier ones.
 * @param {string[]} paths
 */
export function prefetch(paths) {
  requested.clear();
  for (const path of paths) {
    const answer = get(path);
    answer.catch(() => {});  // whoever reads it reports it
    requested.set(path, answer);
  }
}

/** @param {string} path */
export async function get(path) {
  const answer = requested.get(path);
  if (answer) {
    requested.delete(path);
    return answer;
  }
  return (await call("GET", path)).json();
}

/** @param {string} method @param {string} path @param {any} [body] */
export const send = async (method, path, body) => (await call(method, path, { body: body && JSON.stringify(body) })).json();

/** @param {string} path @param {string} yaml */
export const sendYaml = async (path, yaml) => (await call("POST", path, { body: yaml, type: "application/yaml" })).json();

/** @param {string} path */
export const getText = async (path) => (await call("GET", path)).text();

/** @param {string} path */
export const getTrajectory = async (path) => decodeTrajectory(await (await call("GET", path, { accept: "application/msgpack" })).arrayBuffer());

/** Say in the page's head why no events arrive. @param {string} why empty if they do */
const sayLost = (why) => { byId("lost").textContent = why && `No new events: ${why}`; };

/** Return whether to ask again: not if the service itself refuses the call for good. @param {unknown} error */
const isPassing = (error) => !(error instanceof Refusal) || error.code === UNREACHABLE || error.status === 429 || error.status >= 500;

/**
 * Listen to a run's events until the returned function is called, except while the page is hidden: a browser opens six connections at
 * most to a host, over all of its pages. Unlike an EventSource, this opens a refused stream again.
 * @param {string} run
 * @param {Record<string, (data: any) => void>} listeners by kind of event
 * @param {boolean} [fromStart]
 */
export function listen(run, listeners, fromStart = false) {
  const kinds = Object.keys(listeners).map((kind) => `kind=${kind}`).join("&");
  const path = `/runs/${encodeURIComponent(run)}/events?${kinds}${fromStart ? "&from_start=true" : ""}`;
  let opened = new AbortController();
  let [position, reopenMs] = ["", REOPEN_MS];
  const dispatch = (/** @type {string} */ message) => {
    const { event, data, id } = Object.fromEntries(message.split("\n").map((line) => line.split(/: (.*)/s, 2)));
    position = id ?? position;
    if (!data) return;
    queueMicrotask(() => listeners[event](JSON.parse(data)));  // its errors are not the stream's
  };
  const read = async (/** @type {AbortSignal} */ signal) => {
    const { body, status } = await call("GET", path, { accept: "text/event-stream", position, signal });
    sayLost("");
    reopenMs = status === 204 ? RESUMED_MS : REOPEN_MS;
    if (!body || status === 204) return;
    const [reader, decoder] = [body.getReader(), new TextDecoder()];
    for (let text = "", part = await reader.read(); !part.done; part = await reader.read()) {
      const messages = (text + decoder.decode(part.value, { stream: true })).split("\n\n");
      text = messages.pop() ?? "";
      messages.forEach(dispatch);
    }
  };
  const follow = async (/** @type {AbortSignal} */ signal) => {
    try {
      await read(signal);
    } catch (error) {
      if (signal.aborted) return;
      reopenMs = REOPEN_MS;
      sayLost(/** @type {Error} */ (error).message);
      if (!isPassing(error)) return end();
    }
    if (!signal.aborted) setTimeout(follow, reopenMs, signal);
  };
  const open = () => {
    opened.abort();
    if (document.hidden) return;
    opened = new AbortController();
    follow(opened.signal);
  };
  const end = () => { opened.abort(); document.removeEventListener("visibilitychange", open); };
  document.addEventListener("visibilitychange", open);
  open();
  return () => { end(); sayLost(""); };
}
