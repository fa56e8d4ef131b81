//! The kernels' parameters: structs as `kernels/cuda/src` declares them, and the grid each is launched with.
//!
//! Pure. A test compares sizes and offsets with the compiler's, and a [`super::HostDevice`] refuses a grid that is not what `launch_of`
//! beside the kernel says. What the fields mean is said there.

use baton_types::{KvDtype, WeightDtype};

use super::device::{Address, Launch, TensorMap};
use crate::backend::Gate;

/// Threads of a warp.
const WARP: u32 = 32;
/// Elements that a thread takes together.
const OCTET: u32 = 8;

/// A struct that a kernel takes by value.
///
/// # Safety
/// It is laid out as the kernel's.
pub(crate) unsafe trait Params {
    /// How the kernel is launched with it.
    fn launch(&self) -> Launch;
}

/// Element type of an activation or a dense table.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Element {
    F32,
    F16,
    Bf16,
}

impl Element {
    pub fn bytes(self) -> usize {
        if self == Element::F32 { 4 } else { 2 }
    }
}

/// The number of a KV type in the kernels.
pub(crate) fn kv_type(dtype: KvDtype) -> u32 {
    match dtype {
        KvDtype::F32 => 0,
        KvDtype::F16 => 1,
        KvDtype::Bf16 => 2,
        KvDtype::Q8 => 3,
        KvDtype::Fp8 => 4,
        KvDtype::Int4 => 5,
    }
}

/// How a weight type is made bf16.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stored {
    Dense(Element),
    /// The number of the type in `dequantise.cu`.
    Quantised(u32),
}

pub(crate) fn stored(dtype: WeightDtype) -> Stored {
    match dtype {
        WeightDtype::F32 => Stored::Dense(Element::F32),
        WeightDtype::F16 => Stored::Dense(Element::F16),
        WeightDtype::Bf16 => Stored::Dense(Element::Bf16),
        WeightDtype::Q4_0 => Stored::Quantised(0),
        WeightDtype::Q4_1 => Stored::Quantised(1),
        WeightDtype::Q5_0 => Stored::Quantised(2),
        WeightDtype::Q5_1 => Stored::Quantised(3),
        WeightDtype::Q8_0 => Stored::Quantised(4),
        WeightDtype::Q4K => Stored::Quantised(5),
        WeightDtype::Q5K => Stored::Quantised(6),
        WeightDtype::Q6K => Stored::Quantised(7),
    }
}

pub(crate) fn gate(act: Gate) -> u32 {
    match act {
        Gate::Silu => 0,
        Gate::GeluTanh => 1,
    }
}

/// Blocks of a grid that hold `count` at `size` each.
fn parts(count: u64, size: u32) -> u32 {
    u32::try_from(count.div_ceil(u64::from(size))).unwrap_or(u32::MAX)
}

#[repr(C)]
pub(crate) struct Embed {
    pub table: Address,
    pub rows: Address,
    pub out: Address,
    pub table_type: Element,
    pub out_type: Element,
    pub count: u32,
    pub width: u32,
    pub scale: f32,
    /// Where rows that follow a draw find it.
    pub drawn: Address,
}

// SAFETY: as in embed.cu.
unsafe impl Params for Embed {
    fn launch(&self) -> Launch {
        Launch::new([self.count, parts(u64::from(self.width / OCTET), 128), 1], [128, 1, 1])
    }
}

#[repr(C)]
pub(crate) struct RmsNorm {
    pub x: Address,
    pub add: Address,
    pub weight: Address,
    pub out: Address,
    /// Where there are scales, `out` is E4M3.
    pub scales: Address,
    pub x_type: Element,
    pub y_type: Element,
    pub rows: u32,
    pub width: u32,
    pub eps: f32,
}

// SAFETY: as in rms_norm.cu.
unsafe impl Params for RmsNorm {
    fn launch(&self) -> Launch {
        by_rows(self.rows, self.width)
    }
}

/// A warp a row, or a block where it is wide.
fn by_rows(rows: u32, width: u32) -> Launch {
    match width {
        ..=1024 => Launch::new([parts(u64::from(rows), 4), 1, 1], [WARP, 4, 1]),
        _ => Launch::new([rows, 1, 1], [512, 1, 1]),
    }
}

#[repr(C)]
pub(crate) struct QuantiseRows {
    pub x: Address,
    pub out: Address,
    pub scales: Address,
    pub x_type: Element,
    pub rows: u32,
    pub width: u32,
}

// SAFETY: as in quantise_rows.cu.
unsafe impl Params for QuantiseRows {
    fn launch(&self) -> Launch {
        by_rows(self.rows, self.width)
    }
}

#[repr(C)]
pub(crate) struct ScaleProducts {
    pub x: Address,
    pub row_scales: Address,
    pub column_scales: Address,
    pub bias: Address,
    pub rows: u32,
    pub width: u32,
}

// SAFETY: as in scale_products.cu.
unsafe impl Params for ScaleProducts {
    fn launch(&self) -> Launch {
        let octets = u64::from(self.rows) * u64::from(self.width / OCTET);
        Launch::new([parts(octets, 256), 1, 1], [256, 1, 1])
    }
}

#[repr(C)]
pub(crate) struct Add {
    pub x: Address,
    pub y: Address,
    pub elements: u64,
    pub x_type: Element,
    pub y_type: Element,
}

// SAFETY: as in add.cu.
unsafe impl Params for Add {
    fn launch(&self) -> Launch {
        Launch::new([parts(self.elements / u64::from(OCTET), 256), 1, 1], [256, 1, 1])
    }
}

#[repr(C)]
pub(crate) struct GateMul {
    pub gate: Address,
    pub up: Address,
    pub out: Address,
    pub element: Element,
    pub act: u32,
    pub rows: u32,
    pub width: u32,
    pub gate_stride: u32,
    pub up_stride: u32,
    pub out_stride: u32,
}

// SAFETY: as in gate_mul.cu.
unsafe impl Params for GateMul {
    fn launch(&self) -> Launch {
        let octets = u64::from(self.rows) * u64::from(self.width / OCTET);
        Launch::new([parts(octets, 256), 1, 1], [256, 1, 1])
    }
}

/// One layer's K and V.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct KvPlanes {
    pub base: Address,
    pub block: u64,
    pub value: u64,
    pub head: u64,
    pub kv_type: u32,
    pub block_size: u32,
    pub head_dim: u32,
}

/// Rows of one sequence that a kernel takes together.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Tile {
    pub row: u32,
    pub rows: u32,
    pub position: u32,
    pub table: i32,
}

#[repr(C)]
pub(crate) struct RopeStoreKv {
    pub planes: KvPlanes,
    pub q: Address,
    pub k: Address,
    pub v: Address,
    pub q_out: Address,
    pub cos: Address,
    pub sin: Address,
    pub tiles: Address,
    pub blocks: Address,
    pub in_type: Element,
    pub q_type: Element,
    pub tile_count: u32,
    pub tile_rows: u32,
    pub heads: u32,
    pub kv_heads: u32,
}

// SAFETY: as in rope_store_kv.cu.
unsafe impl Params for RopeStoreKv {
    fn launch(&self) -> Launch {
        let vectors = u64::from(self.tile_rows) * u64::from(self.heads + 2 * self.kv_heads);
        Launch::new([self.tile_count, parts(vectors, 4), 1], [4 * WARP, 1, 1])
    }
}

/// What decode and prefill have in common; a prefill's parameters are no more than this.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Attention {
    pub planes: KvPlanes,
    pub q: Address,
    pub out: Address,
    pub tiles: Address,
    pub blocks: Address,
    pub q_type: Element,
    pub out_type: Element,
    pub tile_count: u32,
    pub tile_rows: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub window: u32,
    pub scale_log2: f32,
}

impl Attention {
    /// (row, head) pairs that a thread block takes.
    pub const PAIRS: u32 = 64;
}

// SAFETY: `AttentionPrefill` of attention_prefill.cu has this as its one field.
unsafe impl Params for Attention {
    fn launch(&self) -> Launch {
        let pairs = u64::from(self.tile_rows) * u64::from(self.heads / self.kv_heads);
        Launch::new([self.tile_count, self.kv_heads, parts(pairs, Self::PAIRS)], [4 * WARP, 1, 1])
    }
}

/// Prefill attention on Hopper.
#[repr(C)]
pub(crate) struct AttentionHopper {
    pub a: Attention,
    /// The layer's pool, in boxes of [`AttentionHopper::BOX_WIDTH`] elements and [`AttentionHopper::box_slots`] rows.
    pub pool: TensorMap,
}

impl AttentionHopper {
    /// (row, head) pairs that a thread block takes.
    pub const PAIRS: u32 = 128;
    /// Slots of a turn.
    const SLOTS: u32 = 128;
    /// Elements of a row of a box.
    pub const BOX_WIDTH: u32 = 64;

    /// Slots of a box, which lie in one block.
    pub fn box_slots(block_size: u32) -> u32 {
        (block_size & block_size.wrapping_neg()).min(Self::SLOTS)
    }

    /// Bytes of shared memory: q, the stages of K and V, and their barriers.
    fn shared(head_dim: u32) -> u32 {
        let dim = if head_dim <= 64 { 64 } else { 128 };
        let stages = 256 / dim;
        (2 * dim * (Self::PAIRS + 2 * stages * Self::SLOTS) + 4 * stages * 8).next_multiple_of(1024)
    }
}

// SAFETY: as in attention_hopper.cu.
unsafe impl Params for AttentionHopper {
    fn launch(&self) -> Launch {
        let pairs = u64::from(self.a.tile_rows) * u64::from(self.a.heads / self.a.kv_heads);
        let grid = [self.a.tile_count, self.a.kv_heads, parts(pairs, Self::PAIRS)];
        Launch { shared: Self::shared(self.a.planes.head_dim), ..Launch::new(grid, [12 * WARP, 1, 1]) }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AttentionDecode {
    pub a: Attention,
    pub partial: Address,
    pub stats: Address,
    pub split: u32,
    pub splits: u32,
}

// SAFETY: as in attention_decode.cu.
unsafe impl Params for AttentionDecode {
    fn launch(&self) -> Launch {
        let heads = parts(u64::from(self.a.heads / self.a.kv_heads), 16);
        Launch::new([self.a.tile_count, self.a.kv_heads * heads, self.splits], [4 * WARP, 1, 1])
    }
}

/// The same parameters for what brings splits together.
#[repr(transparent)]
pub(crate) struct AttentionCombine(pub AttentionDecode);

// SAFETY: as in attention_decode.cu, where it has an `AttentionDecode` as its one field.
unsafe impl Params for AttentionCombine {
    fn launch(&self) -> Launch {
        let a = &self.0.a;
        Launch::new([a.tile_count, parts(u64::from(a.heads), 4), 1], [4 * WARP, 1, 1])
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct BlockSide {
    pub base: Address,
    pub layer_stride: u64,
    pub block_stride: u64,
    pub plane_stride: u64,
}

#[repr(C)]
pub(crate) struct CopyBlocks {
    pub source: BlockSide,
    pub target: BlockSide,
    pub pairs: Address,
    pub bytes: u64,
    pub count: u32,
    pub layers: u32,
    pub planes: u32,
}

// SAFETY: as in copy_blocks.cu.
unsafe impl Params for CopyBlocks {
    fn launch(&self) -> Launch {
        Launch::new([self.count, self.layers * self.planes, parts(self.bytes / 16, 1024)], [256, 1, 1])
    }
}

/// A run: offsets into source and target, and the number of its first lane in its block.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Moved {
    /// Offset into the source.
    pub source: u64,
    /// Offset into the target.
    pub target: u64,
    /// Number of its first 8-byte lane in its block, for the digest.
    pub lane: u64,
}

#[repr(C)]
pub(crate) struct MoveRuns {
    pub source: Address,
    pub target: Address,
    pub runs: Address,
    pub digests: Address,
    pub bytes: u64,
    pub count: u32,
}

// SAFETY: as in move_runs.cu.
unsafe impl Params for MoveRuns {
    fn launch(&self) -> Launch {
        Launch::new([self.count, parts(self.bytes / 8, 2048), 1], [256, 1, 1])
    }
}

#[repr(C)]
pub(crate) struct Dequantise {
    pub source: Address,
    pub row_order: Address,
    pub out: Address,
    pub quant: u32,
    pub out_type: Element,
    pub rows: u32,
    pub cols: u32,
}

// SAFETY: as in dequantise.cu.
unsafe impl Params for Dequantise {
    fn launch(&self) -> Launch {
        Launch::new([self.rows, parts(u64::from(self.cols / OCTET), 128), 1], [128, 1, 1])
    }
}

/// Most of the likeliest tokens that are told of.
pub(crate) const MAX_TOP_LOGPROBS: usize = 20;
/// Instead of a row of logits: none, nothing is chosen.
pub(crate) const NO_ROW: u32 = u32::MAX;
/// Instead of how many of the likeliest are told of: no log probabilities.
pub(crate) const NO_LOGPROBS: u32 = u32::MAX;

/// How a token is chosen from a row of logits.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct SampleRow {
    pub seed: u64,
    pub index: u32,
    pub temperature: f32,
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    pub top_logprobs: u32,
    pub row: u32,
    /// Where the next begins.
    pub padding: u32,
}

/// What was chosen; all but `id` only with log probabilities.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Sampled {
    pub id: u32,
    pub logprob: f32,
    pub digest: u64,
    pub top_ids: [u32; MAX_TOP_LOGPROBS],
    pub top_logprobs: [f32; MAX_TOP_LOGPROBS],
}

#[repr(C)]
pub(crate) struct Sample {
    pub logits: Address,
    pub raw: Address,
    pub rows: Address,
    pub out: Address,
    pub count: u32,
    pub vocab: u32,
}

// SAFETY: as in sample.cu.
unsafe impl Params for Sample {
    fn launch(&self) -> Launch {
        Launch::new([self.count, 1, 1], [512, 1, 1])
    }
}

/// A change of one logit.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct LogitEntry {
    pub row: u32,
    pub id: u32,
    pub divide: f32,
    pub subtract: f32,
    pub add: f32,
}

#[repr(C)]
pub(crate) struct AdjustLogits {
    pub logits: Address,
    pub entries: Address,
    pub count: u32,
    pub vocab: u32,
}

// SAFETY: as in adjust_logits.cu.
unsafe impl Params for AdjustLogits {
    fn launch(&self) -> Launch {
        Launch::new([parts(u64::from(self.count), 128), 1, 1], [128, 1, 1])
    }
}

#[repr(C)]
pub(crate) struct MaskLogits {
    pub logits: Address,
    pub rows: Address,
    pub masks: Address,
    pub count: u32,
    pub vocab: u32,
}

// SAFETY: as in mask_logits.cu.
unsafe impl Params for MaskLogits {
    fn launch(&self) -> Launch {
        Launch::new([self.count, parts(u64::from(self.vocab), 256), 1], [256, 1, 1])
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;
    use crate::cuda::HostDevice;

    /// Size and offsets of a struct.
    macro_rules! layout {
        ($name:ident: $($field:ident),*) => {
            (stringify!($name), vec![size_of::<$name>(), $(offset_of!($name, $field)),*])
        };
    }

    #[test]
    fn structs_are_laid_out_as_the_kernels_expect_them() {
        let Some(device) = HostDevice::for_tests() else { return };
        for (name, layout) in [
            layout!(Tile: row, rows, position, table),
            layout!(KvPlanes: base, block, value, head, kv_type, block_size, head_dim),
            layout!(Embed: table, rows, out, table_type, out_type, count, width, scale, drawn),
            layout!(RmsNorm: x, add, weight, out, scales, x_type, y_type, rows, width, eps),
            layout!(Add: x, y, elements, x_type, y_type),
            layout!(GateMul: gate, up, out, element, act, rows, width, gate_stride, up_stride, out_stride),
            layout!(RopeStoreKv: planes, q, k, v, q_out, cos, sin, tiles, blocks, in_type, q_type, tile_count, tile_rows,
                heads, kv_heads),
            layout!(Attention: planes, q, out, tiles, blocks, q_type, out_type, tile_count, tile_rows, heads, kv_heads,
                window, scale_log2),
            layout!(TensorMap: words),
            layout!(AttentionHopper: a, pool),
            layout!(AttentionDecode: a, partial, stats, split, splits),
            layout!(BlockSide: base, layer_stride, block_stride, plane_stride),
            layout!(CopyBlocks: source, target, pairs, bytes, count, layers, planes),
            layout!(Moved: source, target, lane),
            layout!(MoveRuns: source, target, runs, digests, bytes, count),
            layout!(Dequantise: source, row_order, out, quant, out_type, rows, cols),
            layout!(QuantiseRows: x, out, scales, x_type, rows, width),
            layout!(ScaleProducts: x, row_scales, column_scales, bias, rows, width),
            layout!(SampleRow: seed, index, temperature, top_k, top_p, min_p, top_logprobs, row),
            layout!(Sampled: id, logprob, digest, top_ids, top_logprobs),
            layout!(Sample: logits, raw, rows, out, count, vocab),
            layout!(LogitEntry: row, id, divide, subtract, add),
            layout!(AdjustLogits: logits, entries, count, vocab),
            layout!(MaskLogits: logits, rows, masks, count, vocab),
        ] {
            assert_eq!(device.layout(name), layout, "{name}");
        }
        assert_eq!(size_of::<AttentionCombine>(), size_of::<AttentionDecode>());
    }

    #[test]
    fn nothing_to_do_is_an_empty_grid_and_the_largest_batch_is_none() {
        let add = |elements| Add { x: Address(0), y: Address(0), elements, x_type: Element::F32, y_type: Element::F32 };
        assert!(add(0).launch().is_empty());
        assert_eq!(add(8).launch().grid, [1, 1, 1]);
        assert_eq!(add(8 * 257).launch().grid, [2, 1, 1]);
        assert_eq!(add(8 << 40).launch().grid[0], u32::MAX, "and the driver says that it is too large");
    }
}
