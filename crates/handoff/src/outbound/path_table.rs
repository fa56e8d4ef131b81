//! The paths to every decode worker that a sender has written to.

use std::collections::BTreeMap;
use std::time::Instant;

use baton_types::WorkerId;

use super::paths::{PathReport, Paths};

/// What is known of the paths to each decode worker.
#[derive(Debug, Default)]
pub struct PathTable {
    paths: BTreeMap<WorkerId, Paths>,
}

impl PathTable {
    /// What is known of the paths to a worker, if it has been written to.
    pub fn get_mut(&mut self, worker: WorkerId) -> Option<&mut Paths> {
        self.paths.get_mut(&worker)
    }

    /// The paths to a worker, made with `new` if nothing is known of them. If `limit` workers are known already, one
    /// without a session makes room; if each has a session or must still be told of the end of one, none does.
    pub fn to(&mut self, worker: WorkerId, limit: usize, new: impl FnOnce() -> Paths) -> &mut Paths {
        if self.paths.len() >= limit && !self.paths.contains_key(&worker) {
            // I5: workers come and go. One without a session is most likely gone.
            let gone =
                self.paths.iter().find(|(_, paths)| !paths.is_used() && !paths.is_untold()).map(|(worker, _)| *worker);
            gone.and_then(|worker| self.paths.remove(&worker));
        }
        self.paths.entry(worker).or_insert_with(new)
    }

    /// A report on the paths to each worker.
    pub fn report(&self, now: Instant) -> Vec<(WorkerId, Vec<PathReport>)> {
        self.paths.iter().map(|(worker, paths)| (*worker, paths.report(now))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::TransportKind;

    #[test]
    fn a_worker_without_a_session_makes_room_for_a_new_one() {
        let mut table = PathTable::default();
        let new = || Paths::new([(TransportKind::Tcp, None)], true);
        table.to(WorkerId(1), 2, new).begun(TransportKind::Tcp, 1);
        table.to(WorkerId(2), 2, new);
        table.to(WorkerId(3), 2, new);
        let known: Vec<_> = table.report(Instant::now()).into_iter().map(|(worker, _)| worker.0).collect();
        assert_eq!(known, [1, 3]);
        assert!(table.get_mut(WorkerId(2)).is_none());
    }
}
