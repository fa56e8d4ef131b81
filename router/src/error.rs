//! Errors of the router itself ([`RouterError`]), and of one request ([`RequestError`]).

use std::time::Duration;

use baton_policy::{Failure, Keep};
use baton_runtime::Bytes;
use baton_types::{BatonError, ErrorKind};

/// The router cannot start, or cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    /// Configuration, telemetry, or an address that is taken.
    #[error(transparent)]
    Runtime(#[from] baton_runtime::RuntimeError),
    /// A setting is 0 but must not be.
    #[error("{field} is 0; it must be above 0")]
    Zero {
        /// The setting.
        field: &'static str,
    },
    /// Only one placement predicts.
    #[error("reject_ttft and reject_itl need placement = predicted: the others predict nothing")]
    SloNeedsPrediction,
    /// KV stores are to keep blocks from no use on, or from one that is not counted.
    #[error("kv_store_min_uses is {0}; it must be 1 to {most}", most = Keep::MOST_USES)]
    KvStoreMinUses(u32),
    /// Workers cannot take more than all of their pool.
    #[error("hot_prefix_percent is {0}; it must be at most 100")]
    HotPrefixPercent(u32),
    /// No body of the allowed size would fit the memory for bodies.
    #[error("body_memory is {memory} and body_limit is {limit}; body_memory must be at least as large")]
    BodyMemory {
        /// Memory for all bodies.
        memory: Bytes,
        /// The largest body.
        limit: Bytes,
    },
    /// Two servers are set to the same address.
    #[error("{} and {} are both at {addr}; they must differ", flags.0, flags.1)]
    SameAddress {
        /// The address.
        addr: std::net::SocketAddr,
        /// The two flags.
        flags: (&'static str, &'static str),
    },
    /// No model is to be served.
    #[error("model is empty; it must name at least one model")]
    NoModel,
    /// Clients could not say which of two models they mean.
    #[error(
        "two models have the name {name:?}; give each its own with served_name: names separated by commas, models by semicolons"
    )]
    SameName {
        /// The name.
        name: String,
    },
    /// Clients need keys, or workers certificates, and the registry where clients are needs neither.
    #[error(
        "registry_on_grpc cannot be used together with keys_file or tls_cert: without a key or a certificate, clients could register workers and \
         so receive prompts"
    )]
    OpenRegistry,
    /// The file of API keys cannot be used.
    #[error("keys_file {}: {problem}", path.display())]
    Keys {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The model's files cannot be fetched or opened.
    #[error(transparent)]
    Model(#[from] baton_model_text::ModelFileError),
    /// The registry cannot be opened.
    #[error(transparent)]
    Cluster(#[from] baton_cluster::ClusterError),
    /// gRPC reflection cannot serve the descriptors compiled into this binary.
    #[error("gRPC reflection cannot be set up: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// The background thread that opens the model ended early.
    #[error("opening the model was interrupted: {0}")]
    Interrupted(String),
}

impl BatonError for RouterError {
    fn kind(&self) -> ErrorKind {
        match self {
            RouterError::Runtime(e) => e.kind(),
            RouterError::Model(e) => e.kind(),
            RouterError::Cluster(e) => e.kind(),
            RouterError::Zero { .. }
            | RouterError::SloNeedsPrediction
            | RouterError::KvStoreMinUses(_)
            | RouterError::HotPrefixPercent(_)
            | RouterError::BodyMemory { .. }
            | RouterError::SameAddress { .. }
            | RouterError::NoModel
            | RouterError::SameName { .. }
            | RouterError::OpenRegistry
            | RouterError::Keys { .. } => ErrorKind::InvalidArgument,
            RouterError::Reflection(_) | RouterError::Interrupted(_) => ErrorKind::Internal,
        }
    }
}

/// Why a request is refused or broken off, as told to its client.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{message}")]
pub struct RequestError {
    /// Decides HTTP status, gRPC code and the `type` of the OpenAI error object.
    pub kind: ErrorKind,
    /// What is wrong, and the fix if there is one.
    pub message: String,
    /// The request field at fault.
    pub param: Option<String>,
    /// A stable code for programs.
    pub code: Option<&'static str>,
    /// How long to wait before a retry.
    pub retry_after: Option<Duration>,
}

impl BatonError for RequestError {
    fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl RequestError {
    /// An error of this kind. Kinds that may pass (`ResourceExhausted`, `Unavailable`) tell the client to retry after 1 s.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> RequestError {
        let later = matches!(kind, ErrorKind::ResourceExhausted | ErrorKind::Unavailable);
        let retry_after = later.then_some(Duration::from_secs(1));
        RequestError { kind, message: message.into(), param: None, code: None, retry_after }
    }

    /// An error for a field whose value can never work.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> RequestError {
        RequestError { param: Some(param.into()), ..RequestError::new(ErrorKind::InvalidArgument, message) }
    }

    /// After how many whole seconds a retry makes sense, rounded up.
    pub(crate) fn retry_after_seconds(&self) -> Option<u64> {
        self.retry_after.map(|after| (after.as_secs_f64().ceil() as u64).max(1))
    }

    /// Adds a code for programs.
    pub fn code(self, code: &'static str) -> RequestError {
        RequestError { code: Some(code), ..self }
    }
}

impl From<baton_types::SamplingError> for RequestError {
    fn from(e: baton_types::SamplingError) -> RequestError {
        RequestError::invalid(e.field, e.to_string())
    }
}

impl From<Failure> for RequestError {
    fn from(failure: Failure) -> RequestError {
        let error = RequestError::new(failure.kind, failure.message);
        match failure.kind {
            // Of a placement alone: workers that are full say so without a time.
            ErrorKind::ResourceExhausted if failure.late => {
                RequestError { retry_after: failure.retry_after, ..error }.code("slo_missed")
            }
            _ => error,
        }
    }
}
