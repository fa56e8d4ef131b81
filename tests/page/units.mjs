// What of the page needs no browser: the walk-through's story, and how blocks become squares.

import { strict as assert } from "node:assert";
import { test } from "node:test";
import { share } from "./page/charts.js";
import { bytes, seconds } from "./page/dom.js";
import { BLOCKS, column, elementBytes, frames, recorded, scale, tokenBytes, usual } from "./page/walk-model.js";
import { spans } from "./page/waterfall.js";

/** What a router may tell: pools of thousands of blocks, numbers of all sizes. */
const tour = (more) => ({
  block_size: 16, shown: 10, head_dim: 4, first: { prompt: Array(48), answer: Array(18) }, second: { prompt: Array(48), answer: Array(2), cached: 32 },
  prefill: { worker: "wp", blocks: [4090, 17, 3] }, decode: { worker: "wd", blocks: [9, 8001, 2, 40] }, after: { worker: "wd", blocks: [9, 8001, 77] }, ...more,
});

test("every step of the walk-through keeps the books of its pools", () => {
  const stories = [usual(16), usual(32), recorded(tour()), recorded(tour({ prefill: null })), recorded(tour({ after: { worker: "wx", blocks: [0, 1, 2] } }))];
  for (const story of stories) {
    let before = { work: 0, without: 0 };
    for (const frame of frames(story)) {
      for (const pool of [frame.prefill, frame.decode]) {
        assert.equal(pool.length, BLOCKS);
        assert.equal(new Set(pool.map(({ id }) => id)).size, BLOCKS);
      }
      for (const [name, table] of frame.tables.filter(([name]) => story.same || !name.startsWith("second"))) {
        const pool = name.includes("prefill") ? frame.prefill : frame.decode;
        const state = (id) => pool.find((block) => block.id === id)?.state;
        assert.ok(table.every((id) => !["free", undefined].includes(state(id))), `${frame.title}: a table names a free block, or one that is not shown`);
        assert.equal(new Set(table).size, table.length);
      }
      if (frame.title.startsWith("Decode")) assert.equal(frame.tables[0][1].length, Math.ceil(frame.columns / story.block));
      assert.ok(frame.work >= before.work && frame.without >= before.without && frame.work <= frame.without);
      before = frame;
    }
  }
});

test("what was recorded is told, and only that", () => {
  const all = frames(recorded(tour()));
  const of = (title) => all.find((frame) => frame.title.startsWith(title));
  assert.deepEqual(of("Handed over").tables, [["first, at the prefill worker", [4090, 17, 3]], ["first, at the decode worker", [9, 8001, 2]]]);
  assert.match(of("Decode, step 1").text, /block 40 is taken/);
  assert.deepEqual(of("A second").decode.filter(({ state }) => state === "shared").map(({ id }) => id), [9, 8001]);
  assert.equal(frames(recorded(tour({ prefill: null }))).some(({ title }) => title === "Handed over"), false, "nothing was handed over");
});

test("columns are those of a token, and colours are not those of one far value", () => {
  assert.deepEqual(column([1, 2, 3, 4, 5, 6], 2, 1), [3, 4]);
  assert.equal(scale([...Array(99).fill(-1), 1000]), 1);
  assert.equal(scale([]), 1);
});

test("KV of a token is that of the engine", () => {
  const llama = { layers: 32, heads: 32, kv_heads: 8, head_dim: 128 };
  assert.equal(tokenBytes(llama, 2), 131_072);
  assert.deepEqual(["f32", "f16", "q8", "int4"].map((type) => tokenBytes({ layers: 30, kv_heads: 3, head_dim: 64 }, elementBytes(type, 64))), [46_080, 23_040, 11_880, 7_200]);
  assert.equal(tokenBytes(llama, 2, 32), 4 * 131_072);
});

test("squares are shared so that nothing that is there is hidden", () => {
  for (const counts of [[0, 0, 0, 0, 0], [1, 0, 0, 0, 99_999], [3, 1, 1, 1, 4], [50, 20, 10, 900, 20], [1, 1, 1, 1, 1e6]]) {
    const total = counts.reduce((sum, n) => sum + n, 0);
    const cells = share(counts, Math.min(288, total));
    assert.equal(cells.reduce((sum, n) => sum + n, 0), Math.min(288, total));
    counts.forEach((n, at) => assert.equal(n > 0, cells[at] > 0, `${counts}: ${cells}`));
  }
  assert.deepEqual(share([3, 1, 0, 0, 4], 8), [3, 1, 0, 0, 4], "each block is a square where there are few");
});

test("a waterfall has the spans of a split request, and of one that was recovered", () => {
  const mark = (what, at_us, more) => ({ what, at_us, ...more });
  const choice = {
    end_us: 100, age_us: 900, token_us: [40, 60, 90], handoff: { at_us: 50, seconds: 20e-6 },
    marks: [mark("begins", 1), mark("placed", 2), mark("decode asked", 3, { local: false }), mark("blocks reserved", 5), mark("prefill asked", 6), mark("prompt computed", 39), mark("KV verified", 50), mark("recovering", 70)],
  };
  const { spans: list, end, faults } = spans(choice);
  const of = (lane) => list.filter((span) => span.lane === lane).map(({ begin, end }) => [begin, end]);
  assert.deepEqual([of("router"), of("decode"), of("prefill"), of("transfer"), of("tokens")], [[[0, 2]], [[3, 5]], [[6, 39]], [[30, 50]], [[40, 90]]]);
  assert.deepEqual([end, faults], [100, [70]]);
  const running = spans({ ...choice, end_us: null, token_us: [], handoff: null, marks: choice.marks.slice(0, 5) });
  assert.deepEqual(running.spans.at(-1), { lane: "prefill", kind: "prefill", begin: 6, end: 900 }, "it is not over");
});

test("numbers for people", () => {
  assert.deepEqual([seconds(0), seconds(1.234), seconds(0.0421), seconds(0.9999), seconds(1.2e-6), seconds(null)], ["0 ms", "1.23 s", "42.1 ms", "1000 ms", "1.2 µs", "–"]);
  assert.deepEqual([bytes(0), bytes(1023), bytes(131_072), bytes(3 * 2 ** 30)], ["0 B", "1023 B", "128 KiB", "3.00 GiB"]);
});
