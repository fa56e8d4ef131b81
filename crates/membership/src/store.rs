//! A registry's members and their leases. Time is an argument of each call.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use baton_types::WorkerId;

use crate::error::MembershipError;
use crate::member::{MAX_MEMBERS, Member, Role, View, check_ttl};

/// How long the ids of members that were removed are remembered. Longer than a renewal can be on its way.
const LEFT: Duration = Duration::from_secs(60);

/// Members, each under a lease. At most [`MAX_MEMBERS`] (I5).
#[derive(Clone, Debug)]
pub struct Store {
    entries: BTreeMap<WorkerId, Entry>,
    /// Members that were removed, oldest first, each with the time until which it is remembered: a renewal that their process sent before may
    /// arrive later. No process has the id of another.
    left: VecDeque<(WorkerId, Instant)>,
    revision: u64,
    last_change: Instant,
}

#[derive(Clone, Debug)]
struct Entry {
    member: Member,
    expires: Instant,
}

impl Store {
    /// A registry without members.
    pub fn new(now: Instant) -> Store {
        Store { entries: BTreeMap::new(), left: VecDeque::new(), revision: 0, last_change: now }
    }

    /// Adds, changes or renews a member. True when this is more than a renewal: the member is new or has a new value.
    pub fn put(&mut self, member: Member, ttl: Duration, now: Instant) -> Result<bool, MembershipError> {
        member.validate()?;
        check_ttl(ttl)?;
        self.left.retain(|(_, until)| *until > now);
        if self.left.iter().any(|(id, _)| *id == member.id) {
            let problem = format!("{} has left, and an id is not used again", member.id);
            return Err(MembershipError::Member { field: "id", problem });
        }
        let known = self.entries.get(&member.id).map(|e| &e.member);
        if known.is_none() && self.entries.len() >= MAX_MEMBERS {
            return Err(MembershipError::Full { limit: MAX_MEMBERS });
        }
        let changed = known != Some(&member);
        self.entries.insert(member.id, Entry { member, expires: now + ttl });
        self.note(changed, now);
        Ok(changed)
    }

    /// Removes a member, which then cannot register again. True when this is news: it was registered, or its lease had run out.
    pub fn remove(&mut self, id: WorkerId, now: Instant) -> bool {
        let known = self.left.iter().any(|(left, _)| *left == id);
        if known {
            return false;
        }
        if self.left.len() >= MAX_MEMBERS {
            self.left.pop_front(); // I5
        }
        self.left.push_back((id, now + LEFT));
        self.entries.remove(&id);
        self.note(true, now);
        true
    }

    /// Removes the members whose lease is over, and returns them.
    pub fn expire(&mut self, now: Instant) -> Vec<Member> {
        let over: Vec<WorkerId> = self.entries.iter().filter(|(_, e)| e.expires <= now).map(|(id, _)| *id).collect();
        self.note(!over.is_empty(), now);
        over.iter().filter_map(|id| self.entries.remove(id)).map(|e| e.member).collect()
    }

    /// When the next lease ends, unless it is renewed.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.entries.values().map(|e| e.expires).min()
    }

    /// The role of a member.
    pub fn role(&self, id: WorkerId) -> Option<Role> {
        self.entries.get(&id).map(|e| e.member.role)
    }

    /// All members, sorted by id. The revision grows by one with every call that changes members.
    pub fn view(&self) -> View {
        let members = self.entries.values().map(|e| e.member.clone()).collect();
        let left = self.left.iter().map(|(id, _)| *id).collect();
        View { revision: self.revision, members, left, stale: false, last_update: Some(self.last_change) }
    }

    fn note(&mut self, changed: bool, now: Instant) {
        if changed {
            self.revision += 1;
            self.last_change = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::member;

    const TTL: Duration = Duration::from_secs(10);

    fn store() -> (Store, Instant) {
        let now = Instant::now();
        (Store::new(now), now)
    }

    #[test]
    fn the_view_says_when_it_changed() {
        let (mut store, t0) = store();
        assert_eq!((store.view().revision, store.view().last_update), (0, Some(t0)));
        store.put(member(1), TTL, t0 + TTL / 2).unwrap();
        store.put(member(1), TTL, t0 + TTL).unwrap();
        store.expire(t0 + TTL);
        assert_eq!(
            (store.view().revision, store.view().last_update),
            (1, Some(t0 + TTL / 2)),
            "renewals change nothing"
        );
        store.expire(t0 + TTL * 2);
        assert_eq!((store.view().revision, store.view().last_update), (2, Some(t0 + TTL * 2)));
        // Watchers may still keep it.
        assert!(store.remove(WorkerId(1), t0 + TTL * 3));
        assert_eq!((store.view().revision, store.view().left), (3, vec![WorkerId(1)]));
        assert!(!store.remove(WorkerId(1), t0 + TTL * 3));
    }

    #[test]
    fn a_lease_is_over_when_its_time_has_passed_and_not_before() {
        let (mut store, t0) = store();
        assert_eq!(store.put(member(1), TTL, t0), Ok(true));
        assert_eq!(store.put(member(2), TTL * 2, t0), Ok(true));
        assert_eq!(store.next_expiry(), Some(t0 + TTL));
        assert!(store.expire(t0 + TTL - Duration::from_nanos(1)).is_empty());
        assert_eq!(store.expire(t0 + TTL), [member(1)]);
        assert_eq!(store.view().members, [member(2)]);
    }

    #[test]
    fn a_renewal_is_no_change_and_an_update_is() {
        let (mut store, t0) = store();
        assert_eq!(store.put(member(1), TTL, t0), Ok(true));
        assert_eq!(store.put(member(1), TTL, t0 + TTL / 2), Ok(false));
        assert!(store.expire(t0 + TTL).is_empty(), "renewed");
        let draining = Member { draining: true, ..member(1) };
        assert_eq!(store.put(draining.clone(), TTL, t0 + TTL), Ok(true));
        assert_eq!(store.view().members, [draining]);
        assert!(store.remove(WorkerId(1), t0));
        assert!(!store.remove(WorkerId(1), t0));
        assert_eq!(store.next_expiry(), None);
    }

    #[test]
    fn a_renewal_that_arrives_after_its_member_has_left_brings_it_not_back() {
        let (mut store, t0) = store();
        store.put(member(1), TTL, t0).unwrap();
        store.remove(WorkerId(1), t0);
        // Nor does the first registration, if it was overtaken.
        store.remove(WorkerId(2), t0);
        for id in [1, 2] {
            let refused = store.put(member(id), TTL, t0 + LEFT / 2).unwrap_err();
            assert!(matches!(refused, MembershipError::Member { field: "id", .. }), "{refused}");
        }
        assert_eq!(store.view().members, []);
        store.put(member(1), TTL, t0 + LEFT).unwrap();
        for id in 0..2 * MAX_MEMBERS as u64 {
            store.remove(WorkerId(1000 + id), t0 + LEFT);
        }
        assert_eq!(store.left.len(), MAX_MEMBERS, "I5");
    }

    #[test]
    fn the_store_is_bounded() {
        let (mut store, t0) = store();
        for id in 1..=MAX_MEMBERS as u64 {
            store.put(member(id), TTL, t0).unwrap();
        }
        assert_eq!(store.put(member(u64::MAX), TTL, t0), Err(MembershipError::Full { limit: MAX_MEMBERS }));
        assert_eq!(store.put(member(1), TTL, t0), Ok(false), "members that are in can renew");
        assert!(store.put(member(0), TTL, t0).is_err());
        assert!(store.put(member(1), Duration::ZERO, t0).is_err());
    }
}
