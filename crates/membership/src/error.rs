//! What is wrong with a member, a ttl or a registry's room for them.

use baton_types::{BatonError, ErrorKind};

/// Errors of membership itself, whatever the registry.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MembershipError {
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
}

impl BatonError for MembershipError {
    fn kind(&self) -> ErrorKind {
        match self {
            MembershipError::Member { .. } | MembershipError::Ttl { .. } => ErrorKind::InvalidArgument,
            MembershipError::Full { .. } => ErrorKind::ResourceExhausted,
        }
    }
}
