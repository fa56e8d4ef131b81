// Opens every view and looks for errors. See tests/page/run.

import { strict as assert } from "node:assert";
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { chromium } from "playwright-core";
import { load, up } from "./cluster.mjs";

const [, , baton, browserPath, out, model] = process.argv;
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const SIZES = { wide: { width: 1280, height: 800 }, narrow: { width: 390, height: 844 } };
/** Snapshots of an hour. */
const HOUR = 7200;
const found = [];
const wrong = (what) => (found.push(what), console.error(`WRONG ${what}`));

/** Fails if axe finds a serious violation, if the page is wider than the screen, or if the console has an error. */
async function look(page, name, errors) {
  await page.screenshot({ path: `${out}/${name}.png`, fullPage: true });
  const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  for (const one of violations.filter(({ impact }) => ["serious", "critical"].includes(impact))) {
    wrong(`${name}: ${one.id}, ${one.help}: ${one.nodes.slice(0, 3).map((node) => `${node.target} ${node.failureSummary}`).join("; ")}`);
  }
  const over = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  if (over > 0) wrong(`${name}: ${over} pixels wider than the screen`);
  for (const error of errors.splice(0)) wrong(`${name}: ${error}`);
}

async function views(page, cluster, id, name, errors) {
  const go = (hash) => page.evaluate((to) => { location.hash = to; }, hash);
  await page.waitForSelector(".worker .counts span, .worker svg rect");
  await page.waitForFunction(() => document.querySelectorAll(".worker").length === 4);
  await page.waitForTimeout(2500);
  await look(page, `cluster-${name}`, errors);
  await go(`#/requests/${id}`);
  await page.waitForSelector(".waterfall");
  await look(page, `request-${name}`, errors);
  await go("#/calculator");
  await page.waitForFunction(() => /\d/.test(document.querySelector(".result .value")?.textContent ?? ""));
  await look(page, `calculator-${name}`, errors);
  await go("#/kv-cache");
  await page.waitForSelector(".walk [role=status] a");
  for (let step = 0; step < 3; step++) await page.getByRole("button", { name: "Step" }).click();
  await look(page, `kv-cache-handoff-${name}`, errors);
  for (let step = 0; step < 12; step++) await page.getByRole("button", { name: "Step" }).click();
  await look(page, `kv-cache-shared-${name}`, errors);
}

/** What the views say is what the router and the workers know. */
async function content(page, cluster) {
  await page.goto(`${cluster.page}#/cluster`);
  const handed = page.locator('a[href^="#/requests/"]').first();
  const id = (await handed.getAttribute("href")).split("/").pop();
  const sentence = await page.textContent(".sentence");
  assert.match(sentence, /bounds the cluster|is closest to it/);
  await handed.click();
  await page.waitForSelector(".waterfall");
  const told = await (await fetch(`${cluster.page}page/requests/${id}`)).json();
  const [choice] = told.choices;
  const ticks = await page.getAttribute(".waterfall .tick", "d");
  assert.equal(ticks.match(/M/g)?.length ?? 0, choice.token_us.length, "a tick for each token");
  assert.ok(choice.handoff.bytes > 0 && choice.prefill && choice.decode, "it was handed over");
  await page.goto(`${cluster.page}#/calculator`);
  await page.waitForFunction(() => document.querySelector("#c-model option"));
  await page.selectOption("#c-model", "llama-3.1-8b");
  await page.selectOption("#c-kv", "q8");
  await page.waitForFunction(() => document.querySelector(".formula")?.textContent.includes("67,584") || document.querySelector(".formula")?.textContent.includes("66,560"));
  await page.selectOption("#c-model", "config.json");
  await page.fill("#c-config", "{");
  await page.waitForFunction(() => document.querySelector(".error")?.textContent.startsWith("config.json"));
}

/** The walk-through shows the engine's values and blocks, as the router tells them. */
async function walk(page, cluster) {
  const wanted = { layer: 2, head: 1 };
  const asked = await fetch(`${cluster.page}page/tour`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(wanted) });
  const told = await asked.json();
  assert.equal(asked.status, 200, told.error);
  await page.goto(`${cluster.page}#/kv-cache`);
  await page.waitForSelector("#walk-layer:not([disabled])");
  await page.selectOption("#walk-layer", { value: "2" });
  await page.selectOption("#walk-head", { value: "1" });
  for (let step = 0; step < 3; step++) await page.getByRole("button", { name: "Step" }).click();
  await page.locator("#walk-token").fill("7");
  const column = (numbers, token) => numbers.slice(token * told.head_dim, (token + 1) * told.head_dim).slice(0, 6).map((value) => value.toPrecision(3)).join(", ");
  const written = `K = ${column(told.decode.keys, 6)}`;
  await page.waitForFunction((text) => document.querySelector(".chosen-values").textContent.includes(text), written, { timeout: 5000 }).catch(async () => assert.fail(`${await page.textContent(".chosen-values")}, but ${written}`));
  const shown = await page.textContent(".walk .stage");
  assert.ok(shown.includes(`V = ${column(told.decode.values, 6)}`), shown);
  for (const { blocks } of [told.prefill, { blocks: told.decode.blocks.slice(0, 3) }]) {
    assert.ok(shown.includes(blocks.map((block, at) => `${at} → ${block}`).join("   ")), `${shown}, but ${blocks}`);
  }
  const painted = await page.evaluate(() => {
    const canvas = document.querySelector(".walk canvas");
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return data.filter((value, at) => at % 4 === 3 && value > 0).length;
  });
  assert.ok(painted > 10_000, `${painted} pixels have a colour`);
}

/** An hour of snapshots of 200 workers with 5,000 blocks each, as fast as they are drawn: how long one takes, and what memory grows by. */
async function long(page) {
  await page.goto(`${cluster.page}#/calculator`);
  const heap = async () => {
    const session = await page.context().newCDPSession(page);
    await session.send("HeapProfiler.collectGarbage");
    const { usedSize } = await session.send("Runtime.getHeapUsage");
    return usedSize / 2 ** 20;
  };
  const before = await heap();
  const times = await page.evaluate(async (HOUR) => {
    const { cluster } = await import("/page/cluster.js");
    const now = await new Promise((resolve) => {
      const source = new EventSource("/page/events");
      source.onmessage = (event) => (source.close(), resolve(JSON.parse(event.data)));
    });
    const store = { now, history: { samples: 240, series: { ttft50: [], ttft99: [], itl50: [], itl99: [], goodput: [], requests: [], tokens: [], running: [] } } };
    const view = cluster(store);
    document.getElementById("main").replaceChildren(view.node);
    const template = now.workers[0];
    const took = [];
    for (let tick = 0; tick < HOUR; tick++) {
      for (const series of Object.values(store.history.series)) {
        series.push(Math.sin(tick / 9) + 1);
        if (series.length > 240) series.shift();
      }
      const workers = Array.from({ length: 200 }, (_, at) => {
        const [used, cached] = [(tick * 13 + at * 17) % 2000, (tick * 7 + at * 31) % 2000];
        return { ...template, id: `w${at}`, role: at % 2 ? "decode" : "prefill", running: tick % 30, blocks: { used, cached, lent: at % 50, quarantined: 0, free: 5000 - used - cached - (at % 50), total: 5000 } };
      });
      const handoffs = Array.from({ length: 12 }, (_, at) => ({ request: `r${tick}-${at}`, at_us: tick, age_ms: at * 100, bytes: 1e6, seconds: 0.01, transport: "shm", from: "w0", to: "w1" }));
      const begin = performance.now();
      view.update({ ...now, workers, handoffs });
      document.body.getBoundingClientRect();
      took.push(performance.now() - begin);
      if (tick % 50 === 0) await new Promise(requestAnimationFrame);
    }
    return took.sort((a, b) => a - b);
  }, HOUR);
  const grown = (await heap()) - before;
  const [usual, long] = [0.5, 0.99].map((share) => times[Math.floor(HOUR * share)]);
  console.log(`200 workers, ${HOUR} snapshots: one takes ${usual.toFixed(1)} ms to draw, ${long.toFixed(1)} ms at most of 99 %; memory grows by ${grown.toFixed(1)} MiB`);
  assert.ok(usual < 1000 / 30, "fewer than 30 frames a second");
  assert.ok(grown < 20, "memory grows");
}

const cluster = await up(baton, model);
const work = load(cluster, 6);
const browser = await chromium.launch({ executablePath: browserPath, args: ["--no-sandbox"] });
try {
  while (!work.id()) await new Promise((resolve) => setTimeout(resolve, 100));
  for (const scheme of ["light", "dark"]) {
    for (const [size, viewport] of Object.entries(SIZES)) {
      const context = await browser.newContext({ viewport, colorScheme: scheme, reducedMotion: "reduce" });
      const page = await context.newPage();
      const errors = [];
      page.on("console", (line) => line.type() === "error" && errors.push(`console: ${line.text()}`));
      page.on("pageerror", (error) => errors.push(`exception: ${error}`));
      await page.addInitScript({ content: axe });
      await page.goto(cluster.page);
      await views(page, cluster, work.id(), `${size}-${scheme}`, errors);
      await context.close();
    }
  }
  const page = await browser.newPage();
  await work.end();
  await content(page, cluster);
  await walk(page, cluster);
  await long(page);
} catch (error) {
  wrong(String(error.stack ?? error));
} finally {
  await browser.close();
  await work.end();
  await cluster.stop();
}
console.log(found.length === 0 ? `all is well; screenshots in ${out}` : `${found.length} wrong`);
process.exit(found.length === 0 ? 0 : 1);
