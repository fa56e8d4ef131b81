// The walk-through's story as data: what each step shows. Pure: from a recording of the engine to frames.

/** Blocks of each pool that are shown. */
export const BLOCKS = 12;
/** Tokens of the first answer that are shown, where nothing was recorded. */
const ANSWER = 10;

/** KV bytes of one token: `kvHeads` for other kinds of attention. */
export const tokenBytes = ({ layers, kv_heads, head_dim }, element, kvHeads = kv_heads) => 2 * layers * kvHeads * head_dim * element;

/** Bytes of an element of K or V, with its share of its row's parameters: docs/kv-types.md. */
export function elementBytes(type, head_dim) {
  const bits = { f32: 32, f16: 16, bf16: 16, q8: 8 + 16 / head_dim, fp8: 8 + 16 / head_dim, int4: 5 }[type];
  return bits / 8;
}

/** A story in place of a recorded one: the same, without values. Pools hand out whatever is free. */
export function usual(block) {
  const prompt = Math.ceil(48 / block) * block;
  const shared = Math.ceil(32 / block);
  const full = prompt / block;
  const decode = [5, 2, 9, 6].slice(0, full + 1);
  return {
    block, prompt, answer: ANSWER, second: Math.max(prompt, (shared + 1) * block), cached: shared * block, recorded: false,
    tables: { prefill: [3, 7, 1].slice(0, full), decode, second: [...decode.slice(0, shared), 10, 11].slice(0, Math.max(full, shared + 1)) },
    same: true,
  };
}

/** The story of what the engine did. */
export function recorded(tour) {
  return {
    block: tour.block_size, prompt: tour.first.prompt.length, answer: Math.min(tour.shown, tour.first.answer.length - 1),
    second: tour.second.prompt.length, cached: tour.second.cached, recorded: true,
    tables: { prefill: tour.prefill?.blocks ?? [], decode: tour.decode.blocks, second: tour.after.blocks },
    same: tour.after.worker === tour.decode.worker,
  };
}

/** Which blocks of a pool are shown: those of the story, and their neighbours. */
function shown(used) {
  const ids = new Set(used);
  for (let at = 0; ids.size < BLOCKS; at++) ids.add(used.length > 0 ? Math.min(...used) + at : at);
  return [...ids].sort((a, b) => a - b).slice(0, BLOCKS);
}

const marked = (blocks, state) => Object.fromEntries(blocks.map((block) => [block, state]));

/**
 * The frames of a story. Each has a title, a text, the columns of K and V that there are, which of them are new and which are read, the tokens that
 * were computed so far with and without a cache, block tables, and both pools: for each block that is shown its number and its state.
 */
export function frames(story) {
  const { block, prompt, answer, second, tables } = story;
  const blocks = (tokens) => Math.ceil(tokens / block);
  const ids = { prefill: shown(tables.prefill), decode: shown(story.same ? [...new Set([...tables.decode, ...tables.second])] : tables.decode) };
  const pool = (of, marks) => ids[of].map((id) => ({ id, state: marks[id] ?? "free" }));
  const list = [];
  let [work, without] = [0, 0];
  const add = ({ prefill = {}, decode = {}, ...frame }) => list.push({ columns: 0, fresh: [0, 0], reads: 0, tables: [], moving: false, ...frame,
    prefill: pool("prefill", prefill), decode: pool("decode", decode), work, without });
  const onDecode = tables.decode.slice(0, blocks(prompt));
  const split = tables.prefill.length > 0;

  add({ title: "A prompt becomes tokens", tokens: prompt, text: `The tokenizer makes ${prompt} tokens of the prompt. No KV exists yet.` });

  [work, without] = [prompt, prompt];
  const [where, at] = split ? ["prefill", tables.prefill] : ["decode", onDecode];
  const table = [`first, at the ${where} worker`, at];
  const prefilled = { columns: prompt, tokens: prompt, tables: [table] };
  add({ ...prefilled, title: "Prefill", fresh: [0, prompt], reads: prompt, [where]: marked(at, "used"),
    text: `One pass computes K and V of all ${prompt} tokens together, in every layer. That is much arithmetic for each byte that is read: prefill is bound by compute. It also gives the first token of the answer.` });
  add({ ...prefilled, title: "Paged into blocks", [where]: marked(at, "used"),
    text: `KV lies in blocks of ${block} tokens. They need not follow each other: the block table says which block holds which tokens. ${prompt} tokens take ${blocks(prompt)} blocks.` });
  if (split) {
    add({ ...prefilled, title: "Handed over", moving: true, prefill: marked(at, "used"), decode: marked(onDecode, "lent"),
      tables: [table, ["first, at the decode worker", onDecode]],
      text: "The decode worker has lent blocks of its own pool. The prefill worker writes into them, layer by layer, while it computes the next layer." });
    add({ ...prefilled, title: "Verified", prefill: marked(at, "cached"), decode: marked(onDecode, "used"), tables: [["first, at the decode worker", onDecode]],
      text: "The decode worker compares a digest of every block before it reads any. Now the blocks are used. At the prefill worker they stay cached for prompts that begin alike." });
  }

  const left = marked(split ? tables.prefill : [], "cached");
  for (let done = 1; done <= answer; done++) {
    const tokens = prompt + done;
    const now = tables.decode.slice(0, blocks(tokens));
    [work, without] = [work + 1, without + tokens];
    const opened = blocks(tokens) > blocks(tokens - 1);
    add({ title: `Decode, step ${done}`, tokens, columns: tokens, fresh: [tokens - 1, tokens], reads: tokens, decode: marked(now, "used"), prefill: left,
      tables: [["first, at the decode worker", now]],
      text: `${opened ? `The last block is full, so block ${now.at(-1)} is taken, with room for ${block} tokens. ` : ""}The step computes K and V of one token, and its attention reads all ${tokens} columns. That is little arithmetic for each byte that is read: decode is bound by memory bandwidth.` });
  }

  const first = tables.decode.slice(0, blocks(prompt + answer));
  const common = story.same ? tables.second.filter((id, at) => first[at] === id) : [];
  const missing = second - story.cached;
  [work, without] = [work + missing, without + second];
  const own = ["second, at the decode worker", tables.second];
  const both = story.same ? { ...marked(first, "used"), ...marked(tables.second, "used"), ...marked(common, "shared") } : marked(first, "used");
  const where2 = story.same ? `Both tables name the same ${common.length} ${common.length === 1 ? "block" : "blocks"}` : "Another decode worker answers it";
  add({ title: "A second conversation begins alike", tokens: second, columns: second, other: true, fresh: [story.cached, second], reads: second, prefill: left, decode: both,
    tables: [["first, at the decode worker", first], own],
    text: `Its first ${story.cached} tokens are the same, for example a system prompt. ${where2}; only ${missing} tokens are computed. A block's name is a hash of all tokens up to its end, so equal prefixes are found at once.` });
  const after = story.same ? { ...marked(first, "cached"), ...marked(tables.second, "used") } : marked(first, "cached");
  add({ title: "The first answer ends", tokens: second, columns: second, other: true, reads: 0, prefill: left, decode: after, tables: [own],
    text: "What the second conversation shares stays used. The rest stays cached until its place is needed. At every step, free + used + cached + lent + quarantined = all blocks." });
  return list;
}

/** Of one token, the elements of K or V: `kept` as the router tells them. */
export const column = (numbers, dim, token) => numbers.slice(token * dim, (token + 1) * dim);

/** What of all values is shown with full colour: 98 of 100 are no larger. */
export function scale(numbers) {
  const sorted = Float32Array.from(numbers, Math.abs).sort();
  return sorted.length > 0 ? Math.max(sorted[Math.floor((sorted.length - 1) * 0.98)], 1e-9) : 1;
}
