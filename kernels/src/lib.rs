//! Compute kernels: the trait [`Backend`] and its CPU implementation.
//!
//! Below `model`, which composes the operations into a decoder. Knows tensors, the KV pool and threads; knows nothing of
//! requests, schedulers, sockets, or where files lie.

// Kernels index several arrays by one counter; iterators would hide which.
#![allow(clippy::needless_range_loop)]

mod backend;
#[cfg(feature = "testing")]
pub mod conformance;
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod draw;
mod meeting;
mod pages;
mod pool;
mod profile;
mod source;

pub use backend::{
    AttentionShape, Backend, FOLLOWS, First, Gate, Input, MAX_HEADS_PER_KV_HEAD, MAX_PRODUCTS, Norm, Product, Ragged,
    Room, Rope, Span, StepInputs, TILE_ROWS,
};
use baton_types::{BatonError, DeviceError, ErrorKind};
pub use cpu::{
    Ceilings, CpuBackend, CpuOptions, CpuWeight, Isa, KvSlice, Packed, PackedError, PackedFile, PackedWriter,
    convert_kv, element,
};
pub use draw::{Draw, LogitChange, MAX_LOGIT_CHANGES};
pub use meeting::Meeting;
pub use pool::HostPool;
pub use profile::{Operation, Profile, Profiled, ProfiledWeight, SharedProfile, Tally};
pub use source::{RowOrder, WeightSource};

/// What can go wrong while weights and pools are set up and, on a GPU, in steps.
///
/// Its kinds are those of a worker that starts. A step's error reaches no client as such: `model` makes it a failed step, which is no
/// client's fault.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// A weight matrix of the wrong size or type.
    #[error("tensor {name}: {why}")]
    Weight {
        /// Its name.
        name: String,
        /// What is wrong.
        why: String,
    },
    /// A layout of the pool that the kernels do not serve: of this model, or as set.
    #[error("KV pool: {0}")]
    Pool(String),
    /// Memory that the pool does not fit.
    #[error("KV pool: {0}")]
    Region(String),
    /// The system gave no memory.
    #[error("no memory for {bytes} bytes of weights or KV")]
    Memory {
        /// How much was asked for.
        bytes: usize,
    },
    /// There is no GPU to run on.
    #[error("no GPU: {0}")]
    NoDevice(String),
    /// A GPU refused something, or went wrong with something it was given before.
    #[error("GPU, {operation}: {why}")]
    Device {
        /// What was asked of it.
        operation: String,
        /// What it said.
        why: String,
    },
    /// A GPU that has no products of 8-bit floats, of which they were asked for.
    #[error("quantization fp8: {0}, and products of fp8 need 8.9 at least (Ada, Hopper); set quantization to none")]
    Fp8(String),
    /// A file of packed weights that does not have what the model needs.
    #[error("packed weights, tensor {name}: {why}")]
    Packed {
        /// The matrix.
        name: String,
        /// What is wrong.
        why: String,
    },
    /// Packed weights could not be written.
    #[error("packed weights cannot be written: {0}")]
    Keep(std::io::Error),
    /// Threads could not be started.
    #[error("cannot start kernel threads: {0}")]
    Threads(#[from] std::io::Error),
}

impl From<KernelError> for DeviceError {
    fn from(error: KernelError) -> DeviceError {
        DeviceError(error.to_string())
    }
}

impl BatonError for KernelError {
    fn kind(&self) -> ErrorKind {
        match self {
            // The model's file and the settings, checked at start; whoever starts the worker chose them.
            KernelError::Weight { .. } | KernelError::Pool(_) | KernelError::Fp8(_) => ErrorKind::InvalidArgument,
            KernelError::Memory { .. } => ErrorKind::ResourceExhausted,
            KernelError::NoDevice(_) => ErrorKind::Unavailable,
            KernelError::Region(_)
            | KernelError::Device { .. }
            | KernelError::Packed { .. }
            | KernelError::Keep(_)
            | KernelError::Threads(_) => ErrorKind::Internal,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_and_settings_are_the_callers_fault() {
        let why = || "why".to_owned();
        for (error, kind) in [
            (KernelError::Weight { name: why(), why: why() }, ErrorKind::InvalidArgument),
            (KernelError::Pool(why()), ErrorKind::InvalidArgument),
            (KernelError::Fp8(why()), ErrorKind::InvalidArgument),
            (KernelError::Memory { bytes: 1 }, ErrorKind::ResourceExhausted),
            (KernelError::NoDevice(why()), ErrorKind::Unavailable),
            (KernelError::Region(why()), ErrorKind::Internal),
            (KernelError::Device { operation: why(), why: why() }, ErrorKind::Internal),
            (KernelError::Packed { name: why(), why: why() }, ErrorKind::Internal),
            (KernelError::Keep(std::io::ErrorKind::StorageFull.into()), ErrorKind::Internal),
            (KernelError::Threads(std::io::ErrorKind::WouldBlock.into()), ErrorKind::Internal),
        ] {
            assert_eq!(error.kind(), kind, "{error}");
        }
    }
}
