// Elements from data: text becomes text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {Node | string | number | null | undefined | false} Child */

/**
 * Set attributes, properties that start with `on` as listeners, and children.
 * @template {Element} T
 * @param {T} element
 * @param {Record<string, any>} attributes
 * @param {Child[]} children
 * @returns {T}
 */
function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) {
      element.append(child instanceof Node ? child : String(child));
    }
  }
  return element;
}

/**
 * Make an HTML element.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, any>} [attributes]
 * @param {...(Child | Child[])} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, /** @type {Child[]} */ (children.flat()));
}

/**
 * Make an SVG element.
 * @param {string} tag
 * @param {Record<string, any>} [attributes]
 * @param {...(Child | Child[])} children
 * @returns {SVGElement}
 */
export function s(tag, attributes = {}, ...children) {
  return fill(/** @type {SVGElement} */ (document.createElementNS(SVG, tag)), attributes, /** @type {Child[]} */ (children.flat()));
}

/** Return the page's element of an id. @param {string} id @returns {any} */
export function byId(id) {
  return document.getElementById(id);
}

/** Format a number shortly; a dash for none. @param {number | null | undefined} value @param {number} [digits] */
export function short(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)));
}

/** Format a time, with its date unless that is today. @param {number | null | undefined} unix */
export function clock(unix) {
  if (!unix) return "–";
  const time = new Date(unix * 1000);
  return time.toDateString() === new Date().toDateString() ? time.toLocaleTimeString() : time.toLocaleString();
}

/** Return what an element is to a user: its kind and its name. @param {any} element */
const nameOf = (element) => `${element.tagName} ${element.ariaLabel ?? element.labels?.[0]?.textContent ?? element.textContent}`;

/** Return a function for after a redraw: it focuses what replaces the element that has the focus now, or else the view. */
export function keepFocus() {
  const focused = document.activeElement ?? document.body;
  const name = focused === document.body ? "" : nameOf(focused);
  return () => {
    if (!name || document.activeElement !== document.body) return;
    const replacement = [...document.querySelectorAll(focused.tagName)].find((each) => nameOf(each) === name) ?? byId("main");
    /** @type {HTMLElement} */ (replacement).focus({ preventScroll: true });
  };
}

/**
 * Make a labelled select.
 * @param {string} label
 * @param {(string | [string, string])[]} options value, or value and text
 * @param {string} value
 * @param {(value: string) => void} onChange
 */
export function choice(label, options, value, onChange) {
  const select = h("select", { onchange: () => onChange(select.value) },
    options.map((each) => {
      const [name, text] = Array.isArray(each) ? each : [each, each];
      return h("option", { value: name, selected: name === value }, text);
    }));
  return h("label", {}, label, select);
}
