// The cluster: what bounds it, how requests fare, the workers with their pools, handoffs.

import { ago, bytes, count, duration, few, h, head, keyed, rate, row, say, seconds, set, short } from "./dom.js";
import { pool, sparkline } from "./charts.js";

/** From so many workers on, each is one line. */
const MANY = 16;
const LEGEND = ["free", "used", "cached", "lent", "quarantined"];

export function cluster(store) {
  const parts = [bound(), tiles(store), workers(), handoffs()];
  const node = h("div", { class: "view" }, h("h1", { class: "hidden" }, "Cluster"), parts.map((part) => part.node));
  return { node, update: (now) => parts.forEach((part) => part.update(now)) };
}

function bound() {
  const sentence = h("p", { class: "sentence" }, "Waiting for the first news of the cluster…");
  const spoken = h("p", { class: "hidden", "aria-live": "polite" });
  const meters = ["prefill", "transfer", "decode", "memory"].map((of) => {
    const fill = h("i");
    const meter = h("div", { class: "meter" }, fill);
    const share = h("span", { class: "num" }, "–");
    return { of, fill, meter, share, node: h("div", { class: "pressure" }, h("span", null, of), meter, share) };
  });
  const node = h("section", { class: "card bound", "aria-label": "What bounds the cluster" }, sentence,
    h("div", { class: "pressures", title: "How long each makes requests wait, as a share of what the SLO allows; memory: share of blocks in use" }, meters.map((m) => m.node)), spoken);
  let said = "";
  function update({ bound }) {
    say(sentence, bound.sentence);
    set(node, "data-over", bound.over);
    // Numbers change all the time; only a new bottleneck is read aloud.
    if (said !== bound.by + bound.over) say(spoken, bound.sentence);
    said = bound.by + bound.over;
    for (const { of, fill, meter, share } of meters) {
      const pressure = bound.pressures[of] ?? 0;
      fill.style.width = `${Math.min(100, pressure * 100)}%`;
      set(meter, "data-over", pressure >= 1);
      say(share, pressure >= 10 ? `${few(pressure)}×` : `${(pressure * 100).toFixed(0)} %`);
    }
  }
  return { node, update };
}

function tile(title, hint) {
  const [value, sub, line] = [h("div", { class: "value" }, "–"), h("div", { class: "sub" }, " "), sparkline()];
  return { node: h("section", { class: "card tile", title: hint }, h("h2", null, title), value, sub, line.node), value, sub, line };
}

function tiles(store) {
  const of = {
    ttft: tile("TTFT", "Time to the first token, from receiving a request. Dashed: 99th percentile"),
    itl: tile("ITL", "Time between two tokens of an answer. Dashed: 99th percentile"),
    goodput: tile("Goodput", "Requests a second that meet both SLOs. Dashed: all requests that ended"),
    tokens: tile("Tokens", "Tokens of answers a second"),
    running: tile("Running", "Answers in progress"),
  };
  function update({ stats, running, router, workers }) {
    const { series, samples } = store.history;
    const percentiles = (tile, times, fifty, last) => {
      say(tile.value, seconds(times.p50));
      say(tile.sub, `p90 ${seconds(times.p90)} · p99 ${seconds(times.p99)}`);
      tile.line.draw(series[fifty] ?? [], series[last], samples);
    };
    percentiles(of.ttft, stats.ttft_s, "ttft50", "ttft99");
    percentiles(of.itl, stats.itl_s, "itl50", "itl99");
    say(of.goodput.value, `${few(stats.goodput_per_s)} /s`);
    say(of.goodput.sub, `of ${few(stats.requests_per_s)} /s; SLO ${seconds(router.slo.ttft_s)}, ${seconds(router.slo.itl_s)}`);
    of.goodput.line.draw(series.goodput ?? [], series.requests, samples);
    say(of.tokens.value, `${few(stats.tokens_per_s)} /s`);
    say(of.tokens.sub, `mean of the last ${Math.round(stats.window_s)} s`);
    of.tokens.line.draw(series.tokens ?? [], null, samples);
    const waiting = workers.reduce((sum, worker) => sum + (worker.waiting ?? 0), 0);
    say(of.running.value, count(running));
    say(of.running.sub, `${count(waiting)} waiting at workers`);
    of.running.line.draw(series.running ?? [], null, samples);
  }
  return { node: h("div", { class: "tiles" }, Object.values(of).map((tile) => tile.node)), update };
}

function workers() {
  const legend = h("div", { class: "legend", "aria-hidden": "true" }, LEGEND.map((state) => h("span", { class: `s-${state}` }, state)));
  const router = h("span", { class: "muted small" });
  const columns = { prefill: column("Prefill workers"), decode: column("Decode workers") };
  const node = h("section", { class: "card", "aria-label": "Workers" }, h("div", { class: "head" }, h("h2", null, "Workers and their KV blocks"), router), legend,
    h("div", { class: "two" }, columns.prefill.node, columns.decode.node));
  function update({ workers, router: now }) {
    const view = now.stale ? "an old view: the registry is away" : `view ${now.revision}`;
    say(router, `router ${now.version}, up ${duration(now.uptime_s)}, ${view}`);
    const compact = workers.length > MANY;
    // Cards name the states themselves.
    legend.hidden = !compact;
    for (const [role, column] of Object.entries(columns)) column.update(workers.filter((worker) => worker.role === role), compact);
  }
  return { node, update };
}

function column(title) {
  const list = h("div", { class: "workers" });
  const number = h("span", { class: "muted small" });
  const empty = h("p", { class: "empty" }, title.startsWith("Prefill") ? "None: decode workers compute prompts, too." : "None yet.");
  const node = h("div", null, h("div", { class: "head" }, h("h3", null, title), number), list, empty);
  let cards = new Map();
  let compact = false;
  function update(workers, many) {
    if (many !== compact) {
      [compact, cards] = [many, new Map()];
      list.replaceChildren();
      list.classList.toggle("compact", many);
    }
    const here = new Set(workers.map((worker) => worker.id));
    for (const [id, card] of cards) {
      if (!here.has(id)) {
        card.node.remove();
        cards.delete(id);
      }
    }
    for (const worker of workers) {
      let card = cards.get(worker.id);
      if (!card) {
        cards.set(worker.id, (card = workerCard(worker, compact)));
        list.append(card.node);
      }
      card.update(worker);
    }
    say(number, workers.length > 0 ? String(workers.length) : "");
    empty.hidden = workers.length > 0;
  }
  return { node, update };
}

function workerCard(worker, compact) {
  const blocks = pool(compact);
  const state = h("span", { class: "state" });
  const work = h("span", { class: "small muted" });
  const counts = Object.fromEntries(LEGEND.map((name) => [name, h("span", { class: `s-${name}` })]));
  const name = h("span", null, h("span", { class: "mono", title: `${worker.id} at ${worker.address}` }, short(worker.id)), " ", state);
  const node = compact
    ? h("div", { class: "worker" }, name, blocks.node, work)
    : h("div", { class: "worker" }, h("div", { class: "row" }, name, work), blocks.node, h("div", { class: "counts" }, LEGEND.map((name) => counts[name])));
  function update(now) {
    say(state, now.state);
    set(state, "data-state", now.state);
    say(work, doing(now));
    blocks.draw(now.blocks);
    for (const state of LEGEND) say(counts[state], `${count(now.blocks?.[state])} ${state}`);
  }
  return { node, update };
}

function doing(worker) {
  if (worker.queued_tokens === undefined && worker.running === undefined) return "says nothing";
  const words = [`${count(worker.running ?? 0)} running`, `${count(worker.waiting ?? 0)} waiting`];
  if (worker.queued_tokens > 0) words.push(`${count(worker.queued_tokens)} prompt tokens, ${seconds(worker.queue_s)}`);
  return words.join(" · ");
}

function handoffs() {
  const [recent, pairs] = [h("tbody"), h("tbody")];
  const none = h("p", { class: "empty" }, "None in the last minute. A short prompt is computed by its decode worker, without a handoff.");
  const noPairs = h("p", { class: "empty" }, "No KV has travelled yet.");
  const card = (title, ...parts) => h("section", { class: "card" }, h("h2", null, title), parts);
  const table = (title, columns, body) => h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, h("table", null, columns, body));
  const node = h("div", { class: "two" },
    card("Latest handoffs", table("Latest handoffs", head("when", "request", "from → to", "over", "KV ", "in ", "rate "), recent), none),
    card("Ways that KV takes", table("Ways that KV takes", head("from → to", "over", "rate ", "handoffs ", "path failures "), pairs), noPairs));
  const listed = keyed(recent, handoff);
  const paired = keyed(pairs, link);
  function update(now) {
    listed(now.handoffs, (one) => `${one.request} ${one.at_us}`);
    paired(now.links, (one) => `${one.from} ${one.to}`);
    none.hidden = now.handoffs.length > 0;
    noPairs.hidden = now.links.length > 0;
  }
  return { node, update };
}

function way(cell, one) {
  say(cell, `${short(one.from)} → ${short(one.to)}`);
  set(cell, "title", `${one.from} → ${one.to}`);
}

function handoff(one) {
  const { node, cells } = row(7, [4, 5, 6]);
  cells[1].append(h("a", { href: `#/requests/${encodeURIComponent(one.request)}`, class: "mono" }, one.request.slice(0, 14)));
  way(cells[2], one);
  [one.transport, bytes(one.bytes), seconds(one.seconds), rate(one.bytes / one.seconds)].forEach((text, at) => say(cells[at + 3], text));
  return { node, update: (now) => say(cells[0], ago(now.age_ms)) };
}

function link(one) {
  const { node, cells } = row(5, [2, 3, 4]);
  way(cells[0], one);
  return { node, update: (now) => [now.transport, rate(now.bytes_per_second), count(now.handoffs), count(now.failures)].forEach((text, at) => say(cells[at + 1], text)) };
}
