//! What one worker has to do, as far as a router knows: what the worker said last, and what was sent to it since.

use std::time::{Duration, Instant};

use baton_latency::{Backlog, StepWork};

/// For so long after a request's stream was opened, the worker's word may not cover it: it gathers news for 50 ms.
const UNTOLD: Duration = Duration::from_millis(100);
/// A request whose stream is not open after this long went another way.
const LOST: Duration = Duration::from_secs(5);
/// Most requests that are counted apart (I5).
const MOST: usize = 1024;

/// The load of one worker.
#[derive(Clone, Debug, Default)]
pub(super) struct Load {
    told: Option<Backlog>,
    /// Routers that place requests here, this one included; 0 or 1: only this one.
    routers: u32,
    sent: Vec<Sent>,
}

/// A request that was placed here.
#[derive(Clone, Copy, Debug)]
struct Sent {
    placed: Instant,
    /// When its stream was opened.
    opened: Option<Instant>,
    work: StepWork,
    blocks: u32,
}

impl Load {
    /// The worker says what it has to do.
    pub fn told(&mut self, backlog: Backlog, routers: u32, now: Instant) {
        (self.told, self.routers) = (Some(backlog), routers);
        self.forget(now);
    }

    /// A request was placed here that adds so much.
    pub fn sent(&mut self, work: StepWork, blocks: u32, now: Instant) {
        if self.sent.len() >= MOST {
            self.forget(now);
        }
        if self.told.is_some() && self.sent.len() < MOST {
            self.sent.push(Sent { placed: now, opened: None, work, blocks });
        }
    }

    /// A request's stream to the worker is opened. Which one is not known; most go in the order in which they were placed.
    pub fn opened(&mut self, now: Instant) {
        if let Some(first) = self.sent.iter_mut().find(|sent| sent.opened.is_none()) {
            first.opened = Some(now);
        }
    }

    fn forget(&mut self, now: Instant) {
        let since = |at: Instant| now.saturating_duration_since(at);
        self.sent.retain(|sent| match sent.opened {
            Some(opened) => since(opened) < UNTOLD,
            None => since(sent.placed) < LOST,
        });
    }

    /// What the worker has to do now; `None`: it never said. Other routers see the same and choose alike, so each is taken to have sent as much
    /// here as this one did.
    pub fn now(&self) -> Option<Backlog> {
        let routers = u64::from(self.routers.max(1));
        let add = |backlog: Backlog, sent: &Sent| {
            let StepWork { tokens, pairs, rows, context } = sent.work;
            let [tokens, pairs, rows, context] = [tokens, pairs, rows, context].map(|n| n.saturating_mul(routers));
            backlog.with(StepWork { tokens, pairs, rows, context }, sent.blocks.saturating_mul(routers as u32))
        };
        self.told.map(|told| self.sent.iter().fold(told, add))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(load: &Load) -> Option<(u64, i64)> {
        load.now().map(|backlog| (backlog.coming.rows, backlog.room))
    }

    #[test]
    fn what_was_sent_counts_until_the_worker_says_so_itself() {
        let (mut load, begun, row) = (Load::default(), Instant::now(), StepWork::default().with_row(10));
        let at = |ms: u64| begun + Duration::from_millis(ms);
        load.sent(row, 5, at(0));
        assert_eq!(rows(&load), None, "nothing is known of it");
        let empty = Backlog { room: 100, ..Backlog::default() };
        load.told(empty, 1, at(1));
        load.sent(row, 5, at(2));
        load.sent(row, 5, at(3));
        assert_eq!(rows(&load), Some((2, 90)));
        load.opened(at(10));
        load.told(empty, 1, at(109));
        assert_eq!(rows(&load), Some((2, 90)), "it may not know of it yet");
        load.told(empty.with(row, 5), 1, at(110));
        assert_eq!(rows(&load), Some((2, 90)), "its own word, and one that was not opened");
        load.told(empty, 1, at(5003));
        assert_eq!(rows(&load), Some((0, 100)), "that one went another way");
    }

    #[test]
    fn other_routers_do_alike() {
        let (mut load, now) = (Load::default(), Instant::now());
        load.told(Backlog::default(), 3, now);
        load.sent(StepWork::default().with_row(10), 5, now);
        assert_eq!(rows(&load), Some((3, -15)));
    }

    /// I5.
    #[test]
    fn no_more_is_kept_than_may() {
        let (mut load, now) = (Load::default(), Instant::now());
        load.told(Backlog::default(), 1, now);
        (0..2 * MOST).for_each(|_| load.sent(StepWork::default().with_row(1), 1, now));
        assert_eq!(rows(&load), Some((MOST as u64, -(MOST as i64))));
    }
}
