// How much memory a model needs, how many sequences fit, how long KV travels. The router computes: the same as `baton model estimate`.

import { bytes, count, few, h, head, rate, s, say, seconds, set } from "./dom.js";

const RETRY = 2000;
const WAIT = 200;

function field(id, name, control, hint) {
  control.id = id;
  return h("div", { class: "field", title: hint }, h("label", { for: id }, name), control);
}

const number = (value, min, max, step) => h("input", { type: "number", value, min, max, step: step ?? 1, inputmode: "decimal" });
const placeholder = (input, text) => (input.setAttribute("placeholder", text), input);
const choose = (options) => h("select", null, options.map(([value, name]) => h("option", { value }, name ?? value)));

export function calculator() {
  const of = {
    model: choose([]), config: h("textarea", { spellcheck: "false", placeholder: "{ \"model_type\": \"llama\", … }" }),
    kv_type: choose([]), weights: choose([]), context: placeholder(number("", 1, 2 ** 28), "the model's context"), prompt: number(4096, 1, 2 ** 28), tp: number(1, 1, 1024),
    place: choose([["gpu", "a GPU for each rank"], ["pool", "memory for KV alone"]]), memory: number(80, 0.001, 1e6, "any"),
    fraction: number(0.9, 0.01, 1, 0.01), block_size: number(16, 16, 4096, 16), link: placeholder(number("", 0.001, 1e6, "any"), "none"),
  };
  const config = field("c-config", "config.json", of.config);
  const fraction = field("c-fraction", "share of it to use", of.fraction);
  const error = h("p", { class: "error", role: "alert" });
  const form = h("form", { class: "card fields", onsubmit: (event) => event.preventDefault() }, h("h2", null, "Model and memory"),
    field("c-model", "model", of.model), config,
    h("div", { class: "pair" }, field("c-kv", "KV type", of.kv_type), field("c-weights", "weights", of.weights)),
    h("div", { class: "pair" }, field("c-context", "tokens of a sequence", of.context), field("c-prompt", "tokens of a prompt", of.prompt)),
    h("div", { class: "pair" }, field("c-tp", "tensor parallel degree", of.tp), field("c-block", "tokens of a block", of.block_size)),
    field("c-place", "the KV pool is in", of.place),
    h("div", { class: "pair" }, field("c-memory", "memory, GiB", of.memory), fraction),
    field("c-link", "one more link, GB/s", of.link), error);
  const results = result();
  const node = h("div", { class: "view calculator" }, h("h1", { class: "hidden" }, "Calculator"), form, results.node);
  let timer = null;
  let asked = 0;

  function question() {
    const value = (control) => (control.value === "" ? undefined : Number(control.value));
    const gib = value(of.memory) === undefined ? undefined : Math.round(value(of.memory) * 2 ** 30);
    const gpu = of.place.value === "gpu";
    const own = of.model.value === "config.json";
    return {
      ...(own ? { config: JSON.parse(of.config.value || "{}") } : { model: of.model.value }),
      kv_type: of.kv_type.value, weights: of.weights.value, context: value(of.context), prompt: value(of.prompt), tp: value(of.tp), block_size: value(of.block_size),
      ...(gpu ? { gpu_memory: gib, gpu_memory_fraction: value(of.fraction) } : { kv_memory: gib }),
      link: of.link.value === "" ? undefined : value(of.link) * 1e9,
    };
  }

  async function ask() {
    config.hidden = of.model.value !== "config.json";
    fraction.hidden = of.place.value !== "gpu";
    const number = ++asked;
    let answer;
    try {
      const response = await fetch("/page/estimate", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(question()) });
      answer = await response.json();
    } catch (wrong) {
      answer = { error: wrong instanceof SyntaxError ? `config.json: ${wrong.message}` : "the router does not answer" };
    }
    if (number !== asked) return;
    say(error, answer.error ?? "");
    if (!answer.error) results.show(answer, of.place.value === "gpu" ? Number(of.memory.value) * 2 ** 30 : null);
  }

  async function begin() {
    const told = await fetch("/page/models");
    // The router is starting.
    if (!told.ok) return setTimeout(again, RETRY);
    const known = await told.json();
    const names = [...known.served.filter((one) => one.config).map((one) => [one.name, `${one.name} (served here)`]), ...known.shapes.map((name) => [name]), ["config.json", "a config.json…"]];
    of.model.append(...names.map(([value, name]) => h("option", { value }, name ?? value)));
    of.kv_type.append(...known.kv_types.map((value) => h("option", { value, selected: value === "f16" }, value)));
    of.weights.append(...known.weights.map((value) => h("option", { value }, value)));
    await ask();
  }
  form.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(ask, WAIT);
  });
  const again = () => begin().catch(() => say(error, "the router does not answer"));
  again();
  return { node };
}

function result() {
  const facts = ["KV of a token", "sequences that fit", "KV of a sequence", "prompt's KV"].map((name) => {
    const [value, sub] = [h("div", { class: "value" }, "–"), h("div", { class: "small muted" }, " ")];
    return { node: h("div", { class: "result" }, h("h3", { class: "muted" }, name), value, sub), value, sub };
  });
  const parts = ["weights", "working", "kv", "rest"].map((kind) => s("rect", { class: `m-${kind}`, y: 0, height: 10 }));
  const bar = s("svg", { class: "memory", viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img" }, parts);
  const legend = h("div", { class: "legend" });
  const formula = h("p", { class: "formula" });
  const shape = h("p", { class: "muted" });
  const travel = h("tbody");
  const node = h("div", { class: "detail" },
    h("section", { class: "card" }, h("div", { class: "results" }, facts.map((fact) => fact.node))),
    h("section", { class: "card" }, h("h2", null, "KV of a token"), formula, shape),
    h("section", { class: "card" }, h("h2", null, "Memory of a rank"), bar, legend),
    h("section", { class: "card" }, h("h2", null, "The prompt's KV travels in, at a link's nominal rate"),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Links" }, h("table", null, head("link", "rate ", "time ", "longer is slower"), travel))));

  function show(told, gpu) {
    const sequence = `${count(told.sequence_tokens)} tokens`;
    [[bytes(told.token_bytes), `${count(told.token_bytes)} bytes`], [count(told.sequences), `of ${sequence}`],
      [bytes(told.sequence_bytes), sequence], [bytes(told.prompt_bytes), `${count(told.prompt_tokens)} tokens`]]
      .forEach(([value, sub], at) => (say(facts[at].value, value), say(facts[at].sub, sub)));
    const element = told.token_bytes / (2 * told.layers * told.kv_heads * told.head_dim);
    formula.replaceChildren(`2 (K and V) · ${told.layers} layers · ${told.kv_heads} KV heads · ${told.head_dim} elements · ${Number(element.toFixed(3))} bytes = `, h("b", null, `${count(told.token_bytes)} bytes`));
    const windowed = told.windowed_layers > 0 ? ` ${told.windowed_layers} layers see only a window, and hold no more than it.` : "";
    say(shape, `${parameters(told.parameters)} parameters; ${told.heads} query heads share ${told.kv_heads} KV heads (${kind(told)}); context of ${count(told.context_length)} tokens.${windowed}`);
    memory(told, gpu);
    travel.replaceChildren(...links(told.transfers));
  }

  function memory(told, gpu) {
    const kv = told.pool_bytes / told.ranks;
    const list = gpu === null ? [0, 0, kv, 0] : [told.weight_bytes, told.working_bytes, kv, Math.max(0, gpu - told.weight_bytes - told.working_bytes - kv)];
    const total = Math.max(1, list.reduce((sum, part) => sum + part, 0));
    let x = 0;
    parts.forEach((part, at) => {
      set(part, "x", x);
      set(part, "width", (list[at] / total) * 1000);
      x += (list[at] / total) * 1000;
    });
    const names = ["weights", "activations and scratch", `KV, ${count(told.blocks)} blocks`, "not used"];
    const words = ["weights", "working", "kv", "rest"];
    const shown = names.map((name, at) => [name, words[at], list[at]]).filter(([, , size]) => size > 0);
    legend.replaceChildren(...shown.map(([name, word, size]) => h("span", { class: `m-${word}` }, `${name} ${bytes(size)}`)));
    const over = gpu !== null && told.weight_bytes + told.working_bytes > gpu ? "The model does not fit. " : "";
    if (over) legend.prepend(h("span", { class: "error" }, over));
    set(bar, "aria-label", over + shown.map(([name, , size]) => `${name} ${bytes(size)}`).join(", "));
  }
  return { node, show };
}

const parameters = (n) => (n >= 1e8 ? `${few(n / 1e9)} billion` : `${few(n / 1e6)} million`);
const kind = ({ heads, kv_heads }) => (kv_heads === heads ? "MHA" : kv_heads === 1 ? "MQA" : "GQA");

function links(transfers) {
  const slowest = Math.max(...transfers.map((one) => one.seconds));
  // Times differ by orders of magnitude: a bar's length is the logarithm.
  const wide = (time) => Math.max(2, 100 + (100 / 4) * Math.log10(time / slowest));
  return transfers.map((one) => h("tr", null, h("td", null, one.link), h("td", { class: "num" }, rate(one.bytes_per_second)), h("td", { class: "num" }, seconds(one.seconds)),
    h("td", null, s("svg", { class: "hbar", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" }, s("rect", { class: "s-used", x: 0, y: 1, width: wide(one.seconds), height: 8 })))));
}
