// Calls of the REST API; the session is a cookie that scripts can't read.

import { decodeTrajectory } from "./msgpack.js";

const JSON_TYPE = "application/json";

/** Refusal by the service: what is wrong, and for a configuration each key. */
export class Refusal extends Error {
  /**
   * @param {number} status
   * @param {{code: string, message: string, problems?: {path: string, message: string, suggestion: string | null}[]}} body
   */
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
 * @param {{body?: any, type?: string, accept?: string}} [options]
 */
async function call(method, path, { body, type = JSON_TYPE, accept = JSON_TYPE } = {}) {
  /** @type {Record<string, string>} */
  const headers = { accept };
  if (body !== undefined) headers["content-type"] = type;
  const response = await fetch(path, { method, headers, body, credentials: "same-origin" });
  if (response.ok) return response;
  let error = { code: "unreachable", message: `${response.status} ${response.statusText}` };
  try {
    error = (await response.json()).error ?? error;
  } catch {
    // not the service's own answer: its status says enough
  }
  throw new Refusal(response.status, error);
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

/**
 * @param {string} method
 * @param {string} path
 * @param {any} [body]
 */
export async function send(method, path, body) {
  return (await call(method, path, { body: body === undefined ? undefined : JSON.stringify(body) })).json();
}

/**
 * @param {string} path
 * @param {string} yaml
 */
export async function sendYaml(path, yaml) {
  return (await call("POST", path, { body: yaml, type: "application/yaml" })).json();
}

/** @param {string} path */
export async function getText(path) {
  return (await call("GET", path)).text();
}

/** @param {string} path */
export async function getTrajectory(path) {
  return decodeTrajectory(await (await call("GET", path, { accept: "application/msgpack" })).arrayBuffer());
}

/**
 * Listen to a run's events until the returned function is called.
 * @param {string} run
 * @param {Record<string, (data: any) => void>} listeners by kind of event
 * @param {boolean} [fromStart]
 */
export function listen(run, listeners, fromStart = false) {
  const kinds = Object.keys(listeners).map((kind) => `kind=${kind}`).join("&");
  const source = new EventSource(`/runs/${run}/events?${kinds}${fromStart ? "&from_start=true" : ""}`);
  for (const [kind, listener] of Object.entries(listeners)) {
    source.addEventListener(kind, (event) => listener(JSON.parse(event.data)));
  }
  return () => source.close();
}
