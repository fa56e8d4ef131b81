//! Parameters of attention and of the kernel that stores K and V in the pool.

use super::super::device::{Address, Launch, TensorMap};
use super::{Element, Params, WARP, parts};

/// Location and layout of one layer's K and V in the pool.
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

/// Rows of one sequence that a kernel processes together.
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
    pub q_stride: u32,
    pub k_stride: u32,
    pub v_stride: u32,
    pub q_out_stride: u32,
}

// SAFETY: as in rope_store_kv.cu.
unsafe impl Params for RopeStoreKv {
    fn launch(&self) -> Launch {
        let vectors = u64::from(self.tile_rows) * u64::from(self.heads + 2 * self.kv_heads);
        Launch::new([self.tile_count, parts(vectors, 4), 1], [4 * WARP, 1, 1])
    }
}

/// The parameters that decode and prefill attention share; prefill has no others.
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
    pub q_stride: u32,
    pub window: u32,
    pub scale_log2: f32,
}

impl Attention {
    /// (row, head) pairs that a thread block processes.
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
    /// Tensor map of the layer's pool, in boxes of [`AttentionHopper::BOX_WIDTH`] elements and [`AttentionHopper::box_slots`] rows.
    pub pool: TensorMap,
}

impl AttentionHopper {
    /// (row, head) pairs that a thread block processes.
    pub const PAIRS: u32 = 128;
    /// Slots that a turn of the kernel's loop loads.
    const SLOTS: u32 = 128;
    /// Elements in a row of a box.
    pub const BOX_WIDTH: u32 = 64;

    /// Slots of a box, all of them in one block.
    pub fn box_slots(block_size: u32) -> u32 {
        (block_size & block_size.wrapping_neg()).min(Self::SLOTS)
    }

    /// Bytes of shared memory for q, the stages of K and V, and their barriers.
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

/// The part of the list of splits that a launch of decode attention does.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DecodeWork {
    /// Index of its first word, from the block tables on.
    pub first: u32,
    /// Number of its splits.
    pub count: u32,
}

/// A split that a decode row sees.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DecodeSplit {
    pub tile: u32,
    pub split: u32,
    /// Its place in the scratch.
    pub slot: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AttentionDecode {
    pub a: Attention,
    /// A [`DecodeWork`].
    pub work: Address,
    pub partial: Address,
    pub stats: Address,
    pub done: Address,
    pub split: u32,
    pub thread_blocks: u32,
}

impl AttentionDecode {
    /// Thread blocks that a multiprocessor has room for, by head dimension. `kernels/cuda/table` fails if it has room for fewer.
    pub fn occupancy(head_dim: u32) -> u32 {
        match head_dim {
            0..=64 => 4,
            65..=128 => 3,
            _ => 2,
        }
    }
}

// SAFETY: as in attention_decode.cu.
unsafe impl Params for AttentionDecode {
    fn launch(&self) -> Launch {
        Launch::new([self.thread_blocks, 1, 1], [4 * WARP, 1, 1])
    }
}
