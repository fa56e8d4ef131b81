//! The members a watcher knows, also through outages of the registry (I7). Time is an argument of each call.
//!
//! While the registry is away, the members stay. A member that is missing from the registry's list may also still be alive:
//!
//! - Its lease may have run out because it could not reach the registry.
//! - A registry that comes back may have forgotten it, and it is about to register again.
//!
//! So members that vanish from the list are kept for [`SETTLE`] longer, unless the registry says that they have left. Draining members and
//! supervisors are kept only if they vanished in an outage. Connections to kept workers tell whether these still work.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use baton_types::WorkerId;

use crate::member::{List, MAX_MEMBERS, Member, Role, View};

/// How long members that vanished from the registry are kept. Longer than a living member needs to register again.
pub const SETTLE: Duration = Duration::from_secs(10);

/// The members that one watcher knows.
#[derive(Clone, Debug)]
pub struct Known {
    /// Members on the registry's latest list.
    listed: BTreeMap<WorkerId, Member>,
    /// Members that vanished from the list, each with the time until which it is kept.
    kept: BTreeMap<WorkerId, (Member, Instant)>,
    stale: bool,
    revision: u64,
    last_update: Option<Instant>,
}

impl Known {
    /// A watcher that has not heard from its registry yet.
    #[allow(clippy::new_without_default)] // `new` is clearer at the call than a default.
    pub fn new() -> Known {
        Known { listed: BTreeMap::new(), kept: BTreeMap::new(), stale: true, revision: 0, last_update: None }
    }

    /// Takes in the registry's whole list.
    pub fn list(&mut self, list: impl Into<List>, now: Instant) {
        let List { members, left } = list.into();
        let left: BTreeSet<WorkerId> = left.into_iter().collect();
        let before = std::mem::take(&mut self.listed);
        self.listed = members.into_iter().map(|m| (m.id, m)).collect();
        let outage = std::mem::replace(&mut self.stale, false);
        let until = now + SETTLE;
        if outage {
            // No member could register during the outage, so each gets the full time again.
            self.kept.values_mut().for_each(|(_, kept)| *kept = until);
        }
        let vanished = before.iter().filter(|(id, _)| !self.listed.contains_key(id) && !left.contains(id));
        let kept = vanished.filter(|(_, m)| outage || !m.draining && m.role != Role::Supervisor);
        self.kept.extend(kept.map(|(id, m)| (*id, (m.clone(), until))));
        let kept = self.kept.len();
        self.kept.retain(|id, _| !self.listed.contains_key(id) && !left.contains(id));
        let fewer = self.kept.len() < kept;
        while self.kept.len() > MAX_MEMBERS {
            self.kept.pop_first(); // I5
        }
        self.last_update = Some(now);
        self.revision += u64::from(outage || fewer || before != self.listed);
    }

    /// Records that the registry no longer responds.
    pub fn lose(&mut self) {
        self.revision += u64::from(!self.stale);
        self.stale = true;
    }

    /// When [`Known::settle`] is due.
    pub fn settles_at(&self) -> Option<Instant> {
        self.kept.values().map(|(_, until)| *until).min()
    }

    /// Drops kept members whose time is over. Drops none during an outage.
    pub fn settle(&mut self, now: Instant) {
        if self.stale {
            return;
        }
        let before = self.kept.len();
        self.kept.retain(|_, (_, until)| *until > now);
        self.revision += u64::from(self.kept.len() != before);
    }

    /// The members as they are known now.
    pub fn view(&self) -> View {
        let kept = self.kept.values().map(|(member, _)| member);
        let mut members: Vec<Member> = self.listed.values().chain(kept).cloned().collect();
        members.sort_by_key(|m| m.id);
        View { revision: self.revision, members, left: Vec::new(), stale: self.stale, last_update: self.last_update }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::member;

    fn ids(known: &Known) -> Vec<u64> {
        known.view().members.iter().map(|m| m.id.0).collect()
    }

    #[test]
    fn lists_replace_each_other_while_the_registry_is_heard() {
        let (mut known, t0) = (Known::new(), Instant::now());
        assert!(known.view().stale, "nothing was heard yet");
        known.list(vec![member(2), member(1)], t0);
        assert_eq!((ids(&known), known.view().stale, known.view().revision), (vec![1, 2], false, 1));
        let draining = Member { draining: true, ..member(1) };
        known.list(vec![member(2), draining], t0);
        known.list(vec![member(2)], t0);
        assert_eq!((ids(&known), known.view().revision), (vec![2], 3), "it has drained");
        known.list(vec![member(2)], t0);
        assert_eq!(known.view().revision, 3, "no change");
        assert_eq!(known.settles_at(), None);
    }

    /// I7: a worker that cannot reach the registry loses its lease, but may still serve.
    #[test]
    fn a_worker_that_vanishes_without_draining_is_kept_a_little() {
        let (mut known, t0) = (Known::new(), Instant::now());
        let supervisor = Member { role: Role::Supervisor, ..member(3) };
        known.list(vec![member(1), member(2), supervisor], t0);
        known.list(vec![member(2)], t0);
        assert_eq!(
            (ids(&known), known.settles_at()),
            (vec![1, 2], Some(t0 + SETTLE)),
            "no requests run on a supervisor"
        );
        known.list(vec![member(1)], t0 + SETTLE / 2);
        known.settle(t0 + SETTLE);
        assert_eq!(ids(&known), [1, 2], "1 is back, and 2 has time left");
        known.settle(t0 + SETTLE * 3 / 2);
        assert_eq!(ids(&known), [1]);
    }

    /// The list before may have come before it was draining.
    #[test]
    fn a_worker_that_has_left_is_not_kept() {
        let (mut known, t0) = (Known::new(), Instant::now());
        let left = |members, left| List { members, left };
        known.list(vec![member(1), member(2)], t0);
        known.list(left(vec![member(2)], vec![WorkerId(1)]), t0);
        assert_eq!((ids(&known), known.view().revision), (vec![2], 2));
        known.list(left(vec![], vec![WorkerId(1)]), t0);
        assert_eq!(ids(&known), [2], "it vanished");
        known.list(left(vec![], vec![WorkerId(1), WorkerId(2)]), t0);
        assert_eq!((ids(&known), known.view().revision), (vec![], 4), "it was leaving, and its lease ran out first");
        known.list(left(vec![member(3)], vec![WorkerId(3)]), t0);
        assert_eq!(ids(&known), [3], "who is on the list is there");
        known.lose();
        known.list(left(vec![], vec![WorkerId(3)]), t0);
        assert_eq!(ids(&known), [0; 0], "nor is it kept after an outage");
    }

    #[test]
    fn the_last_known_view_survives_an_outage_and_an_empty_return() {
        // I7
        let (mut known, t0) = (Known::new(), Instant::now());
        known.list(vec![member(1), member(2), member(3)], t0);
        known.lose();
        known.lose();
        assert_eq!((ids(&known), known.view().stale, known.view().revision), (vec![1, 2, 3], true, 2));
        known.list(vec![], t0);
        assert_eq!((ids(&known), known.view().stale), (vec![1, 2, 3], false), "a restarted registry knows nobody");
        known.list(vec![member(2)], t0);
        assert_eq!(ids(&known), [1, 2, 3]);
        known.list(vec![], t0);
        assert_eq!(ids(&known), [1, 2, 3], "2 came back, and may do so again");
        known.settle(t0 + SETTLE - Duration::from_nanos(1));
        assert_eq!(ids(&known), [1, 2, 3]);
        let revision = known.view().revision;
        known.settle(t0 + SETTLE);
        assert_eq!((ids(&known), known.view().revision), (vec![], revision + 1));
        assert_eq!(known.settles_at(), None);
    }

    #[test]
    fn nothing_is_let_go_in_the_middle_of_a_second_outage() {
        let (mut known, t0) = (Known::new(), Instant::now());
        known.list(vec![member(1)], t0);
        known.lose();
        known.list(vec![], t0);
        known.lose();
        known.settle(t0 + SETTLE * 2);
        assert_eq!(ids(&known), [1]);
        // Member 1 is not dropped at the end of the outage either: it has had no time to register.
        known.list(vec![], t0 + SETTLE * 2);
        known.settle(t0 + SETTLE * 2);
        assert_eq!(ids(&known), [1]);
        known.settle(t0 + SETTLE * 3);
        assert_eq!(ids(&known), [0; 0]);
    }
}
