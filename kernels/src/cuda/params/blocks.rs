//! Blocks that are moved, and weights that are made dense.

use super::super::device::{Address, Launch};
use super::{Element, OCTET, Params, parts};

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
