//! The errors of cluster membership.

use baton_membership::MembershipError;
use baton_types::{BatonError, ErrorKind};

/// Errors of the registry and its clients.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum ClusterError {
    /// A registry specification that names no registry.
    #[error(
        "registry {spec:?}: {problem}; use http://host:port for the registry inside a router, or etcd://host:port,host:port/cluster, with TLS \
         https:// or etcds://"
    )]
    Spec {
        /// The specification as given.
        spec: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// TLS needs certificates.
    #[error("registry {spec:?} has TLS; set tls_cert, tls_key and tls_ca too")]
    Tls {
        /// The specification as given.
        spec: String,
    },
    /// A member or ttl that no registry takes, or a registry that is full.
    #[error(transparent)]
    Membership(#[from] MembershipError),
    /// The registry answered that it will not do this.
    #[error("the registry at {registry} refused: {problem}")]
    Refused {
        /// The registry's address.
        registry: String,
        /// The kind of error.
        kind: ErrorKind,
        /// The registry's message.
        problem: String,
    },
    /// The registry cannot be reached, or cannot answer now.
    #[error("the registry at {registry} is not available: {problem}")]
    Unavailable {
        /// The registry's address.
        registry: String,
        /// Why.
        problem: String,
    },
}

impl BatonError for ClusterError {
    fn kind(&self) -> ErrorKind {
        match self {
            ClusterError::Spec { .. } | ClusterError::Tls { .. } => ErrorKind::InvalidArgument,
            ClusterError::Membership(e) => e.kind(),
            ClusterError::Refused { kind, .. } => *kind,
            ClusterError::Unavailable { .. } => ErrorKind::Unavailable,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_has_its_kind() {
        let (registry, problem) = ("http://router:8002".to_owned(), "why".to_owned());
        for (error, kind) in [
            (ClusterError::Spec { spec: "ftp://".to_owned(), problem: "no registry" }, ErrorKind::InvalidArgument),
            (ClusterError::Tls { spec: "https://a:1".to_owned() }, ErrorKind::InvalidArgument),
            (MembershipError::Full { limit: 1 }.into(), ErrorKind::ResourceExhausted),
            (
                ClusterError::Refused {
                    registry: registry.clone(),
                    kind: ErrorKind::InvalidArgument,
                    problem: problem.clone(),
                },
                ErrorKind::InvalidArgument,
            ),
            (ClusterError::Unavailable { registry, problem }, ErrorKind::Unavailable),
        ] {
            assert_eq!(error.kind(), kind, "{error}");
        }
    }
}
