//! How a watcher follows its registry: when to open a feed of member lists, when the feed is lost, when to try again.
//!
//! The driver has at most one feed open, carries out each [`FollowAction`], and publishes [`Follow::view`] after each step.
//! This file knows no registry's protocol.

use std::time::{Duration, Instant};

use crate::backoff::Backoff;
use crate::known::Known;
use crate::member::{List, View};

/// How long opening a feed may take, its first list included.
pub const OPEN: Duration = Duration::from_secs(5);

/// An event that the watcher reacts to.
#[derive(Clone, PartialEq, Debug)]
pub enum FollowInput {
    /// The feed gave the registry's whole list of members.
    Listed(List),
    /// The feed could not be opened, failed or ended.
    Lost,
    /// The time given with the latest action may have come.
    Wake,
}

/// What to do until the next input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FollowAction {
    /// Open a feed and wait for its first list. At `until`, give up and send [`FollowInput::Wake`].
    Open {
        /// The end of this try.
        until: Instant,
    },
    /// Wait for the next list. At `until`, if set, send [`FollowInput::Wake`].
    Listen {
        /// When the next kept members are dropped ([`Known::settle`]).
        until: Option<Instant>,
    },
    /// Close the feed. At `until`, send [`FollowInput::Wake`].
    Wait {
        /// When the next try is due.
        until: Instant,
    },
}

/// An event worth a line in the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FollowNews {
    /// The registry is lost; the last known view stays (I7).
    Lost,
    /// The registry is back.
    Back {
        /// Number of members on its list.
        members: usize,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Opening { until: Instant },
    Listening,
    Waiting { until: Instant },
}

/// One watcher.
#[derive(Clone, Debug)]
pub struct Follow {
    known: Known,
    backoff: Backoff,
    phase: Phase,
    news: Option<FollowNews>,
}

impl Follow {
    /// A watcher that knows no member yet, and its first action. `seed` makes its waits differ from those of other watchers
    /// that lost the same registry.
    pub fn start(seed: u64, now: Instant) -> (Follow, FollowAction) {
        let until = now + OPEN;
        let (known, backoff) = (Known::new(), Backoff::new(seed, Duration::MAX));
        (Follow { known, backoff, phase: Phase::Opening { until }, news: None }, FollowAction::Open { until })
    }

    /// The members as they are known now. The view's revision grows with every change.
    pub fn view(&self) -> View {
        self.known.view()
    }

    /// The news of the latest step. Returns each only once.
    pub fn take_news(&mut self) -> Option<FollowNews> {
        self.news.take()
    }

    /// Takes one input and returns the action that replaces the previous one. None: continue with the previous action.
    pub fn step(&mut self, input: FollowInput, now: Instant) -> Option<FollowAction> {
        match (self.phase, input) {
            (Phase::Opening { .. } | Phase::Listening, FollowInput::Listed(list)) => Some(self.listed(list, now)),
            (Phase::Opening { .. } | Phase::Listening, FollowInput::Lost) => Some(self.lost(now)),
            (Phase::Opening { until }, FollowInput::Wake) if now >= until => Some(self.lost(now)),
            (Phase::Listening, FollowInput::Wake) => {
                self.known.settle(now);
                Some(self.listen())
            }
            (Phase::Waiting { until }, FollowInput::Wake) if now >= until => {
                let until = now + OPEN;
                self.phase = Phase::Opening { until };
                Some(FollowAction::Open { until })
            }
            _ => None,
        }
    }

    fn listed(&mut self, list: List, now: Instant) -> FollowAction {
        if !self.backoff.is_fresh() {
            self.news = Some(FollowNews::Back { members: list.members.len() });
        }
        self.backoff.reset();
        self.known.list(list, now);
        self.phase = Phase::Listening;
        self.listen()
    }

    fn listen(&self) -> FollowAction {
        FollowAction::Listen { until: self.known.settles_at() }
    }

    /// Handles the loss of the feed. The members stay (I7).
    fn lost(&mut self, now: Instant) -> FollowAction {
        self.known.lose();
        if self.backoff.is_fresh() {
            self.news = Some(FollowNews::Lost);
        }
        let until = now + self.backoff.next();
        self.phase = Phase::Waiting { until };
        FollowAction::Wait { until }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::known::SETTLE;
    use crate::testing::member;

    fn ids(follow: &Follow) -> Vec<u64> {
        follow.view().members.iter().map(|m| m.id.0).collect()
    }

    #[test]
    fn an_outage_keeps_the_view_and_is_told_once() {
        // I7
        let mut now = Instant::now();
        let (mut follow, first) = Follow::start(1, now);
        assert_eq!(first, FollowAction::Open { until: now + OPEN });
        assert!(follow.view().stale);
        let listen = follow.step(FollowInput::Listed(vec![member(1), member(2)].into()), now);
        assert_eq!((listen, follow.take_news()), (Some(FollowAction::Listen { until: None }), None));
        let mut news = Vec::new();
        let mut lost = follow.step(FollowInput::Lost, now);
        for _ in 0..4 {
            let Some(FollowAction::Wait { until }) = lost else { panic!("{lost:?}") };
            news.extend(follow.take_news());
            assert_eq!((ids(&follow), follow.view().stale), (vec![1, 2], true));
            assert_eq!(follow.step(FollowInput::Lost, now), None, "the feed is closed already");
            assert_eq!(follow.step(FollowInput::Wake, now), None, "not yet");
            assert_eq!(follow.step(FollowInput::Wake, until), Some(FollowAction::Open { until: until + OPEN }));
            now = until + OPEN;
            lost = follow.step(FollowInput::Wake, now);
        }
        assert_eq!(news, [FollowNews::Lost]);
    }

    #[test]
    fn members_that_do_not_come_back_are_let_go_in_time() {
        let now = Instant::now();
        let (mut follow, _) = Follow::start(1, now);
        follow.step(FollowInput::Listed(vec![member(1), member(2)].into()), now);
        let Some(FollowAction::Wait { until: now }) = follow.step(FollowInput::Lost, now) else { panic!("no wait") };
        follow.step(FollowInput::Wake, now);
        follow.take_news();
        let settles = now + SETTLE;
        let listen = FollowAction::Listen { until: Some(settles) };
        assert_eq!(follow.step(FollowInput::Listed(vec![member(2)].into()), now), Some(listen));
        assert_eq!(follow.take_news(), Some(FollowNews::Back { members: 1 }));
        assert_eq!(ids(&follow), [1, 2]);
        assert_eq!(follow.step(FollowInput::Wake, now), Some(listen), "not yet");
        assert_eq!(follow.step(FollowInput::Wake, settles), Some(FollowAction::Listen { until: None }));
        assert_eq!(ids(&follow), [2]);
    }
}
