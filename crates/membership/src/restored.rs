//! The view of a watcher that starts with members that an earlier process saved (I7).
//!
//! The registry may be away, or may have lost its members together with the earlier process. So the saved members count as known before an
//! outage: they stay until the registry answers, and [`crate::SETTLE`] longer. After that the registry's own view is passed on.

use std::sync::Arc;
use std::time::Instant;

use crate::known::Known;
use crate::member::{Member, View};

/// Saved members, and what the registry said since.
#[derive(Debug)]
pub struct Restored {
    /// None once nothing depends on the saved members any more.
    known: Option<Known>,
    heard: Arc<View>,
}

impl Restored {
    /// A watcher that knows these members, and has not heard from its registry.
    pub fn new(saved: Vec<Member>) -> Restored {
        let known = (!saved.is_empty()).then(|| Known::before_outage(saved));
        Restored { known, heard: Arc::default() }
    }

    /// Takes in a view of the registry.
    pub fn hear(&mut self, view: Arc<View>, now: Instant) {
        if let Some(known) = &mut self.known {
            match view.stale {
                true => known.lose(),
                false => known.list(view.members.clone(), now),
            }
        }
        self.heard = view;
        self.settle(now);
    }

    /// When [`Restored::settle`] is due.
    pub fn settles_at(&self) -> Option<Instant> {
        self.known.as_ref().and_then(Known::settles_at)
    }

    /// Drops saved members whose time is over.
    pub fn settle(&mut self, now: Instant) {
        let Some(known) = &mut self.known else { return };
        known.settle(now);
        if known.settles_at().is_none() && !known.view().stale {
            self.known = None;
        }
    }

    /// The members as they are known now.
    pub fn view(&self) -> Arc<View> {
        match &self.known {
            Some(known) => Arc::new(known.view()),
            None => Arc::clone(&self.heard),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SETTLE;
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
