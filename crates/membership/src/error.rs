//! Errors about a member, its ttl or a full registry.

use baton_types::{BatonError, ErrorKind};

/// Errors of membership itself, the same for every registry.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MembershipError {
    /// A member has a field that no registry accepts.
    #[error("member.{field}: {problem}")]
    Member {
        /// Which field.
        field: &'static str,
        /// What is wrong, and what is allowed.
        problem: String,
    },
    /// A lease duration out of range.
    #[error("ttl is {millis} ms; it must be between 1 s and 1 h")]
    Ttl {
        /// The duration asked for, in milliseconds.
        millis: u64,
    },
    /// The registry holds its maximum number of members.
    #[error("the registry is full ({limit} members); remove workers or use another cluster")]
    Full {
        /// That maximum.
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
