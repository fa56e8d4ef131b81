//! Why a model cannot be loaded.

use baton_kernels::{KernelError, MAX_HEADS_PER_KV_HEAD};
use baton_model_files::ModelFileError;
use baton_types::{BatonError, ErrorKind};

/// Errors of loading a model.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The file lacks a tensor or is damaged.
    #[error(transparent)]
    File(#[from] ModelFileError),
    /// A tensor or the pool does not suit the kernels.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A tensor of another shape than the configuration says.
    #[error("tensor {tensor} has shape {found:?}; the configuration says {wanted:?}")]
    Shape {
        /// Which tensor.
        tensor: String,
        /// Its shape in the file.
        found: Vec<usize>,
        /// The shape it should have.
        wanted: Vec<usize>,
    },
    /// More query heads for one KV head than the kernels take.
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
}

impl BatonError for ModelError {
    fn kind(&self) -> ErrorKind {
        ErrorKind::InvalidArgument
    }
}
