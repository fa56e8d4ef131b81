//! What a watcher knows of the cluster, through outages of the registry (I7). Pure: time comes in with each call.
//!
//! While the registry is away the members stay. When it is back it may have forgotten some that are alive and about to
//! register again (a restarted embedded registry starts empty), so members missing from its list are kept a little longer.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_types::WorkerId;

use crate::member::{MAX_MEMBERS, Member, View};

/// How long members survive that a returned registry does not know. Longer than a living member needs to register again.
pub const SETTLE: Duration = Duration::from_secs(10);

/// Members as of the registry's last list, and those it may have forgotten.
#[derive(Clone, Debug)]
pub struct Known {
    listed: BTreeMap<WorkerId, Member>,
    /// Known before the outage, missing from the registry since.
    kept: BTreeMap<WorkerId, Member>,
    keep_until: Option<Instant>,
    stale: bool,
    revision: u64,
    last_update: Option<Instant>,
}

impl Known {
    /// Nothing was heard yet.
    #[allow(clippy::new_without_default)] // It starts stale.
    pub fn new() -> Known {
        Known {
            listed: BTreeMap::new(),
            kept: BTreeMap::new(),
            keep_until: None,
            stale: true,
            revision: 0,
            last_update: None,
        }
    }

    /// The registry's whole list has come.
    pub fn list(&mut self, members: Vec<Member>, now: Instant) {
        let before = std::mem::take(&mut self.listed);
        self.listed = members.into_iter().map(|m| (m.id, m)).collect();
        let outage = std::mem::replace(&mut self.stale, false);
        if outage && !before.is_empty() {
            self.kept.extend(before.clone());
            while self.kept.len() > MAX_MEMBERS {
                self.kept.pop_first(); // I5
            }
            self.keep_until = Some(now + SETTLE);
        }
        self.kept.retain(|id, _| !self.listed.contains_key(id));
        self.last_update = Some(now);
        self.revision += u64::from(outage || before != self.listed);
    }

    /// The registry cannot be heard any more.
    pub fn lose(&mut self) {
        self.revision += u64::from(!self.stale);
        self.stale = true;
    }

    /// When [`Known::settle`] is due.
    pub fn settles_at(&self) -> Option<Instant> {
        self.keep_until
    }

    /// Lets go of kept members whose time is over; not during another outage.
    pub fn settle(&mut self, now: Instant) {
        if !self.stale && self.keep_until.is_some_and(|at| at <= now) {
            self.keep_until = None;
            self.revision += u64::from(!self.kept.is_empty());
            self.kept.clear();
        }
    }

    /// All members, kept ones too.
    pub fn view(&self) -> View {
        let mut members: Vec<Member> = self.listed.values().chain(self.kept.values()).cloned().collect();
        members.sort_by_key(|m| m.id);
        View { revision: self.revision, members, stale: self.stale, last_update: self.last_update }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::member::tests::member;

    fn ids(known: &Known) -> Vec<u64> {
        known.view().members.iter().map(|m| m.id.0).collect()
    }

    #[test]
    fn lists_replace_each_other_while_the_registry_is_heard() {
        let (mut known, t0) = (Known::new(), Instant::now());
        assert!(known.view().stale, "nothing was heard yet");
        known.list(vec![member(2), member(1)], t0);
        assert_eq!((ids(&known), known.view().stale, known.view().revision), (vec![1, 2], false, 1));
        known.list(vec![member(2)], t0);
        assert_eq!((ids(&known), known.view().revision), (vec![2], 2));
        known.list(vec![member(2)], t0);
        assert_eq!(known.view().revision, 2, "no change");
        assert_eq!(known.settles_at(), None);
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
        assert_eq!(ids(&known), [1, 3], "2 came back and then left");
        known.settle(t0 + SETTLE - Duration::from_nanos(1));
        assert_eq!(ids(&known), [1, 3]);
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
    }
}
