// The latest requests, and one of them in full.

import { ago, count, few, h, head, keyed, row, say, seconds, set, short } from "./dom.js";
import { legend, waterfall } from "./waterfall.js";

const AGAIN = 1000;
const TERMS = [
  ["room_s", "until the decode worker has KV blocks"],
  ["queue_s", "until the prompts before it are computed"],
  ["compute_s", "computing what is not cached of its prompt"],
  ["handoff_s", "handing its KV over"],
  ["answer_s", "the expected tokens of its answer"],
  ["others_s", "what others wait longer for it, all together"],
  ["sum_s", "sum; the least of all options is taken"],
];

export function requests() {
  const body = h("tbody");
  const none = h("p", { class: "empty" }, "No request yet. Send one, and it appears here.");
  const search = h("input", { id: "request-id", type: "search", placeholder: "x-request-id", autocomplete: "off", spellcheck: "false" });
  const find = (event) => {
    event.preventDefault();
    if (search.value.trim()) location.hash = `#/requests/${encodeURIComponent(search.value.trim())}`;
  };
  const list = h("section", { class: "card", "aria-label": "Latest requests" },
    h("div", { class: "head" }, h("h2", null, "Latest requests"),
      h("form", { onsubmit: find, role: "search" }, h("label", { for: "request-id", class: "hidden" }, "Request id"), search)),
    h("div", { class: "list scroll", tabindex: "0", role: "region", "aria-label": "Latest requests" },
      h("table", null, head("request", "when", "state", "prompt ", "tokens ", "TTFT ", "tokens/s ", "route"), body)), none);
  const shown = h("div", { class: "detail" }, hint());
  const node = h("div", { class: "view requests" }, h("h1", { class: "hidden" }, "Requests"), list, shown);
  const show = keyed(body, line);
  let asked = null;
  let timer = null;

  async function load(id) {
    clearTimeout(timer);
    asked = id;
    if (!id) return void shown.replaceChildren(hint());
    let answer;
    try {
      const response = await fetch(`/page/requests/${encodeURIComponent(id)}`);
      answer = await response.json();
    } catch {
      answer = { error: "the router does not answer" };
    }
    if (asked !== id) return;
    if (answer.error) {
      shown.replaceChildren(h("section", { class: "card" }, h("h2", null, "Request ", h("code", null, id)), h("p", { class: "muted" }, `${answer.error[0].toUpperCase()}${answer.error.slice(1)}. It keeps the latest 256 answers.`)));
      return;
    }
    // What was opened stays open.
    const opened = [...shown.querySelectorAll("details")].map((details) => details.open);
    shown.replaceChildren(...detail(answer));
    shown.querySelectorAll("details").forEach((details, at) => { details.open = opened[at] ?? false; });
    if (answer.choices.some((choice) => choice.outcome === "running")) again(id);
  }

  /** Asks again while the page can be seen. */
  function again(id) {
    timer = setTimeout(() => (document.hidden ? again(id) : load(id)), AGAIN);
  }

  function close() {
    asked = null;
    clearTimeout(timer);
  }

  function update(now) {
    show(now.requests, (one) => `${one.request} ${one.choice}`);
    for (const tr of body.children) set(tr, "aria-selected", tr.dataset.request === asked);
    none.hidden = now.requests.length > 0;
  }
  return { node, update, open: load, close };
}

const hint = () => h("section", { class: "card" }, h("h2", null, "One request"), h("p", { class: "muted" },
  "Choose a request to see where its time went: its queue, why it was placed where it was, its prefill, its handoff and each of its tokens. An answer's header x-request-id names it, too."));

function line(one) {
  const { node, cells } = row(8, [3, 4, 5, 6]);
  node.dataset.request = one.request;
  const state = h("span", { class: "state" });
  const choice = one.choice > 0 ? ` #${one.choice}` : "";
  cells[0].append(h("a", { href: `#/requests/${encodeURIComponent(one.request)}`, class: "mono", title: one.request }, one.request.slice(0, 16) + choice));
  cells[2].append(state);
  function update(now) {
    say(cells[1], ago(now.age_ms));
    say(state, now.outcome);
    set(state, "data-state", now.outcome);
    const texts = [count(now.prompt_tokens), count(now.tokens), seconds(micro(now.first_token_us)), few(speed(now)), route(now)];
    texts.forEach((text, at) => say(cells[at + 3], text));
  }
  return { node, update };
}

const micro = (value) => (value === null || value === undefined ? null : value * 1e-6);

/** Tokens a second after the first. */
function speed({ tokens, first_token_us: first, last_token_us: last }) {
  return tokens > 1 && last > first ? (tokens - 1) / ((last - first) * 1e-6) : null;
}

function route({ prefill, decode, recoveries }) {
  if (!decode) return "not placed";
  const again = recoveries > 0 ? `, recovered ${recoveries}×` : "";
  return (prefill ? `${short(prefill)} → ${short(decode)}` : `${short(decode)} alone`) + again;
}

function detail({ request, choices, placements }) {
  const cards = choices.map((choice) => h("section", { class: "card" },
    h("div", { class: "head" }, h("h2", null, "Request ", h("code", null, request), choice.choice > 0 ? ` choice ${choice.choice}` : ""), legend()),
    waterfall(choice), facts(choice),
    choice.prompt ? [h("h3", null, "Prompt, its beginning"), h("pre", { class: "prompt", tabindex: "0", role: "region", "aria-label": "Prompt" }, choice.prompt)] : null,
    marks(choice)));
  return [...cards, ...placements.map(placement)];
}

function facts(choice) {
  const handoff = choice.handoff;
  const pairs = [
    ["outcome", choice.outcome + (choice.error ? `: ${choice.error}` : "")],
    ["prompt", `${count(choice.prompt_tokens)} tokens, ${count(choice.cached_tokens)} of them cached where it was computed`],
    ["answer", `${count(choice.tokens)} tokens, ${few(speed(choice))} a second`],
    ["TTFT", seconds(micro(choice.first_token_us))],
    ["route", route(choice)],
    ["handoff", handoff ? `${(handoff.bytes / 2 ** 20).toFixed(2)} MiB over ${handoff.transport} in ${seconds(handoff.seconds)}` : choice.prefill ? "not told of before the answer ended" : "none"],
    ["recoveries", count(choice.recoveries)],
    ...tables(choice.blocks),
  ];
  return h("dl", { class: "facts" }, pairs.map(([name, value]) => [h("dt", null, name), h("dd", null, value)]));
}

/** Where the prompt's KV is by now: `blocks` as the router tells them. */
function tables(blocks) {
  if (!blocks) return [];
  const table = (told) => told.error ?? (told.blocks.length > 0 ? `${told.blocks.map((block, at) => `${at} → ${block}`).join("   ")}` : "no block of it is left in the prefix cache");
  return ["prefill", "decode"].filter((role) => blocks[role]).map((role) => [`block table, ${role} ${short(blocks[role].worker)}`, h("span", { class: "mono tables", tabindex: "0", role: "region", "aria-label": "Block table" }, table(blocks[role]))]);
}

/** The same as the waterfall, for who cannot see it. */
function marks(choice) {
  const lines = choice.marks.map((mark) => h("tr", null, h("td", { class: "num" }, seconds(micro(mark.at_us))), h("td", null, mark.what),
    h("td", null, mark.why ?? [mark.prefill && `prefill ${mark.prefill}`, mark.decode && `decode ${mark.decode}`, mark.worker, mark.local && "computes the prompt itself"].filter(Boolean).join(", "))));
  return h("details", null, h("summary", null, "What happened, step by step"),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Steps" }, h("table", null, head("at ", "what", "where or why"), h("tbody", null, lines))));
}

function placement(told) {
  if (told.rejected) return h("section", { class: "card" }, h("h2", null, "Not placed"), h("p", null, told.rejected));
  const workers = (of) => (of.prefill ? `prefill ${short(of.prefill)}, decode ${short(of.decode)}` : `decode ${short(of.decode)}, which computes the prompt itself`);
  const title = h("h2", null, `Why here: ${workers(told)}`);
  if (!told.predicted) return h("section", { class: "card" }, title, h("p", { class: "muted" }, "Nothing was predicted: the router's placement is not `predicted`."));
  const next = told.next_best?.predicted;
  const time = (value) => h("td", { class: "num" }, seconds(value));
  const terms = TERMS.map(([field, meaning]) => h("tr", null, h("th", { scope: "row" }, meaning), time(told.predicted[field]), time(next?.[field])));
  const brings = [["fetches", "from another worker"], ["loads", "from its own store"]].filter(([field]) => told[field])
    .map(([field, whence]) => h("p", { class: "small" }, `It takes ${count(told[field].tokens)} tokens ${whence} first, in ${seconds(told[field].seconds)} as predicted.`));
  const came = [["first_token_s", "time to the first token"], ["token_s", "from token to token"]]
    .map(([field, meaning]) => h("tr", null, h("th", { scope: "row" }, meaning), time(told.predicted[field]), time(told.measured[field])));
  const table = (...parts) => h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Prediction" }, h("table", null, parts));
  return h("section", { class: "card" }, title,
    table(head("seconds counted", "here ", "next best "), h("tbody", null, terms)),
    brings,
    h("p", { class: "muted small" }, next ? `Next best of ${told.options} options: ${workers(told.next_best)}.` : "There was no other option."),
    table(head("", "predicted ", "measured "), h("tbody", null, came)));
}
