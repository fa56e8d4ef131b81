// How a KV cache works, step by step, with the numbers of a model.

import { bytes, count, h, s, say, set } from "./dom.js";
import { BLOCKS, frames, tokenBytes } from "./walk-model.js";

const PLAY = 1600;
const COLUMNS = 50;
const ELEMENT = 2;
const [STEP, CELL, LEFT] = [13, 10, 34];

/** A shape to show where none is known. */
const USUAL = { name: "llama-3.1-8b", block_size: 16, config: { layers: 32, heads: 32, kv_heads: 8, head_dim: 128 } };

export function walk(store) {
  const story = { model: USUAL, frames: frames(USUAL.block_size), at: 0 };
  const title = h("h2", { "aria-live": "polite" });
  const text = h("p", { class: "say" });
  const [columns, pools] = [columnsView(), poolsView()];
  const sums = sumsView();
  const place = h("span", { class: "muted small" });
  const play = h("button", { type: "button", class: "primary" }, "Play");
  const button = (name, action) => h("button", { type: "button", onclick: action }, name);
  const [back, next] = [button("Back", () => step(-1)), button("Step", () => step(1))];
  const reset = button("Reset", () => go(0));
  let timer = null;

  function draw() {
    const frame = story.frames[story.at];
    say(title, frame.title);
    say(text, frame.text);
    say(place, `${story.at + 1} of ${story.frames.length}`);
    back.disabled = story.at === 0;
    next.disabled = story.at === story.frames.length - 1;
    columns.draw(frame, story.model);
    pools.draw(frame);
    sums.draw(frame, story.model);
  }
  function go(at) {
    stop();
    story.at = at;
    draw();
  }
  function step(by) {
    go(Math.max(0, Math.min(story.frames.length - 1, story.at + by)));
  }
  function stop() {
    clearInterval(timer);
    timer = null;
    say(play, "Play");
  }
  play.addEventListener("click", () => {
    if (timer) return stop();
    if (story.at === story.frames.length - 1) story.at = 0;
    draw();
    say(play, "Pause");
    timer = setInterval(() => {
      if (story.at === story.frames.length - 1) return stop();
      story.at += 1;
      draw();
    }, PLAY);
  });
  const stage = h("section", { class: "card stage", "aria-label": "Walk-through" },
    h("div", { class: "head" }, title, place), text,
    h("div", { class: "controls" }, play, back, next, reset), columns.node, pools.node);
  const node = h("div", { class: "view walk" }, h("h1", null, "How a KV cache works"), stage, sums.node);

  async function learn() {
    const known = await (await fetch("/page/models")).json();
    const served = known.served.find((one) => one.config);
    const worker = store.now?.workers.find((one) => one.role === "decode");
    if (served) story.model = { name: served.name, config: served.config, block_size: [16, 32].includes(worker?.block_size) ? worker.block_size : USUAL.block_size };
    story.frames = frames(story.model.block_size);
    draw();
  }
  draw();
  learn().catch(() => {});
  return { node, close: stop };
}

/** K and V of one head: a column for each token. */
function columnsView() {
  const rows = ["K", "V"].map((name, at) => ({ name, y: 22 + at * 26, cells: [] }));
  const wide = LEFT + COLUMNS * STEP;
  const read = s("rect", { class: "read", x: LEFT - 3, y: 16, height: 58, rx: 3, width: 0 });
  const top = s("text", { x: LEFT, y: 11 });
  const svg = s("svg", { viewBox: `0 0 ${wide} 78`, role: "img", "aria-label": "K and V of one head" }, top);
  for (const { name, y, cells } of rows) {
    svg.append(s("text", { class: "strong", x: 8, y: y + 14 }, name));
    for (let at = 0; at < COLUMNS; at++) {
      const cell = s("rect", { class: "cell", x: LEFT + at * STEP, y, width: CELL, height: 20, rx: 1.5 });
      cells.push(cell);
      svg.append(cell);
    }
  }
  svg.append(read);
  const caption = h("p", { class: "muted small" });
  function draw(frame, { config }) {
    for (const { name, cells } of rows) {
      cells.forEach((cell, at) => {
        const there = at < frame.columns;
        const fresh = at >= frame.fresh[0] && at < frame.fresh[1];
        set(cell, "class", `cell ${there ? name.toLowerCase() : ""} ${fresh ? "new" : ""}`);
        set(cell, "visibility", at < frame.tokens || there ? "visible" : "hidden");
      });
    }
    set(read, "width", frame.reads > 0 ? frame.reads * STEP + 3 : 0);
    set(read, "visibility", frame.reads > 0 ? "visible" : "hidden");
    say(top, `tokens 1 to ${frame.tokens}`);
    const fresh = frame.fresh[1] - frame.fresh[0];
    set(svg, "aria-label", `${frame.columns} columns of K and V, ${fresh} of them new, ${frame.reads} read`);
    say(caption, `One KV head of ${config.kv_heads} in one layer of ${config.layers}: a column is ${config.head_dim} elements of K and as many of V. Outlined: computed in this step. Framed: read by attention.`);
  }
  return { node: h("div", null, h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "K and V" }, h("div", { class: "wide" }, svg)), caption), draw };
}

/** Both pools, and the block tables. */
function poolsView() {
  const [size, gap, left] = [40, 8, 116];
  const make = (name, y) => {
    const blocks = Array.from({ length: BLOCKS }, (_, at) => s("rect", { x: left + at * (size + gap), y, width: size, height: 30, rx: 4 }));
    const numbers = Array.from({ length: BLOCKS }, (_, at) => s("text", { x: left + at * (size + gap) + size / 2, y: y + 44, "text-anchor": "middle" }, String(at)));
    return { name, y, blocks, numbers, label: s("text", { class: "strong", x: 0, y: y + 19 }, name) };
  };
  const rows = [make("prefill worker", 4), make("decode worker", 68)];
  const svg = s("svg", { viewBox: `0 0 ${left + BLOCKS * (size + gap)} 118`, role: "img" }, rows.flatMap((row) => [row.label, ...row.blocks, ...row.numbers]));
  const tables = h("dl", { class: "facts" });
  const legend = h("div", { class: "legend" }, [["free", "free"], ["used", "used"], ["cached", "cached"], ["lent", "lent"], ["quarantined", "shared by both conversations"]].map(([state, name]) => h("span", { class: `s-${state}` }, name)));
  function draw(frame) {
    for (const [row, states] of [[rows[0], frame.prefill], [rows[1], frame.decode]]) {
      states.forEach((state, at) => set(row.blocks[at], "class", `s-${state === "shared" ? "quarantined" : state}`));
    }
    const told = (states) => states.map((state, at) => [at, state]).filter(([, state]) => state !== "free").map(([at, state]) => `block ${at} ${state}`).join(", ") || "all free";
    set(svg, "aria-label", `Pool of the prefill worker: ${told(frame.prefill)}. Pool of the decode worker: ${told(frame.decode)}.`);
    const lines = frame.tables.length > 0 ? frame.tables : [["none yet", []]];
    tables.replaceChildren(...lines.flatMap(([name, blocks]) => [h("dt", null, `block table, ${name}`), h("dd", { class: "mono" }, blocks.map((block, at) => `${at} → ${block}`).join("   ") || "–")]));
  }
  return { node: h("div", null, h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Pools" }, h("div", { class: "wide" }, svg)), legend, tables), draw };
}

/** The arithmetic of this step, and other kinds of attention beside this model's. */
function sumsView() {
  const [memory, compute] = [meter(), meter()];
  const formula = h("p", { class: "formula" });
  const kinds = h("div", { class: "pressures" });
  const shape = h("p", { class: "muted small" });
  const node = h("div", { class: "two" },
    h("section", { class: "card detail" }, h("h2", null, "Memory"), formula, memory.node, h("h2", null, "Tokens computed so far"), compute.node),
    h("section", { class: "card detail" }, h("h2", null, "KV of these tokens by kind of attention"), shape, kinds));
  function draw(frame, { name, config, block_size }) {
    const each = tokenBytes(config, ELEMENT);
    const tokens = frame.columns;
    formula.replaceChildren(`2 · ${config.layers} layers · ${config.kv_heads} KV heads · ${config.head_dim} elements · ${tokens} tokens · ${ELEMENT} bytes = `, h("b", null, bytes(each * tokens)));
    const blocks = Math.ceil(tokens / block_size);
    memory.draw([["in tokens", each * tokens], ["in whole blocks", each * blocks * block_size]], bytes);
    compute.draw([["with a KV cache", frame.work], ["without: all again for each token", frame.without]], count);
    const list = [["MHA", config.heads, "each query head has KV of its own"], ["GQA", config.kv_heads, "groups of query heads share KV"], ["MQA", 1, "all query heads share KV"]]
      .filter(([kind]) => kind !== "GQA" || (config.kv_heads > 1 && config.kv_heads < config.heads));
    const most = tokenBytes(config, ELEMENT, config.heads);
    kinds.replaceChildren(...list.map(([kind, heads, why]) => {
      const own = heads === config.kv_heads ? `, ${name}` : "";
      return bar(`${kind}: ${heads} KV ${heads === 1 ? "head" : "heads"}${own}`, tokenBytes(config, ELEMENT, heads) / most, `${bytes(tokenBytes(config, ELEMENT, heads) * tokens)}; ${why}`);
    }));
    say(shape, `${name}: ${config.layers} layers, ${config.heads} query heads, ${config.kv_heads} KV heads of ${config.head_dim} elements, blocks of ${block_size} tokens. KV in f16.`);
  }
  return { node, draw };
}

function bar(name, share, value) {
  return h("div", null, h("div", { class: "head small" }, h("span", null, name), h("span", { class: "muted" }, value)),
    s("svg", { class: "hbar", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
      s("rect", { class: "s-free", x: 0, y: 0, width: 100, height: 10 }), s("rect", { class: "s-used", x: 0, y: 0, width: Math.max(0.5, share * 100), height: 10 })));
}

function meter() {
  const node = h("div", { class: "pressures" });
  function draw(list, show) {
    const most = Math.max(1, ...list.map(([, value]) => value));
    node.replaceChildren(...list.map(([name, value]) => bar(name, value / most, show(value))));
  }
  return { node, draw };
}
