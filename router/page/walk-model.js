// The walk-through's story as data: what each step shows. Pure: from a model's shape to frames.

/** Tokens of the first prompt, of its answer, of the second prompt, and of what both begin with. */
const [PROMPT, ANSWER, SECOND] = [40, 10, 44];
/** Blocks of each pool that are shown, and which of them the story uses, in this order: pools hand out whatever is free. */
export const BLOCKS = 12;
const AT_PREFILL = [3, 7, 1];
const AT_DECODE = [5, 2, 9, 6];
const OF_SECOND = 10;

/** KV bytes of one token: `kvHeads` for other kinds of attention. */
export const tokenBytes = ({ layers, kv_heads, head_dim }, element, kvHeads = kv_heads) => 2 * layers * kvHeads * head_dim * element;

const pool = (marks) => Array.from({ length: BLOCKS }, (_, at) => marks[at] ?? "free");
const marked = (blocks, state) => Object.fromEntries(blocks.map((block) => [block, state]));

/**
 * The frames. `block`: tokens of a block. Each has a title, a text, the columns of K and V that there are, which of them are new and which are
 * read, the tokens that were computed so far with and without a cache, block tables, and both pools.
 */
export function frames(block) {
  const blocks = (tokens) => Math.ceil(tokens / block);
  const list = [];
  let [work, without] = [0, 0];
  const add = (frame) => list.push({ columns: 0, fresh: [0, 0], reads: 0, tables: [], prefill: pool({}), decode: pool({}), moving: false, ...frame, work, without });
  const [onPrefill, onDecode] = [AT_PREFILL.slice(0, blocks(PROMPT)), AT_DECODE.slice(0, blocks(PROMPT))];

  add({ title: "A prompt becomes tokens", tokens: PROMPT, text: `The tokenizer makes ${PROMPT} tokens of the prompt. No KV exists yet.` });

  [work, without] = [PROMPT, PROMPT];
  const prefilled = { columns: PROMPT, tokens: PROMPT, tables: [["first, at the prefill worker", onPrefill]] };
  add({ ...prefilled, title: "Prefill", fresh: [0, PROMPT], reads: PROMPT, prefill: pool(marked(onPrefill, "used")),
    text: `One pass computes K and V of all ${PROMPT} tokens together, in every layer. That is much arithmetic for each byte that is read: prefill is bound by compute. It also gives the first token of the answer.` });
  add({ ...prefilled, title: "Paged into blocks", prefill: pool(marked(onPrefill, "used")),
    text: `KV lies in blocks of ${block} tokens. They need not follow each other: the block table says which block holds which tokens. ${PROMPT} tokens take ${blocks(PROMPT)} blocks; the last one has ${blocks(PROMPT) * block - PROMPT} slots left.` });
  add({ ...prefilled, title: "Handed over", moving: true, prefill: pool(marked(onPrefill, "used")), decode: pool(marked(onDecode, "lent")),
    tables: [...prefilled.tables, ["first, at the decode worker", onDecode]],
    text: "The decode worker has lent blocks of its own pool. The prefill worker writes into them, layer by layer, while it computes the next layer." });
  add({ ...prefilled, title: "Verified", prefill: pool(marked(onPrefill, "cached")), decode: pool(marked(onDecode, "used")),
    tables: [["first, at the decode worker", onDecode]],
    text: "The decode worker compares a digest of every block before it reads any. Now the blocks are used. At the prefill worker they stay cached for prompts that begin alike." });

  for (let done = 1; done <= ANSWER; done++) {
    const tokens = PROMPT + done;
    const table = AT_DECODE.slice(0, blocks(tokens));
    [work, without] = [work + 1, without + tokens];
    const opened = blocks(tokens) > blocks(tokens - 1);
    add({ title: `Decode, step ${done}`, tokens, columns: tokens, fresh: [tokens - 1, tokens], reads: tokens, decode: pool(marked(table, "used")), prefill: pool(marked(onPrefill, "cached")),
      tables: [["first, at the decode worker", table]],
      text: `${opened ? "The last block is full, so a new one is taken. " : ""}The step computes K and V of one token, and its attention reads all ${tokens} columns. That is little arithmetic for each byte that is read: decode is bound by memory bandwidth.` });
  }

  const first = AT_DECODE.slice(0, blocks(PROMPT + ANSWER));
  const common = Math.floor(32 / block);
  const shared = first.slice(0, common);
  const own = [...shared, OF_SECOND];
  const missing = SECOND - common * block;
  [work, without] = [work + missing, without + SECOND];
  const both = { ...marked(first, "used"), [OF_SECOND]: "used", ...marked(shared, "shared") };
  add({ title: "A second conversation begins alike", tokens: SECOND, columns: SECOND, fresh: [common * block, SECOND], reads: SECOND, prefill: pool(marked(onPrefill, "cached")), decode: pool(both),
    tables: [["first, at the decode worker", first], ["second, at the decode worker", own]],
    text: `Its first ${common * block} tokens are the same, for example a system prompt. Both tables name the same ${common} ${common === 1 ? "block" : "blocks"}; only ${missing} tokens are computed. A block's name is a hash of all tokens up to its end, so equal prefixes are found at once.` });
  const after = { ...marked(first, "cached"), [OF_SECOND]: "used", ...marked(shared, "used") };
  add({ title: "The first answer ends", tokens: SECOND, columns: SECOND, reads: 0, prefill: pool(marked(onPrefill, "cached")), decode: pool(after),
    tables: [["second, at the decode worker", own]],
    text: "What the second conversation shares stays used. The rest stays cached until its place is needed. At every step, free + used + cached + lent + quarantined = all blocks." });
  return list;
}
