//! The embedded registry's members and their leases. Pure: time comes in with each call.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_types::WorkerId;

use crate::error::MembershipError;
use crate::member::{MAX_MEMBERS, Member, check_ttl};

/// Members, each under a lease; at most [`MAX_MEMBERS`] (I5).
#[derive(Clone, Debug, Default)]
pub struct Store {
    entries: BTreeMap<WorkerId, Entry>,
}

#[derive(Clone, Debug)]
struct Entry {
    member: Member,
    expires: Instant,
}

impl Store {
    /// Adds, changes or renews a member. True when the members changed.
    pub fn put(&mut self, member: Member, ttl: Duration, now: Instant) -> Result<bool, MembershipError> {
        member.validate()?;
        check_ttl(ttl)?;
        let known = self.entries.get(&member.id).map(|e| &e.member);
        if known.is_none() && self.entries.len() >= MAX_MEMBERS {
            return Err(MembershipError::Full { limit: MAX_MEMBERS });
        }
        let changed = known != Some(&member);
        self.entries.insert(member.id, Entry { member, expires: now + ttl });
        Ok(changed)
    }

    /// True when the member was there.
    pub fn remove(&mut self, id: WorkerId) -> bool {
        self.entries.remove(&id).is_some()
    }

    /// Removes members whose lease is over, and returns them.
    pub fn expire(&mut self, now: Instant) -> Vec<Member> {
        let over: Vec<WorkerId> = self.entries.iter().filter(|(_, e)| e.expires <= now).map(|(id, _)| *id).collect();
        over.iter().filter_map(|id| self.entries.remove(id)).map(|e| e.member).collect()
    }

    /// When the next lease is over, unless renewed.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.entries.values().map(|e| e.expires).min()
    }

    /// All members, by id.
    pub fn members(&self) -> Vec<Member> {
        self.entries.values().map(|e| e.member.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::member::tests::member;

    const TTL: Duration = Duration::from_secs(10);

    #[test]
    fn a_lease_is_over_when_its_time_has_passed_and_not_before() {
        let (mut store, t0) = (Store::default(), Instant::now());
        assert_eq!(store.put(member(1), TTL, t0), Ok(true));
        assert_eq!(store.put(member(2), TTL * 2, t0), Ok(true));
        assert_eq!(store.next_expiry(), Some(t0 + TTL));
        assert!(store.expire(t0 + TTL - Duration::from_nanos(1)).is_empty());
        assert_eq!(store.expire(t0 + TTL), [member(1)]);
        assert_eq!(store.members(), [member(2)]);
    }

    #[test]
    fn a_renewal_is_no_change_and_an_update_is() {
        let (mut store, t0) = (Store::default(), Instant::now());
        assert_eq!(store.put(member(1), TTL, t0), Ok(true));
        assert_eq!(store.put(member(1), TTL, t0 + TTL / 2), Ok(false));
        assert!(store.expire(t0 + TTL).is_empty(), "renewed");
        let draining = Member { draining: true, ..member(1) };
        assert_eq!(store.put(draining.clone(), TTL, t0 + TTL), Ok(true));
        assert_eq!(store.members(), [draining]);
        assert!(store.remove(WorkerId(1)));
        assert!(!store.remove(WorkerId(1)));
        assert_eq!(store.next_expiry(), None);
    }

    #[test]
    fn the_store_is_bounded() {
        let (mut store, t0) = (Store::default(), Instant::now());
        for id in 1..=MAX_MEMBERS as u64 {
            store.put(member(id), TTL, t0).unwrap();
        }
        assert_eq!(store.put(member(u64::MAX), TTL, t0), Err(MembershipError::Full { limit: MAX_MEMBERS }));
        assert_eq!(store.put(member(1), TTL, t0), Ok(false), "members that are in can renew");
        assert!(store.put(member(0), TTL, t0).is_err());
        assert!(store.put(member(1), Duration::ZERO, t0).is_err());
    }
}
