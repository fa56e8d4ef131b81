//! What can go wrong: when the router starts ([`RouterError`]), and with one request ([`RequestError`]).

use std::time::Duration;

use baton_policy::Failure;
use baton_types::{BatonError, ErrorKind};

/// The router cannot start, or cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    /// Configuration, telemetry, an address that is taken.
    #[error(transparent)]
    Runtime(#[from] baton_runtime::RuntimeError),
    /// A setting that cannot be 0.
    #[error("{field} is 0; it must be above 0")]
    Zero {
        /// Which.
        field: &'static str,
    },
    /// Both servers are to listen at one address.
    #[error("--http and --grpc are both at {addr}; they must differ")]
    SameAddress {
        /// Where.
        addr: std::net::SocketAddr,
    },
    /// The model's files.
    #[error(transparent)]
    Model(#[from] baton_model_text::ModelFileError),
    /// The registry.
    #[error(transparent)]
    Cluster(#[from] baton_cluster::ClusterError),
    /// Descriptors compiled into this binary cannot be served.
    #[error("gRPC reflection cannot be set up: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// A background thread ended before its work.
    #[error("opening the model was interrupted: {0}")]
    Interrupted(String),
}

impl BatonError for RouterError {
    fn kind(&self) -> ErrorKind {
        match self {
            RouterError::Runtime(e) => e.kind(),
            RouterError::Model(e) => e.kind(),
            RouterError::Cluster(e) => e.kind(),
            RouterError::Zero { .. } | RouterError::SameAddress { .. } => ErrorKind::InvalidArgument,
            RouterError::Reflection(_) | RouterError::Interrupted(_) => ErrorKind::Internal,
        }
    }
}

/// Why a request is refused or broken off, as its client is told.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{message}")]
pub struct RequestError {
    /// Decides HTTP status, gRPC code and the `type` of the OpenAI error object.
    pub kind: ErrorKind,
    /// What was wrong, and the fix where there is one.
    pub message: String,
    /// The field it is about.
    pub param: Option<String>,
    /// A stable word for programs.
    pub code: Option<&'static str>,
    /// When it makes sense to come back.
    pub retry_after: Option<Duration>,
}

impl BatonError for RequestError {
    fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl RequestError {
    /// An error of this kind. Those that another moment may cure tell the client when to come back.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> RequestError {
        let later = matches!(kind, ErrorKind::ResourceExhausted | ErrorKind::Unavailable);
        let retry_after = later.then_some(Duration::from_secs(1));
        RequestError { kind, message: message.into(), param: None, code: None, retry_after }
    }

    /// A field with a value that can never work.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> RequestError {
        RequestError { param: Some(param.into()), ..RequestError::new(ErrorKind::InvalidArgument, message) }
    }

    /// With a word for programs.
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
        RequestError::new(failure.kind, failure.message)
    }
}
