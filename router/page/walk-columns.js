// K and V of one head, a column for each token: as colours, where the engine's values are known.

import { h, s, say, set } from "./dom.js";
import { column, scale } from "./walk-model.js";

export const COLUMNS = 64;
const [STEP, CELL, LEFT, HEIGHT, GAP] = [13, 11, 34, 64, 8];
/** Elements of a column that are written out. */
const WRITTEN = 6;

/** Colours of the smallest and the largest values: negative, positive. */
const [BELOW, ABOVE] = [[213, 94, 0], [0, 114, 178]];

function paint(canvas, numbers, dim, columns) {
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  const most = scale(numbers);
  const tall = canvas.height / dim;
  for (let token = 0; token < columns; token++) {
    column(numbers, dim, token).forEach((value, at) => {
      const [red, green, blue] = value < 0 ? BELOW : ABOVE;
      context.fillStyle = `rgba(${red}, ${green}, ${blue}, ${Math.min(1, Math.abs(value) / most).toFixed(3)})`;
      context.fillRect(token * STEP, at * tall, CELL, Math.ceil(tall));
    });
  }
}

const number = (value) => value.toPrecision(3);

/** The columns, one of which is chosen and written out. */
export function columnsView() {
  const wide = COLUMNS * STEP;
  const state = { chosen: 0, frame: null, tour: null, config: null };
  const rows = [["K", "keys"], ["V", "values"]].map(([name, field]) => ({
    name,
    field,
    canvas: h("canvas", { width: wide, height: HEIGHT, role: "img", "aria-label": `${name} of one head` }),
    said: h("output", { class: "mono small" }),
  }));
  const marks = s("svg", { class: "marks", viewBox: `0 0 ${wide} ${2 * HEIGHT + GAP}`, "aria-hidden": "true" });
  const rect = (name, height = 2 * HEIGHT + GAP) => marks.appendChild(s("rect", { class: name, y: 0, height, rx: 3 }));
  const [there, fresh, read, chosen] = [rect("there"), rect("fresh"), rect("read"), rect("chosen")];
  const token = h("input", { type: "range", min: 1, value: 1, step: 1, id: "walk-token", oninput: () => choose(Number(token.value) - 1) });
  const name = h("label", { for: "walk-token", class: "small" });
  const caption = h("p", { class: "muted small" });
  const picture = h("div", { class: "columns" }, h("div", { class: "heads" }, rows.map((row) => h("span", null, row.name))),
    h("div", { class: "values" }, rows.map((row) => row.canvas), marks));
  const values = h("div", { class: "chosen-values" }, h("div", { class: "pick" }, token, name), rows.map((row) => h("div", null, row.said)));
  const node = h("div", null, h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "K and V" }, picture), values, caption);

  function choose(at) {
    state.chosen = at;
    draw(state.frame, state);
  }
  function span(node, from, to) {
    set(node, "x", from * STEP - 1);
    set(node, "width", Math.max(0, (to - from) * STEP));
    set(node, "visibility", to > from ? "visible" : "hidden");
  }
  function draw(frame, { config, tour }) {
    Object.assign(state, { frame, config, tour });
    const tokens = frame.other ? [...(tour?.second.prompt ?? []), ...(tour?.second.answer ?? [])] : [...(tour?.first.prompt ?? []), ...(tour?.first.answer ?? [])];
    const kept = tour && (frame.other ? tour.after : tour.decode);
    const known = kept ? Math.min(frame.columns, kept.keys.length / tour.head_dim) : 0;
    const at = Math.min(state.chosen, Math.max(0, frame.tokens - 1));
    set(token, "max", frame.tokens);
    token.value = String(at + 1);
    const text = tokens[at] ? `: ${JSON.stringify(tokens[at].text)}` : "";
    say(name, `token ${at + 1} of ${frame.tokens}${text}`);
    for (const row of rows) {
      const numbers = kept?.[row.field] ?? [];
      paint(row.canvas, numbers, tour?.head_dim ?? 1, numbers.length > 0 ? known : 0);
      set(row.canvas, "aria-label", `${row.name} of one head: ${frame.columns} columns`);
      const own = at < known && numbers.length > 0 ? column(numbers, tour.head_dim, at) : [];
      say(row.said, own.length > 0 ? `${row.name} = ${own.slice(0, WRITTEN).map(number).join(", ")}, … (${own.length} elements)` : `${row.name}: ${at < frame.columns ? "computed, not shown" : "not computed yet"}`);
    }
    span(there, 0, frame.columns);
    span(fresh, ...frame.fresh);
    span(read, 0, frame.reads);
    span(chosen, at, at + 1);
    const whose = tour ? `Layer ${tour.layer + 1} of ${config.layers}, KV head ${tour.head + 1} of ${config.kv_heads}, as the decode worker's pool holds it in ${tour.kv_type}. Blue: above 0, orange: below; K has its token's position in it.` : `One KV head of ${config.kv_heads} in one layer of ${config.layers}.`;
    say(caption, `${whose} A column is ${config.head_dim} elements of K and as many of V. Shaded: computed in this step. Framed: read by attention.`);
  }
  return { node, draw };
}
