//! Parameters of kernels that move blocks, and of the one that dequantises weights.

use baton_types::Moving;

use super::super::device::{Address, Launch};
use super::{Element, OCTET, Params, parts};

#[repr(C)]
pub(crate) struct CopyBlocks {
    pub base: Address,
    pub layer_stride: u64,
    pub pairs: Address,
    pub bytes: u64,
    pub count: u32,
    pub layers: u32,
}

// SAFETY: as in copy_blocks.cu.
unsafe impl Params for CopyBlocks {
    fn launch(&self) -> Launch {
        Launch::new([self.count, self.layers, parts(self.bytes / 16, 1024)], [256, 1, 1])
    }
}

/// A run ([`Moving`]) in the layout that the device reads.
#[repr(C)]
pub(crate) struct Moved {
    pub source: u64,
    pub target: u64,
    pub lane: u64,
}

impl From<&Moving> for Moved {
    fn from(run: &Moving) -> Moved {
        Moved { source: run.source as u64, target: run.target as u64, lane: run.lane }
    }
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
