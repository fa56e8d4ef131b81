//! Why a model cannot be loaded.

use std::ops::Range;

use baton_engine::RunError;
use baton_kernels::{KernelError, MAX_HEADS_PER_KV_HEAD};
use baton_model_files::ModelFileError;
use baton_types::{BatonError, ErrorKind, WeightDtype};

/// Errors of loading a model.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The file lacks a tensor or is damaged.
    #[error(transparent)]
    File(#[from] ModelFileError),
    /// A tensor or the pool does not suit the kernels.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A tensor whose shape is not the one in the configuration.
    #[error("tensor {tensor} has shape {found:?}; the configuration says {wanted:?}")]
    Shape {
        /// Which tensor.
        tensor: String,
        /// Its shape in the file.
        found: Vec<usize>,
        /// The shape it should have.
        wanted: Vec<usize>,
    },
    /// More query heads per KV head than the kernels support.
    #[error("{0} query heads share one KV head; at most {MAX_HEADS_PER_KV_HEAD} are supported")]
    Group(u32),
    /// A size the kernels cannot work with.
    #[error("{field} is {value}; it must be a multiple of 8")]
    Width {
        /// Which size.
        field: &'static str,
        /// Its value.
        value: u32,
    },
    /// A number of tensor-parallel ranks that the model's sizes do not allow.
    #[error(
        "{field} is {value}, which {ranks} ranks cannot share; tensor-parallel degrees that fit this model: {}",
        degrees.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
    )]
    Ranks {
        /// Which size.
        field: &'static str,
        /// Its value.
        value: u32,
        /// How many ranks were asked for.
        ranks: u32,
        /// The numbers of ranks that fit this model.
        degrees: Vec<u32>,
    },
    /// A quantised tensor whose rows would be cut inside a block.
    #[error(
        "tensor {tensor} would be split at inputs {at:?}, inside its {dtype} blocks of {}; \
         choose another tensor-parallel degree, or a file of another type",
        dtype.block_elements()
    )]
    Split {
        /// Which tensor.
        tensor: String,
        /// Its element type.
        dtype: WeightDtype,
        /// The inputs of one rank.
        at: Range<usize>,
    },
    /// A rank's thread could not be started.
    #[error("cannot start a rank's thread: {0}")]
    Thread(#[from] std::io::Error),
}

impl BatonError for ModelError {
    fn kind(&self) -> ErrorKind {
        match self {
            ModelError::File(e) => e.kind(),
            ModelError::Kernel(e) => e.kind(),
            // All arise at start. Whoever starts the worker chose the model's file and the number of ranks.
            ModelError::Shape { .. }
            | ModelError::Group(_)
            | ModelError::Width { .. }
            | ModelError::Ranks { .. }
            | ModelError::Split { .. } => ErrorKind::InvalidArgument,
            ModelError::Thread(_) => ErrorKind::Internal,
        }
    }
}

/// The error of a step that a kernel failed in. A request is not at fault for it, whatever the kernel's error would say at start.
pub(crate) fn step_failed(error: KernelError) -> RunError {
    RunError(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_fails_in_a_step_is_no_clients_fault() {
        let why = || "why".to_owned();
        for error in [
            KernelError::Weight { name: why(), why: why() },
            KernelError::Pool(why()),
            KernelError::Fp8(why()),
            KernelError::Memory { bytes: 1 },
            KernelError::NoDevice(why()),
            KernelError::Region(why()),
            KernelError::Device { operation: why(), why: why() },
            KernelError::Threads(std::io::ErrorKind::WouldBlock.into()),
        ] {
            let said = error.to_string();
            let step = step_failed(error);
            assert_eq!(step.kind(), ErrorKind::Internal, "{step}");
            assert!(step.to_string().contains(&said), "{step}");
        }
    }

    #[test]
    fn files_and_kernels_speak_for_themselves() {
        let tensor = || "blk.0.attn_q.weight".to_owned();
        let unknown = ModelFileError::UnknownModel { spec: "tiny".to_owned(), hint: "random:tiny".to_owned() };
        for (error, kind) in [
            (unknown.into(), ErrorKind::NotFound),
            (KernelError::NoDevice("none".to_owned()).into(), ErrorKind::Unavailable),
            (KernelError::Memory { bytes: 1 }.into(), ErrorKind::ResourceExhausted),
            (ModelError::Shape { tensor: tensor(), found: vec![1], wanted: vec![2] }, ErrorKind::InvalidArgument),
            (ModelError::Group(99), ErrorKind::InvalidArgument),
            (ModelError::Width { field: "hidden_size", value: 7 }, ErrorKind::InvalidArgument),
            (
                ModelError::Ranks { field: "kv_heads", value: 2, ranks: 3, degrees: vec![1, 2] },
                ErrorKind::InvalidArgument,
            ),
            (ModelError::Split { tensor: tensor(), dtype: WeightDtype::Q8_0, at: 0..1 }, ErrorKind::InvalidArgument),
            (ModelError::Thread(std::io::ErrorKind::WouldBlock.into()), ErrorKind::Internal),
        ] {
            assert_eq!(error.kind(), kind, "{error}");
        }
    }
}
