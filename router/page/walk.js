// How a KV cache works, step by step: what the engine did with a short prompt, and the numbers of its model.

import { bytes, count, h, s, say, set } from "./dom.js";
import { columnsView } from "./walk-columns.js";
import { BLOCKS, elementBytes, frames, recorded, tokenBytes, usual } from "./walk-model.js";

const PLAY = 1600;

/** A shape to show where none is known. */
const USUAL = { name: "llama-3.1-8b", block_size: 16, config: { layers: 32, heads: 32, kv_heads: 8, head_dim: 128 } };

export function walk(store) {
  const story = { model: USUAL, tour: null, asked: 0, frames: frames(usual(USUAL.block_size)), at: 0 };
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
    columns.draw(frame, { config: story.model.config, tour: story.tour });
    pools.draw(frame);
    sums.draw(frame, { ...story.model, type: story.tour?.kv_type ?? "f16" });
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
  const choose = (name, label) => {
    const select = h("select", { id: `walk-${name}`, disabled: true, onchange: () => record() });
    return { select, node: h("span", null, h("label", { for: `walk-${name}`, class: "small" }, label), " ", select) };
  };
  const [layer, head] = [choose("layer", "layer"), choose("head", "KV head")];
  const whence = h("p", { class: "muted small", role: "status" });
  const stage = h("section", { class: "card stage", "aria-label": "Walk-through" },
    h("div", { class: "head" }, title, place), text,
    h("div", { class: "controls" }, play, back, next, reset, layer.node, head.node), columns.node, whence, pools.node);
  const node = h("div", { class: "view walk" }, h("h1", null, "How a KV cache works"), stage, sums.node);

  async function learn() {
    const known = await (await fetch("/page/models")).json();
    const served = known.served.find((one) => one.config);
    const worker = store.now?.workers.find((one) => one.role === "decode");
    if (served) story.model = { name: served.name, config: served.config, block_size: worker?.block_size ?? USUAL.block_size };
    const { layers, kv_heads } = story.model.config;
    const numbers = (of) => Array.from({ length: of }, (_, at) => h("option", { value: at }, String(at + 1)));
    layer.select.replaceChildren(h("option", { value: "" }, "first"), ...numbers(layers));
    head.select.replaceChildren(...numbers(kv_heads));
    await record();
  }
  /** Asks what the engine did. Without an answer the story is told without values. */
  async function record() {
    const own = ++story.asked;
    say(whence, "Two short requests are being answered, to be shown here …");
    const wanted = { model: story.model.name, head: Number(head.select.value || 0) };
    if (layer.select.value !== "") wanted.layer = Number(layer.select.value);
    const answer = await fetch("/page/tour", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(wanted) });
    const tour = await answer.json();
    // Another head was chosen meanwhile.
    if (own !== story.asked) return;
    story.tour = answer.ok ? tour : null;
    if (answer.ok) story.model.block_size = tour.block_size;
    story.frames = frames(story.tour ? recorded(tour) : usual(story.model.block_size));
    for (const { select } of [layer, head]) select.disabled = !answer.ok;
    story.at = Math.min(story.at, story.frames.length - 1);
    whence.replaceChildren(...(answer.ok ? source(tour) : [`Without the engine's values: ${tour.error}.`]));
    draw();
  }
  draw();
  learn().catch(() => say(whence, "Without the engine's values: the router does not answer."));
  return { node, close: stop };
}

/** What was recorded, with links to both requests. */
function source(tour) {
  const link = (id, name) => h("a", { href: `#/requests/${encodeURIComponent(id)}` }, name);
  const same = tour.prefill && tour.prefill.keys.every((value, at) => value === tour.decode.keys[at]) && tour.prefill.values.every((value, at) => value === tour.decode.values[at]);
  const handed = !tour.prefill ? "The decode worker computed the prompt itself." : same ? "Both workers' pools hold the same bits of the prompt." : "The pools hold other bits of the prompt: their KV types differ.";
  return ["Recorded on this cluster: ", link(tour.first.request, "the first request"), ", ", link(tour.second.request, "the second one"), `. ${handed}`];
}

/** Both pools, and the block tables. */
function poolsView() {
  const [size, gap, left] = [40, 8, 116];
  const make = (name, y) => {
    const blocks = Array.from({ length: BLOCKS }, (_, at) => s("rect", { x: left + at * (size + gap), y, width: size, height: 30, rx: 4 }));
    const numbers = Array.from({ length: BLOCKS }, (_, at) => s("text", { x: left + at * (size + gap) + size / 2, y: y + 44, "text-anchor": "middle" }));
    return { name, y, blocks, numbers, label: s("text", { class: "strong", x: 0, y: y + 19 }, name) };
  };
  const rows = [make("prefill worker", 4), make("decode worker", 68)];
  const svg = s("svg", { viewBox: `0 0 ${left + BLOCKS * (size + gap)} 118`, role: "img" }, rows.flatMap((row) => [row.label, ...row.blocks, ...row.numbers]));
  const tables = h("dl", { class: "facts" });
  const legend = h("div", { class: "legend" }, [["free", "free"], ["used", "used"], ["cached", "cached"], ["lent", "lent"], ["quarantined", "shared by both conversations"]].map(([state, name]) => h("span", { class: `s-${state}` }, name)));
  function draw(frame) {
    for (const [row, states] of [[rows[0], frame.prefill], [rows[1], frame.decode]]) {
      states.forEach(({ id, state }, at) => {
        set(row.blocks[at], "class", `s-${state === "shared" ? "quarantined" : state}`);
        say(row.numbers[at], String(id));
      });
    }
    const told = (states) => states.filter(({ state }) => state !== "free").map(({ id, state }) => `block ${id} ${state}`).join(", ") || "all free";
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
  function draw(frame, { name, config, block_size, type }) {
    const element = elementBytes(type, config.head_dim);
    const each = tokenBytes(config, element);
    const tokens = frame.columns;
    formula.replaceChildren(`2 · ${config.layers} layers · ${config.kv_heads} KV heads · ${config.head_dim} elements · ${tokens} tokens · ${element} bytes = `, h("b", null, bytes(each * tokens)));
    const blocks = Math.ceil(tokens / block_size);
    memory.draw([["in tokens", each * tokens], ["in whole blocks", each * blocks * block_size]], bytes);
    compute.draw([["with a KV cache", frame.work], ["without: all again for each token", frame.without]], count);
    const list = [["MHA", config.heads, "each query head has KV of its own"], ["GQA", config.kv_heads, "groups of query heads share KV"], ["MQA", 1, "all query heads share KV"]]
      .filter(([kind]) => kind !== "GQA" || (config.kv_heads > 1 && config.kv_heads < config.heads));
    const most = tokenBytes(config, element, config.heads);
    kinds.replaceChildren(...list.map(([kind, heads, why]) => {
      const own = heads === config.kv_heads ? `, ${name}` : "";
      return bar(`${kind}: ${heads} KV ${heads === 1 ? "head" : "heads"}${own}`, tokenBytes(config, element, heads) / most, `${bytes(tokenBytes(config, element, heads) * tokens)}; ${why}`);
    }));
    say(shape, `${name}: ${config.layers} layers, ${config.heads} query heads, ${config.kv_heads} KV heads of ${config.head_dim} elements, blocks of ${block_size} tokens. KV in ${type}.`);
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
