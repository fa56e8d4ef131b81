//! Why a worker does not start, or stops.

use std::net::SocketAddr;

use baton_cluster::ClusterError;
use baton_engine::{EngineError, RunError};
use baton_kernels::KernelError;
use baton_model::ModelError;
use baton_model_files::ModelFileError;
use baton_runtime::RuntimeError;
use baton_store::OpenError;
use baton_transfer::TransferError;
use baton_types::{BatonError, ErrorKind};

use crate::Stalled;

/// Errors of a worker as a whole. A request's own errors go to its stream.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The model cannot be found or read.
    #[error(transparent)]
    Files(#[from] ModelFileError),
    /// The model cannot be loaded, or does not suit the kernels.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The GPU that was asked for is not there.
    #[error("--backend cuda: {0}; --backend cpu needs none")]
    Backend(KernelError),
    /// The model, or its KV, needs more of the GPU's memory than the worker may take.
    #[error("the model does not fit: it needs {needs}; gpu_memory_fraction gives it {has}; {fix}")]
    GpuMemory {
        /// How much it needs, and for what.
        needs: String,
        /// How much it has.
        has: String,
        /// How to fix it.
        fix: &'static str,
    },
    /// The engine's limits do not fit together.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The model cannot compute a step.
    #[error(transparent)]
    Run(#[from] RunError),
    /// Configuration, logs, signals, the admin endpoint.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// The registry.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// The transfer engine.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// The store below the pool.
    #[error(transparent)]
    Store(#[from] OpenError),
    /// A setting that is out of range.
    #[error("{field} is {value}; it must be {must}")]
    Config {
        /// Which setting.
        field: &'static str,
        /// Its value.
        value: String,
        /// What is allowed.
        must: String,
    },
    /// The gRPC server ended.
    #[error("gRPC on {addr}: {problem}")]
    Grpc {
        /// Where it listened.
        addr: SocketAddr,
        /// What happened.
        problem: String,
    },
    /// A thread could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] std::io::Error),
    /// The device it computes on stands still.
    #[error(transparent)]
    Stalled(#[from] Stalled),
    /// The engine thread is gone: a defect, logged where it happened.
    #[error("the engine has stopped")]
    EngineStopped,
}

/// Ok if `ok`; else the error that setting `field` has `value` but must be `must`.
pub(crate) fn check(
    ok: bool,
    field: &'static str,
    value: impl ToString,
    must: impl Into<String>,
) -> Result<(), WorkerError> {
    if ok { Ok(()) } else { Err(WorkerError::Config { field, value: value.to_string(), must: must.into() }) }
}

impl BatonError for WorkerError {
    fn kind(&self) -> ErrorKind {
        match self {
            WorkerError::Files(e) => e.kind(),
            WorkerError::Model(e) => e.kind(),
            WorkerError::Backend(e) => e.kind(),
            WorkerError::Engine(e) => e.kind(),
            WorkerError::Run(e) => e.kind(),
            WorkerError::Runtime(e) => e.kind(),
            WorkerError::Cluster(e) => e.kind(),
            WorkerError::Transfer(e) => e.kind(),
            WorkerError::Config { .. } => ErrorKind::InvalidArgument,
            WorkerError::GpuMemory { .. } => ErrorKind::ResourceExhausted,
            WorkerError::Grpc { .. } | WorkerError::Thread(_) => ErrorKind::Internal,
            WorkerError::Store(e) => e.kind(),
            WorkerError::Stalled(e) => e.kind(),
            WorkerError::EngineStopped => ErrorKind::Unavailable,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_worker_lacks_is_not_what_it_was_told_wrongly() {
        let why = || "why".to_owned();
        let file = ModelFileError::UnknownModel { spec: why(), hint: why() };
        for (error, kind) in [
            (file.into(), ErrorKind::NotFound),
            (WorkerError::Model(ModelError::Group(99)), ErrorKind::InvalidArgument),
            (WorkerError::Model(KernelError::Memory { bytes: 1 }.into()), ErrorKind::ResourceExhausted),
            (WorkerError::Backend(KernelError::NoDevice(why())), ErrorKind::Unavailable),
            (WorkerError::Config { field: "tp", value: why(), must: why() }, ErrorKind::InvalidArgument),
            (WorkerError::GpuMemory { needs: why(), has: why(), fix: "none" }, ErrorKind::ResourceExhausted),
            (RunError(why()).into(), ErrorKind::Internal),
            (WorkerError::Grpc { addr: SocketAddr::from(([127, 0, 0, 1], 1)), problem: why() }, ErrorKind::Internal),
            (WorkerError::EngineStopped, ErrorKind::Unavailable),
        ] {
            assert_eq!(error.kind(), kind, "{error}");
        }
    }
}
