//! Parameters of the kernels that change logits and sample from them.

use super::super::device::{Address, Launch};
use super::{Params, parts};

/// Most top tokens whose log probabilities are reported.
pub(crate) const MAX_TOP_LOGPROBS: usize = 20;
/// Value of [`SampleRow::row`] for no row: nothing is sampled.
pub(crate) const NO_ROW: u32 = u32::MAX;
/// Value of [`SampleRow::top_logprobs`] for no log probabilities.
pub(crate) const NO_LOGPROBS: u32 = u32::MAX;

/// How a token is sampled from a row of logits.
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
    /// Fills the struct up to its alignment, so that it has no gap.
    pub padding: u32,
}

/// A sampled token. All fields but `id` are set only if log probabilities were asked for.
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
