//! The view of a watcher that starts with members that an earlier process saved (I7).
//!
//! The registry may be away, or may have lost its members together with the earlier process. So the saved members count as known before an
//! outage: they stay until the registry answers, and [`SETTLE`] longer. After that the registry's own view is passed on.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use baton_types::WorkerId;

use crate::known::SETTLE;
use crate::member::{Member, View};

/// Saved members, and what the registry said since.
#[derive(Debug)]
pub struct Restored {
    /// Saved members that the registry has not listed.
    saved: BTreeMap<WorkerId, Member>,
    /// When they are dropped; None while the registry is away.
    until: Option<Instant>,
    heard: Arc<View>,
}

impl Restored {
    /// A watcher that knows these members, and has not heard from its registry.
    pub fn new(saved: Vec<Member>) -> Restored {
        let saved = saved.into_iter().map(|member| (member.id, member)).collect();
        Restored { saved, until: None, heard: Arc::new(View { stale: true, ..View::default() }) }
    }

    /// Takes in a view of the registry.
    pub fn hear(&mut self, view: Arc<View>, now: Instant) {
        self.saved.retain(|id, _| view.get(*id).is_none());
        self.until = match view.stale || self.saved.is_empty() {
            true => None,
            false => self.until.or(Some(now + SETTLE)),
        };
        self.heard = view;
        self.settle(now);
    }

    /// When [`Restored::settle`] is due.
    pub fn settles_at(&self) -> Option<Instant> {
        self.until
    }

    /// Drops saved members whose time is over.
    pub fn settle(&mut self, now: Instant) {
        if self.until.is_some_and(|until| until <= now) {
            self.saved.clear();
            self.until = None;
        }
    }

    /// The members as they are known now.
    pub fn view(&self) -> Arc<View> {
        if self.saved.is_empty() {
            return Arc::clone(&self.heard);
        }
        let mut members: Vec<Member> = self.heard.members.iter().chain(self.saved.values()).cloned().collect();
        members.sort_by_key(|m| m.id);
        Arc::new(View { members, ..View::clone(&self.heard) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::member;

    fn heard(ids: &[u64], stale: bool) -> Arc<View> {
        Arc::new(View { members: ids.iter().map(|&id| member(id)).collect(), stale, ..View::default() })
    }

    fn ids(restored: &Restored) -> (Vec<u64>, bool) {
        let view = restored.view();
        (view.members.iter().map(|m| m.id.0).collect(), view.stale)
    }

    #[test]
    fn saved_members_serve_until_the_registry_answers_and_a_little_longer() {
        // I7
        let now = Instant::now();
        let mut restored = Restored::new(vec![member(1), member(2)]);
        assert_eq!(ids(&restored), (vec![1, 2], true));
        restored.hear(heard(&[], true), now);
        assert_eq!((ids(&restored), restored.settles_at()), ((vec![1, 2], true), None), "it is away");
        restored.hear(heard(&[], false), now);
        assert_eq!(ids(&restored), (vec![1, 2], false), "it has lost its members");
        restored.hear(heard(&[2, 3], false), now + SETTLE / 2);
        assert_eq!(ids(&restored), (vec![1, 2, 3], false));
        assert_eq!(restored.settles_at(), Some(now + SETTLE));
        restored.settle(now + SETTLE);
        assert_eq!((ids(&restored), restored.settles_at()), ((vec![2, 3], false), None));
        // The registry's own view keeps what vanishes, not this one.
        restored.hear(heard(&[3], false), now + SETTLE);
        assert_eq!(ids(&restored), (vec![3], false));
        restored.hear(heard(&[3], true), now + SETTLE);
        assert_eq!(ids(&restored), (vec![3], true));
    }

    #[test]
    fn without_saved_members_the_registrys_view_is_passed_on() {
        let mut restored = Restored::new(vec![]);
        for view in [heard(&[], true), heard(&[1], false), heard(&[], false)] {
            restored.hear(Arc::clone(&view), Instant::now());
            assert!(Arc::ptr_eq(&restored.view(), &view));
        }
    }
}
