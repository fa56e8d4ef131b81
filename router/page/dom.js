// Elements, and numbers for people.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

/** An HTML element. Attributes beginning with `on` are listeners. */
export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

/** An SVG element. */
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/** Sets a node's text, if it differs: what is unchanged costs no layout. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Sets an attribute, if it differs. */
export function set(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

const known = (value) => typeof value === "number" && Number.isFinite(value);

/** A time in seconds. */
export function seconds(value) {
  if (!known(value)) return "–";
  if (value === 0) return "0 ms";
  if (value >= 100) return `${value.toFixed(0)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  const ms = value * 1e3;
  if (ms >= 0.1) return ms >= 99.95 ? `${ms.toFixed(0)} ms` : `${ms.toFixed(1)} ms`;
  return `${(ms * 1e3).toFixed(1)} µs`;
}

/** Bytes, in units of 1024. */
export function bytes(value) {
  if (!known(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) [value, at] = [value / 1024, at + 1];
  return `${at === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(value >= 10 ? 1 : 2)} ${units[at]}`;
}

/** A rate in bytes a second, in units of 1000, as links are sold. */
export function rate(value) {
  if (!known(value)) return "–";
  return value >= 1e9 ? `${(value / 1e9).toFixed(1)} GB/s` : `${(value / 1e6).toFixed(value >= 1e8 ? 0 : 1)} MB/s`;
}

// Made once: it takes longer than all else of a number.
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** A whole number, in groups of three. */
export const count = (value) => (known(value) ? whole.format(value) : "–");

/** A number with few digits. */
export function few(value) {
  if (!known(value)) return "–";
  return value >= 100 ? value.toFixed(0) : value.toFixed(value >= 10 ? 1 : 2);
}

/** The beginning of an id. */
export const short = (id) => (id ? String(id).slice(0, 6) : "–");

/** A long time, in seconds. */
export const duration = (s) => (s < 90 ? `${s} s` : s < 5400 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`);

/** How long ago. */
export const ago = (ms) => (ms < 1000 ? "now" : ms < 90_000 ? `${Math.floor(ms / 1000)} s ago` : `${Math.floor(ms / 60_000)} min ago`);

/** Keeps a parent's children in step with a list: those that stay keep their focus. `make(item)` gives `{ node, update }`. */
export function keyed(parent, make) {
  let rows = new Map();
  return (items, key) => {
    const next = new Map();
    for (const item of items) {
      const id = key(item);
      const row = rows.get(id) ?? make(item);
      row.update(item);
      next.set(id, row);
    }
    for (const [id, row] of rows) if (!next.has(id)) row.node.remove();
    let at = 0;
    for (const row of next.values()) {
      if (parent.children[at] !== row.node) parent.insertBefore(row.node, parent.children[at] ?? null);
      at++;
    }
    rows = next;
  };
}

/** A table row of so many cells; `numbers`: which are numbers. */
export function row(cells, numbers) {
  const list = Array.from({ length: cells }, (_, at) => h("td", { class: numbers.includes(at) ? "num" : null }));
  return { node: h("tr", null, list), cells: list };
}

/** The head of a table; names that end in a space are of numbers. */
export const head = (...names) => h("thead", null, h("tr", null,
  names.map((name) => h("th", { scope: "col", class: name.endsWith(" ") ? "num" : null }, name.trim()))));
