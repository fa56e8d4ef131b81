"""A model of the CUDA kernels on an H200: what bounds their occupancy, and the least time that they can take.

Pure: it reads nothing and measures nothing. `kernels/cuda/table` prints what it says, `tests/gpu/table.py` puts it beside what a GPU
measures, `kernels/cuda/tests/model.py` tests it.

A time is a bound: bytes over a bandwidth or operations over a rate, whichever takes longer. Three things are added only where the launch
and the machine code decide them: loads that are under way at once, thread blocks that a multiprocessor has no room for, and launches.
"""
import dataclasses
import heapq
import re
from math import ceil

# Multiprocessors (SMs) and their limits: compute capability 9.0.
SMS = 132
REGISTERS, REGISTER_UNIT, WARP_UNIT = 65536, 256, 4
SHARED, SHARED_BLOCK, SHARED_RESERVED, SHARED_UNIT = 228 << 10, 227 << 10, 1 << 10, 128
WARPS, BLOCKS, WARP = 64, 32, 32
# The clock at which the published rate of products holds: 132 SMs times 4,096 operations.
CLOCK = 989.4e12 / (SMS * 4096)
# Bytes a clock from L1 and from L2 to one SM; warp instructions that one SM issues; its exponentials.
L1_PORT, L2_PORT, ISSUE, EXPONENTIALS = 128, 64, 4, 16
L2_BYTES = 50 << 20
# Clocks from a load to its value on an idle device, as public microbenchmarks of Hopper find them.
MEMORY_CLOCKS, L2_CLOCKS = 690, 281


@dataclasses.dataclass(frozen=True)
class Rates:
    """Bytes and operations a second of the whole device, and seconds that a launch takes beside its work."""

    memory: float
    l2: float
    bf16: float
    fp8: float
    launch: float

    def products(self, fp8):
        return self.fp8 if fp8 else self.bf16


# What is published: 4.8 TB/s of HBM3e, 989 TFLOP/s of bf16 and 1,979 of fp8, dense. That of L2 is not published for Hopper; it is that of
# the A100, 5,120 bytes a clock. Launches are free.
PEAK = Rates(memory=4.8e12, l2=5120 * CLOCK, bf16=989.4e12, fp8=1978.9e12, launch=0.0)
# Assumptions, to be replaced by what `tests/gpu.sh run kernels` measures: shares that large copies and products reach on such devices,
# and 1.5 µs from one kernel of a stream or graph to the next: its start, its first load, its end.
MEMORY_SHARE, L2_SHARE, PRODUCT_SHARE, LAUNCH = 0.90, 0.60, 0.70, 1.5e-6
ATTAINABLE = Rates(PEAK.memory * MEMORY_SHARE, PEAK.l2 * L2_SHARE, PEAK.bf16 * PRODUCT_SHARE, PEAK.fp8 * PRODUCT_SHARE, LAUNCH)

# Llama 3.1 8B.
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 32, 4096, 14336, 32, 8, 128, 128256
# (outputs, inputs) of a layer's products: q, k and v; attention's output; gate and up; down.
MATRICES = [(HIDDEN + 2 * KV_HEADS * HEAD_DIM, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)]
F32, BF16 = 4, 2

# Of the kernels' launches: positions of a split (kernels/src/cuda/splits.rs); (row, head) pairs of a thread block, slots of a turn
# (attention_hopper.cu); pairs of a warp, slots of a step, warps (attention_prefill.cu).
SPLIT = 256
HOPPER_PAIRS, HOPPER_SLOTS = 128, 128
WARP_PAIRS, WARP_SLOTS, PREFILL_WARPS = 16, 16, 4
DECODE_WARPS, SAMPLE_THREADS = 4, 512
# Bytes of loads that a warp of decode attention has under way together: K, then V, of sixteen slots.
DECODE_FLIGHT = WARP_SLOTS * HEAD_DIM * BF16
# Thread blocks of decode attention that an SM is given, by head_dim (kernels/src/cuda/params/attention.rs). Loads from L2, each of which waits
# for the one before: what a launch begins with (how much work, a split, its tile, a block's number), and what ends a row of several splits:
# a fence, the count, a fence, then its splits twice, so many at once.
DECODE_BLOCKS = {64: 4, 128: 3, 256: 2}
DECODE_BEGIN, DECODE_END, DECODE_ENDS = 4, 3, (4 * WARP, 8)
# Of a pass of sample.cu over a row: instructions for each logit and logits of a thread under way together, both counted in the machine code
# for sm_90a: the largest logit; weights by id, a seventeenth of which are those of the part that is walked again; counts of steps; weights
# of steps; what reaches a step, gathered.
LARGEST, WALKED, COUNTS, WEIGHTS, GATHERED = (5.3, 16), (30, 8), (20, 8), (55, 8), (3.6, 16)
# Instructions of a thread for a digit of what is gathered, at most one candidate a thread.
DIGIT = 270
# Passes, and digits of what is gathered, five for each filter and for the draw.
SAMPLING = {
    "greedy": ([LARGEST], 0),
    "temperature": ([LARGEST, WALKED], 0),
    "top-p": ([LARGEST, WEIGHTS, GATHERED], 10),
    "all filters": ([LARGEST, COUNTS, GATHERED], 15),
}


def up(value, unit):
    return ceil(value / unit) * unit


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """Thread blocks and warps that an SM holds at once, and what allows no more."""

    blocks: int
    warps: int
    limit: str


def occupancy(registers, shared, threads):
    """Of a kernel with so many registers a thread, bytes of shared memory and threads a block."""
    if shared > SHARED_BLOCK or registers > 255:
        raise ValueError(f"{registers} registers, {shared} bytes: no block fits")
    warps = ceil(threads / WARP)
    fit = REGISTERS // up(registers * WARP, REGISTER_UNIT) // WARP_UNIT * WARP_UNIT
    limits = {"registers": fit // warps, "shared memory": SHARED // up(shared + SHARED_RESERVED, SHARED_UNIT),
              "warps": WARPS // warps, "blocks": BLOCKS}
    blocks = min(limits.values())
    return Occupancy(blocks, blocks * warps, " and ".join(name for name, most in limits.items() if most == blocks))


# What each kernel moves and computes: its name's pattern, bytes, FLOP. Names of sizes are those of the kernels' parameters. Those that
# end in `_t` are bytes of an element; `kv_t` is those of one of the pool, `parameters` those of a row's scales; LEGEND has the others.
KERNELS = [
    ("add", "elements * (2 * x_t + y_t)", "elements"),
    ("adjust_logits", "count * (20 + 2 * 32)", "4 * count"),
    (r"attention_decode_\w+", "rows * (2 * kv_heads * head_parts * seen * (head_dim * kv_t + parameters) + heads * head_dim * (q_t + out_t)"
     " + splits * 12 + (heads * splits * (head_dim + 2) * 4 if splits > 1 else 0))", "4 * rows * heads * head_dim * seen"),
    (r"attention_(hopper|prefill)_\w+", "2 * kv_heads * seen * (head_dim * kv_t + parameters) + rows * heads * head_dim * (q_t + out_t)",
     "4 * heads * head_dim * pairs"),
    ("copy_blocks", "2 * count * layers * block_bytes", "0"),
    ("dequantise", "rows * cols * (quant_bytes / quant_elements + out_t)", "2 * rows * cols"),
    ("embed", "count * (width * (table_t + out_t) + 4)", "count * width"),
    ("gate_mul", "rows * width * (2 * in_t + out_t)", "6 * rows * width"),
    ("mask_logits", "count * vocab / 8 + 4 * forbidden", "0"),
    ("move_runs", "2 * count * run_bytes", "0"),
    ("quantise_rows", "rows * (width * (x_t + 1) + 4)", "3 * rows * width"),
    ("rms_norm", "rows * width * (x_t + out_t + 2 * added * x_t)", "(4 + added) * rows * width"),
    ("rope_store_kv", "rows * (head_dim * ((heads + 2 * kv_heads) * in_t + heads * q_t + 2 * kv_heads * kv_t + 4)"
     " + 2 * kv_heads * parameters)", "3 * rows * (heads + kv_heads) * head_dim"),
    ("sample", "rows * passes * vocab * 4", "2 * rows * (passes - 1) * vocab"),
    ("scale_products", "rows * width * 8 + 4 * (rows + 2 * width)", "3 * rows * width"),
    ("seeded_rows", "rows * width * 2", "2 * rows * width"),
]
LEGEND = {
    "seen": "slots of the pool that a row, or some row of the chunk, sees",
    "pairs": "sum over rows of the slots that each sees; n · (n + 1) / 2 for a prompt of n tokens",
    "splits": f"parts of {SPLIT} positions of a row's KV",
    "head_parts": "parts of sixteen of the heads of one KV head",
    "parameters": "bytes of a row's scales: 2 for q8 and fp8, else 0",
    "added": "1 where a residual is added, else 0",
    "passes": "over a row's logits: " + ", ".join(f"{len(passes)} ({how})" for how, (passes, _) in SAMPLING.items()) + "; from L2 after the first",
    "forbidden": "logits that a mask sets to -inf",
}


def formulas(kernel):
    """Bytes and FLOP of a kernel, as expressions."""
    for pattern, moved, computed in KERNELS:
        if re.fullmatch("baton_" + pattern, kernel):
            return moved, computed
    raise KeyError(f"{kernel}: KERNELS in kernels/cuda/model.py has no bytes and FLOP of it")


def value(expression, sizes):
    return eval(expression, {"__builtins__": {}}, sizes)  # pylint: disable=eval-used


def moved(kernel, **sizes):
    return value(formulas(kernel)[0], sizes)


def computed(kernel, **sizes):
    return value(formulas(kernel)[1], sizes)


def makespan(jobs, places):
    """When the last of the jobs ends that `places` take in their order, each as soon as a place is free."""
    free = [0.0] * min(places, len(jobs))
    for job in jobs:
        heapq.heapreplace(free, free[0] + job)
    return max(free)


def together(shares, bytes_each, memory, flight):
    """When the last of several is done that read so many parts of `bytes_each` bytes side by side, each at `flight` bytes a second at most
    and all together at `memory`."""
    seconds, done = 0.0, 0
    for left, share in zip(range(len(shares), 0, -1), sorted(shares)):
        seconds += (share - done) * bytes_each / min(flight, memory / left)
        done = share
    return seconds


class Model:
    """Times of the kernels with what they need: kernel → registers, shared and dynamic shared bytes, threads."""

    def __init__(self, needs):
        self.needs = needs

    def occupancy(self, kernel):
        of = self.needs[kernel]
        return occupancy(of["registers"], of["shared"] + of["dynamic"], of["threads"])

    def decode(self, rates, rows, out_t=BF16):
        """Attention of decode rows, each given by the positions that it sees. Thread blocks that stay take every so manieth split of the
        list, whole ones first. They share the memory's bandwidth; those that have more to do than others go on with no more than their
        loads under way. The last row's splits are brought together at the end; of other rows that is done while blocks read."""
        kernel = "baton_attention_decode_bf16_128"
        shape = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "head_parts": 1, "rows": 1}
        types = {"kv_t": BF16, "parameters": 0, "q_t": F32, "out_t": out_t}
        splits = {seen: ceil(seen / SPLIT) for seen in rows}
        total = sum(moved(kernel, **shape, **types, seen=seen, splits=splits[seen]) for seen in rows)
        whole = [SPLIT for seen in rows for _ in range(seen // SPLIT)]
        parts = [seen % SPLIT for seen in rows if seen % SPLIT]
        places = SMS * min(DECODE_BLOCKS[HEAD_DIM], self.occupancy(kernel).blocks)
        shares = [0] * places
        for i, slots in enumerate(slots for slots in whole + parts for _ in range(KV_HEADS)):
            shares[i % places] += slots
        flight = DECODE_WARPS * DECODE_FLIGHT / (MEMORY_CLOCKS / CLOCK)
        longest = max(splits.values())
        ends = DECODE_END + sum(ceil(longest / many) for many in DECODE_ENDS) if longest > 1 else 0
        return together(shares, total / sum(shares), rates.memory, flight) + (DECODE_BEGIN + ends) * L2_CLOCKS / CLOCK

    def hopper(self, rates, tokens, head_dim=HEAD_DIM):
        """Attention of a prompt by wgmma. A thread block takes whole turns of 128 slots, so it multiplies a little more than is seen;
        blocks are taken in their order by SMs that become free. Beside that: K and V from L2, and exponentials."""
        rows = HOPPER_PAIRS // (HEADS // KV_HEADS)
        tiles = [ceil(min(tokens, first + rows) / HOPPER_SLOTS) for first in range(0, tokens, rows)]
        turns = tiles[::-1] * KV_HEADS
        turn = 4 * HOPPER_PAIRS * HOPPER_SLOTS * head_dim / (rates.bf16 / SMS)
        room = self.occupancy(f"baton_attention_hopper_bf16_{head_dim}").blocks
        read = sum(turns) * HOPPER_SLOTS * 2 * head_dim * BF16
        exponentials = sum(turns) * HOPPER_PAIRS * HOPPER_SLOTS / (EXPONENTIALS * SMS * CLOCK)
        return max(makespan([turn * room * of for of in turns], SMS * room), read / rates.l2, exponentials)

    def warps(self, rates, tokens, head_dim=HEAD_DIM):
        """Attention of a prompt by mma.sync: each warp reads K and V of its sixteen pairs from L1. That is the bound; products come
        after it."""
        rows = WARP_PAIRS // (HEADS // KV_HEADS)
        steps = sum(ceil(min(tokens, first + rows) / WARP_SLOTS) for first in range(0, tokens, rows)) * KV_HEADS
        read = steps * WARP_SLOTS * 2 * head_dim * BF16
        return max(read / (L1_PORT * SMS * CLOCK), steps * 4 * WARP_PAIRS * WARP_SLOTS * head_dim / rates.bf16)

    def sample(self, rows, how, vocab=VOCAB):
        """Sampling of rows. A thread block takes a row alone, so one SM's instructions, loads or port to L2 are the bound, and more rows
        take no longer until SMs have several. Not in it: additions to the same bin, which wait for each other; barriers; candidates that
        are too many to gather."""
        room = self.occupancy("baton_sample").blocks
        each = min(ceil(rows / SMS), room)
        waves = ceil(rows / (SMS * each))
        passes, digits = SAMPLING[how]
        clocks = digits * DIGIT * each * SAMPLE_THREADS / WARP / ISSUE
        for instructions, logits in passes:
            issue, port = instructions / WARP / ISSUE, F32 / L2_PORT
            clocks += vocab * max(each * issue, each * port, L2_CLOCKS / (SAMPLE_THREADS * logits))
        return waves * clocks / CLOCK

    def step(self, rates, batch, context, fp8=False):
        """A decode step by its parts: seconds, and bytes that any step must read."""
        weights = sum(product(rates, batch, outs, cols, fp8) for outs, cols in MATRICES) * LAYERS
        head = product(rates, batch, VOCAB, HIDDEN, False)
        operand = 1 if fp8 else BF16
        norm = lambda added, out_t: moved("baton_rms_norm", rows=batch, width=HIDDEN, x_t=F32, out_t=out_t, added=added)
        rope = moved("baton_rope_store_kv", rows=batch, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, in_t=F32, q_t=F32, kv_t=BF16,
                     parameters=0)
        gate = moved("baton_gate_mul", rows=batch, width=INNER, in_t=F32, out_t=F32 if fp8 else BF16)
        # In a layer: two norms, of which the first layer's first adds nothing; rotation and store; gate; with fp8 two rows quantised.
        layer = [norm(1, operand), norm(1, operand), rope, gate]
        if fp8:
            layer += [moved("baton_quantise_rows", rows=batch, width=width, x_t=F32) for width in (HIDDEN, INNER)]
        gather = lambda table_t: moved("baton_embed", count=batch, width=HIDDEN, table_t=table_t, out_t=F32)
        ends = [gather(BF16), moved("baton_add", elements=batch * HIDDEN, x_t=F32, y_t=F32), gather(F32), norm(0, BF16)]
        parts = {
            "weights": weights,
            "KV": LAYERS * self.decode(rates, [context + 1] * batch, F32 if fp8 else BF16),
            "logits": head + self.sample(batch, "greedy"),
            "small kernels": sum(small(rates, b) for b in layer) * LAYERS + sum(small(rates, b) for b in ends),
            "launches": rates.launch * launches(fp8),
        }
        return Step(parts, weight_bytes(fp8) + batch * context * LAYERS * 2 * KV_HEADS * HEAD_DIM * BF16)

    def predicted(self, what, case):
        """Seconds of a case that `gpu bench` measures, at attainable rates with its launches; None where nothing is predicted."""
        rates = ATTAINABLE
        if what == "decode" and re.fullmatch(r"\d+ x \d+( \+ \d+ x \d+)* tokens", case):
            rows = [int(behind) + 1 for count, behind in re.findall(r"(\d+) x (\d+)", case) for _ in range(int(count))]
            return self.decode(rates, rows) + rates.launch
        if what == "prefill" and (m := re.fullmatch(r"(\d+) tokens(?:, head_dim (\d+))?(, mma.sync)?", case)):
            by = self.warps if m[3] else self.hopper
            return by(rates, int(m[1]), int(m[2] or HEAD_DIM)) + rates.launch
        if what == "sample" and (m := re.fullmatch(r"(\d+) x (\d+) logits, ([\w ]+)", case)) and m[3] in SAMPLING:
            return self.sample(int(m[1]), m[3], int(m[2])) + rates.launch
        return None


@dataclasses.dataclass(frozen=True)
class Step:
    parts: dict
    # Weights and KV.
    bytes: int

    def seconds(self):
        return sum(self.parts.values())

    def floor(self, rates):
        """Seconds to read weights and KV and nothing else."""
        return self.bytes / rates.memory


def small(rates, bytes_):
    """A kernel that reads what the one before has just written: from L2 if it fits."""
    return bytes_ / (rates.l2 if bytes_ <= L2_BYTES else rates.memory)


def product(rates, rows, outs, cols, fp8):
    """A product: its weight from memory once, or its operations, or its rows and results from and to L2."""
    element = 1 if fp8 else BF16
    return max(outs * cols * element / rates.memory, 2 * rows * outs * cols / rates.products(fp8),
               small(rates, rows * (cols * element + outs * F32)))


def launches(fp8):
    """Kernels of a decode step. In a layer: norm, product, rotation, attention, product, norm, product, gate, product; with fp8 rows are
    quantised before two of the products. Then embedding, the last sum, gather, norm, product, sampling."""
    return LAYERS * (9 + 2 * fp8) + 6


def weight_bytes(fp8):
    """Bytes of weights that a step reads: all but the embedding, of which it reads a row a token. Scales of fp8 are f32, one an output."""
    matrices = LAYERS * sum(outs * cols * (1 if fp8 else BF16) + (outs * F32 if fp8 else 0) for outs, cols in MATRICES)
    return matrices + VOCAB * HIDDEN * BF16
