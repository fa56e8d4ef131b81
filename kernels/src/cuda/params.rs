//! The kernels' parameters: structs laid out as `kernels/cuda/src` declares them, and the launch shape of each. Pure.
//!
//! The CUDA sources document the fields. A test compares sizes and offsets with those of the CUDA compiler, and a
//! [`super::HostDevice`] refuses a launch shape that differs from the one of `launch_of` beside the kernel.

use baton_types::{KvDtype, WeightDtype};

mod attention;
mod blocks;
mod rows;
mod sampling;

pub(crate) use attention::*;
pub(crate) use blocks::*;
pub(crate) use rows::*;
pub(crate) use sampling::*;

use super::handles::Launch;
use crate::backend::Gate;

/// Threads of a warp.
const WARP: u32 = 32;
/// Elements that a thread processes at once.
const OCTET: u32 = 8;

/// A struct that a kernel takes by value.
///
/// # Safety
/// It is laid out as the kernel's.
pub(crate) unsafe trait Params {
    /// The launch shape of the kernel for these parameters.
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

/// The kernels' number for a KV type.
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

/// How a weight type is stored, which decides how it is converted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stored {
    Dense(Element),
    /// A quantised type, by its number in `dequantise.cu`.
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

/// Number of thread blocks for `count` items at `size` items each.
fn parts(count: u64, size: u32) -> u32 {
    u32::try_from(count.div_ceil(u64::from(size))).unwrap_or(u32::MAX)
}

/// One thread per octet.
fn by_octets(octets: u64) -> Launch {
    Launch::new([parts(octets, 256), 1, 1], [256, 1, 1])
}

/// One warp per row, or one thread block per row if rows are wider than 1024.
fn by_rows(rows: u32, width: u32) -> Launch {
    match width {
        ..=1024 => Launch::new([parts(u64::from(rows), 4), 1, 1], [WARP, 4, 1]),
        _ => Launch::new([rows, 1, 1], [512, 1, 1]),
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;
    use crate::cuda::HostDevice;
    use crate::cuda::device::{Address, TensorMap};

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
            layout!(RmsNorm: x, add, weight, out, scales, x_type, y_type, rows, width, together, x_stride, out_stride,
                eps),
            layout!(Add: x, y, elements, x_type, y_type),
            layout!(GateMul: gate, up, out, element, out_type, act, rows, width, gate_stride, up_stride, out_stride),
            layout!(RopeStoreKv: planes, q, k, v, q_out, cos, sin, tiles, blocks, in_type, q_type, tile_count, tile_rows,
                heads, kv_heads, q_stride, k_stride, v_stride, q_out_stride),
            layout!(Attention: planes, q, out, tiles, blocks, q_type, out_type, tile_count, tile_rows, heads, kv_heads,
                q_stride, window, scale_log2),
            layout!(TensorMap: words),
            layout!(AttentionHopper: a, pool),
            layout!(DecodeWork: first, count),
            layout!(DecodeSplit: tile, split, slot),
            layout!(AttentionDecode: a, work, partial, stats, done, split, thread_blocks),
            layout!(CopyBlocks: base, layer_stride, pairs, bytes, count, layers),
            layout!(Moved: source, target, lane),
            layout!(MoveRuns: source, target, runs, digests, bytes, count),
            layout!(Dequantise: source, row_order, out, quant, out_type, rows, cols),
            layout!(QuantiseRows: x, out, scales, x_type, rows, width, x_stride),
            layout!(ScaleProducts: x, row_scales, column_scales, bias, rows, width, stride),
            layout!(SeededRows: out, key, first, stride, rows, width, middle, spread),
            layout!(SampleRow: seed, index, temperature, top_k, top_p, min_p, top_logprobs, row),
            layout!(Sampled: id, logprob, digest, top_ids, top_logprobs),
            layout!(Sample: logits, raw, rows, out, count, vocab),
            layout!(LogitEntry: row, id, divide, subtract, add),
            layout!(AdjustLogits: logits, entries, count, vocab),
            layout!(MaskLogits: logits, rows, masks, count, vocab),
        ] {
            assert_eq!(device.layout(name), layout, "{name}");
        }
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
