// Small charts: lines over time, and a pool's blocks by state.

import { s, set } from "./dom.js";

/** The states of a block, in the order in which they are drawn. */
export const STATES = ["used", "lent", "quarantined", "cached", "free"];

const [WIDE, HIGH] = [120, 40];
/** Samples that a line has room for at least. */
const LEAST = 30;

/** A line over time; a second one is dashed. `draw` takes arrays of numbers; null: nothing known. */
export function sparkline() {
  const lines = [s("path", { class: "second" }), s("path")];
  const svg = s("svg", { class: "spark", viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    s("line", { x1: 0, x2: WIDE, y1: HIGH - 1, y2: HIGH - 1 }), ...lines);
  function draw(values, second, samples) {
    // A young history takes the whole width, too.
    const wide = Math.min(samples, Math.max(LEAST, values.length));
    const known = [...values, ...(second ?? [])].filter((value) => value !== null);
    const most = Math.max(1e-9, ...known);
    const path = (list) => {
      let text = "";
      let pen = "M";
      list.forEach((value, at) => {
        if (value === null) return void (pen = "M");
        const x = ((wide - list.length + at) / (wide - 1)) * WIDE;
        text += `${pen}${x.toFixed(1)} ${(HIGH - 2 - (value / most) * (HIGH - 6)).toFixed(1)}`;
        pen = "L";
      });
      return text;
    };
    set(lines[0], "d", path(second ?? []));
    set(lines[1], "d", path(values));
  }
  return { node: svg, draw };
}

const [COLUMNS, MOST_CELLS, STEP] = [48, 288, 10];

/** Shares `cells` cells among counts: what is there has one at least. */
export function share(counts, cells) {
  const total = counts.reduce((sum, n) => sum + n, 0);
  if (total === 0) return counts.map(() => 0);
  const exact = counts.map((n) => (n * cells) / total);
  const given = exact.map((x, at) => (counts[at] > 0 ? Math.max(1, Math.floor(x)) : 0));
  let left = cells - given.reduce((sum, n) => sum + n, 0);
  const order = counts.map((_, at) => at).sort((a, b) => exact[b] - given[b] - (exact[a] - given[a]));
  while (left > 0) for (const at of order) if (left > 0 && counts[at] > 0) [given[at], left] = [given[at] + 1, left - 1];
  while (left < 0) {
    const largest = given.indexOf(Math.max(...given));
    [given[largest], left] = [given[largest] - 1, left + 1];
  }
  return given;
}

/** A pool as cells, or as one bar if `bar`. */
export function pool(bar) {
  const parts = STATES.map((state) => s(bar ? "rect" : "path", { class: `s-${state}` }));
  const svg = s("svg", { class: "grid", role: "img", preserveAspectRatio: bar ? "none" : "xMidYMid meet" }, ...parts);
  if (bar) {
    set(svg, "height", 12);
    set(svg, "viewBox", "0 0 400 10");
    for (const part of parts) set(part, "height", 10);
  }
  let drawn = "";
  function draw(blocks) {
    const counts = STATES.map((state) => blocks?.[state] ?? 0);
    const key = counts.join();
    if (key === drawn) return;
    drawn = key;
    const total = counts.reduce((sum, n) => sum + n, 0);
    set(svg, "aria-label", total === 0 ? "blocks not known" : `${total} KV blocks: ${STATES.map((state, at) => `${counts[at]} ${state}`).join(", ")}`);
    if (bar) return drawBar(parts, share(counts, 400));
    const cells = Math.max(1, Math.min(total, MOST_CELLS));
    set(svg, "viewBox", `0 0 ${COLUMNS * STEP} ${Math.ceil(cells / COLUMNS) * STEP}`);
    let at = 0;
    share(counts, cells).forEach((n, part) => {
      let path = "";
      for (const end = at + n; at < end; at++) {
        path += `M${(at % COLUMNS) * STEP + 1} ${Math.floor(at / COLUMNS) * STEP + 1}h8v8h-8z`;
      }
      set(parts[part], "d", path);
    });
  }
  return { node: svg, draw };
}

function drawBar(parts, widths) {
  let x = 0;
  parts.forEach((part, at) => {
    set(part, "x", x);
    set(part, "width", widths[at]);
    x += widths[at];
  });
}
