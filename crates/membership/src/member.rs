//! A member, and the view of all of them.

use std::time::{Duration, Instant};

use baton_types::WorkerId;
use serde::{Deserialize, Serialize};

use crate::error::MembershipError;

/// Most members that one registry holds (I5).
pub const MAX_MEMBERS: usize = 16_384;
/// Most bytes of each text field of a member (I5).
pub const MAX_TEXT: usize = 256;
/// Most bytes of a message with a whole view: [`MAX_MEMBERS`] members whose texts are as long as may be.
pub const MAX_VIEW: usize = 16 << 20;

const TTL: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(3600);

/// A member's role.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// A prefill worker: computes prompts.
    Prefill,
    /// A decode worker: generates answers.
    Decode,
    /// A supervisor: owns processes (`baton up`).
    Supervisor,
    /// A KV store: keeps KV that workers computed, and computes none.
    #[serde(rename = "kv-store")]
    KvStore,
}

impl Role {
    /// The role's name in logs and metric labels.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Supervisor => "supervisor",
            Role::KvStore => "kv-store",
        }
    }
}

/// One process of the cluster.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Member {
    /// Random for each process start. A worker that restarts on the same address is another worker.
    pub id: WorkerId,
    /// Its role.
    pub role: Role,
    /// `http://host:port` of its gRPC server; `https://` if it takes only TLS.
    pub grpc: String,
    /// `http://host:port` of its admin endpoint.
    pub admin: String,
    /// Name of the model it serves; empty for a supervisor.
    pub model: String,
    /// Fingerprint of its KV layout without the data type. Handoffs are possible only between equal fingerprints.
    pub layout: u64,
    /// Number of blocks of its KV pool.
    pub blocks: u32,
    /// Tokens per block.
    pub block_size: u32,
    /// Most tokens that one sequence has in the pool at once; 0: all its tokens.
    pub window_tokens: u32,
    /// Most sequences it runs at once; 0: unknown, as of workers of older versions.
    #[serde(default)]
    pub max_running: u32,
    /// Tokens of the longest sequence it takes; 0: unknown.
    pub context_tokens: u32,
    /// True once the member takes no new requests.
    pub draining: bool,
    /// A prefill worker that takes prompts whose target follows later. Workers of older versions do not.
    #[serde(default)]
    pub late_targets: bool,
    /// Fingerprint of its KV layout with the element type: workers with equal ones exchange prefixes. 0: it exchanges none, as workers of
    /// older versions.
    #[serde(default)]
    pub exchanges: u64,
    /// Mark of the secret from which it names blocks; 0: it has none.
    #[serde(default)]
    pub kv_secret: u64,
}

impl Member {
    /// Checks every field; the first bad one is the error.
    pub fn validate(&self) -> Result<(), MembershipError> {
        let bad = |field, problem: String| Err(MembershipError::Member { field, problem });
        if self.id.0 == 0 {
            return bad("id", "is 0; it must be random and not 0".to_owned());
        }
        for (field, text) in [("grpc", &self.grpc), ("admin", &self.admin), ("model", &self.model)] {
            if text.len() > MAX_TEXT {
                return bad(field, format!("has {} bytes; at most {MAX_TEXT} are allowed", text.len()));
            }
        }
        for (field, address) in [("grpc", &self.grpc), ("admin", &self.admin)] {
            let host = address.strip_prefix("http://").or_else(|| address.strip_prefix("https://"));
            if !host.is_some_and(is_host_port) {
                return bad(field, format!("is {address:?}; it must be http://host:port or https://host:port"));
            }
        }
        Ok(())
    }

    /// Ok when a lease on this member can continue with `next` as the member's new value.
    pub fn check_change(&self, next: &Member) -> Result<(), MembershipError> {
        next.validate()?;
        if next.id != self.id {
            let problem = format!("is {}, but this lease is for {}; register the other member", next.id, self.id);
            return Err(MembershipError::Member { field: "id", problem });
        }
        Ok(())
    }
}

/// Ok when `ttl` is within the range that every registry supports.
pub fn check_ttl(ttl: Duration) -> Result<(), MembershipError> {
    if TTL.contains(&ttl) {
        return Ok(());
    }
    Err(MembershipError::Ttl { millis: u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX) })
}

/// True for `name:port`, `1.2.3.4:port` and `[::1]:port`.
pub fn is_host_port(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let name = match host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
        Some(v6) => v6.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b)),
    };
    name && port.bytes().all(|b| b.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|p| p != 0)
}

/// All members, as far as this process knows.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct View {
    /// Grows by one with every change this process sees. Comparable only within one process.
    pub revision: u64,
    /// Sorted by id.
    pub members: Vec<Member>,
    /// In a registry's own view: who has left of itself in the last minute. Others may not see each change, and so may not see that a member
    /// was draining before it was gone.
    pub left: Vec<WorkerId>,
    /// True while the registry does not respond: this is the last known view (I7).
    pub stale: bool,
    /// In a watcher's view, when the registry's last list came; `None`: never. In a registry's own view, when it last changed.
    pub last_update: Option<Instant>,
}

/// What a registry says: everybody.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct List {
    /// All members.
    pub members: Vec<Member>,
    /// Who has left of itself lately.
    pub left: Vec<WorkerId>,
}

impl From<Vec<Member>> for List {
    /// A list on which nobody has left.
    fn from(members: Vec<Member>) -> List {
        List { members, left: Vec::new() }
    }
}

impl View {
    /// The member with this id.
    pub fn get(&self, id: WorkerId) -> Option<&Member> {
        self.members.binary_search_by_key(&id, |m| m.id).ok().map(|i| &self.members[i])
    }

    /// Members of one role that take new requests.
    pub fn serving(&self, role: Role) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(move |m| m.role == role && !m.draining)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::member;

    #[test]
    fn a_bad_member_names_its_field() {
        assert_eq!(member(1).validate(), Ok(()));
        let cases = [
            ("id", member(0)),
            ("grpc", Member { grpc: "127.0.0.1:9001".to_owned(), ..member(1) }),
            ("admin", Member { admin: "http://host".to_owned(), ..member(1) }),
            ("model", Member { model: "m".repeat(MAX_TEXT + 1), ..member(1) }),
        ];
        for (want, bad) in cases {
            match bad.validate() {
                Err(MembershipError::Member { field, .. }) => assert_eq!(field, want),
                other => panic!("{want}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_lease_stays_with_its_member() {
        assert_eq!(member(1).check_change(&Member { draining: true, ..member(1) }), Ok(()));
        assert!(member(1).check_change(&member(2)).is_err(), "another id");
        assert!(member(1).check_change(&Member { grpc: String::new(), ..member(1) }).is_err());
    }

    #[test]
    fn lease_durations_are_bounded() {
        assert!(check_ttl(Duration::from_secs(1)).is_ok());
        assert!(check_ttl(Duration::from_millis(999)).is_err());
        assert!(check_ttl(Duration::MAX).is_err());
    }

    #[test]
    fn a_view_finds_members_by_id_and_by_role() {
        let draining = Member { draining: true, ..member(7) };
        let view = View { members: vec![member(3), draining, member(9)], ..View::default() };
        assert_eq!(view.get(WorkerId(7)).map(|m| m.draining), Some(true));
        assert_eq!(view.get(WorkerId(4)), None);
        assert_eq!(view.serving(Role::Decode).map(|m| m.id.0).collect::<Vec<_>>(), [3, 9]);
        assert_eq!(view.serving(Role::Prefill).count(), 0);
    }
}
