// Puts the page together: which view is shown, and the feed that it shows.

import { say, set } from "./dom.js";
import { cluster } from "./cluster.js";
import { requests } from "./requests.js";
import { calculator } from "./calculator.js";
import { walk } from "./walk.js";

/** Samples of history that are kept: two minutes. */
const SAMPLES = 240;
const RETRY = 3000;

const VIEWS = { cluster, requests, calculator, "kv-cache": walk };
const TITLES = { cluster: "Cluster", requests: "Requests", calculator: "Calculator", "kv-cache": "KV cache" };

/** What views see. */
const store = { now: null, history: { samples: SAMPLES, series: {} } };
const main = document.getElementById("main");
let view = null;
let source = null;

function remember({ stats, running }) {
  const values = {
    ttft50: stats.ttft_s.p50, ttft99: stats.ttft_s.p99, itl50: stats.itl_s.p50, itl99: stats.itl_s.p99,
    requests: stats.requests_per_s, goodput: stats.goodput_per_s, tokens: stats.tokens_per_s, running,
  };
  for (const [name, value] of Object.entries(values)) {
    const series = (store.history.series[name] ??= []);
    series.push(value ?? null);
    if (series.length > SAMPLES) series.shift();
  }
}

function live(state, text) {
  const node = document.getElementById("live");
  set(node, "data-state", state);
  say(node, text);
}

function take(event) {
  store.now = JSON.parse(event.data);
  remember(store.now);
  const { router } = store.now;
  live(router.stale || router.not_ready ? "lost" : "live", router.not_ready ? "not ready" : router.stale ? "view is old" : "live");
  say(document.getElementById("model"), router.models.join(", "));
  view?.update?.(store.now);
}

/** Watches while somebody looks: a hidden page costs the cluster nothing. */
function watch() {
  if (document.hidden) {
    source?.close();
    source = null;
    return live("off", "paused");
  }
  if (source) return;
  source = new EventSource("/page/events");
  source.onmessage = take;
  source.onerror = () => {
    live("lost", "no answer");
    if (source?.readyState !== EventSource.CLOSED) return;
    source = null;
    setTimeout(watch, RETRY);
  };
}

/** An id may hold a percent sign that stands for itself. */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function show() {
  const [, name = "cluster", ...rest] = location.hash.split("/");
  const kind = VIEWS[name] ? name : "cluster";
  const argument = decoded(rest.join("/"));
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === kind) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${TITLES[kind]} · Baton`;
  if (view?.kind !== kind) {
    view?.close?.();
    view = { kind, ...VIEWS[kind](store) };
    main.replaceChildren(view.node);
    window.scrollTo(0, 0);
  }
  view.open?.(argument);
  if (store.now) view.update?.(store.now);
}

function theme() {
  const button = document.getElementById("theme");
  const order = ["system", "light", "dark"];
  const apply = (name) => {
    if (name === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    say(button, `Theme: ${name}`);
  };
  let now = "system";
  try {
    now = localStorage.getItem("theme") ?? now;
  } catch {
    // Storage is blocked: the theme is chosen anew each time.
  }
  apply(now);
  button.addEventListener("click", () => {
    now = order[(order.indexOf(now) + 1) % order.length];
    apply(now);
    try {
      localStorage.setItem("theme", now);
    } catch {
      // As above.
    }
  });
}

theme();
show();
window.addEventListener("hashchange", show);
document.addEventListener("visibilitychange", watch);
watch();
