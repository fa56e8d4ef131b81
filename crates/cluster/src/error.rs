//! Everything that can go wrong with membership.

use baton_types::{BatonError, ErrorKind};

/// Errors of the registry and its clients.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum ClusterError {
    /// A registry specification that names none.
    #[error(
        "registry {spec:?}: {problem}; use http://host:port for the registry inside a router, or etcd://host:port,host:port/cluster"
    )]
    Spec {
        /// As given.
        spec: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A member's field that no registry takes.
    #[error("member.{field}: {problem}")]
    Member {
        /// Which field.
        field: &'static str,
        /// What is wrong and what is allowed.
        problem: String,
    },
    /// A lease duration out of range.
    #[error("ttl is {millis} ms; it must be between 1 s and 1 h")]
    Ttl {
        /// What was asked for.
        millis: u64,
    },
    /// The registry holds as many members as it can.
    #[error("the registry is full ({limit} members); remove workers or use another cluster")]
    Full {
        /// How many it holds.
        limit: usize,
    },
    /// The registry answered that it will not do this.
    #[error("the registry at {registry} refused: {problem}")]
    Refused {
        /// Its address.
        registry: String,
        /// Its words.
        problem: String,
    },
    /// The registry cannot be reached, or cannot answer now.
    #[error("the registry at {registry} is not available: {problem}")]
    Unavailable {
        /// Its address.
        registry: String,
        /// Why.
        problem: String,
    },
}

impl BatonError for ClusterError {
    fn kind(&self) -> ErrorKind {
        match self {
            ClusterError::Spec { .. } | ClusterError::Member { .. } | ClusterError::Ttl { .. } => {
                ErrorKind::InvalidArgument
            }
            ClusterError::Full { .. } => ErrorKind::ResourceExhausted,
            ClusterError::Refused { .. } => ErrorKind::FailedPrecondition,
            ClusterError::Unavailable { .. } => ErrorKind::Unavailable,
        }
    }
}
