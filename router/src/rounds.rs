//! Tokens of answers that are under way are sent in rounds, so that what is new does not wait for all of them.
//!
//! A decode worker's step brings the next token of all its answers at once. With hundreds of answers, sending these on takes milliseconds. A
//! request that comes just then, or a first token, would wait behind them at each of its own steps. So a round sends the tokens of a few answers
//! only. Then the router looks at what has come meanwhile and serves it, and then comes the next round. Nothing waits longer for it in the end:
//! the work is the same.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore};
use tokio::task::yield_now;

/// Answers whose tokens each thread sends in a round: about a tenth of a millisecond.
const TURNS: usize = 8;

/// The rounds of all answers.
#[derive(Debug)]
pub(crate) struct Rounds {
    /// Turns that are left of this round. Those who wait get theirs in the order in which they came.
    turns: Semaphore,
    most: usize,
    /// Number of this round, from 1.
    round: AtomicU64,
    /// A turn of this round is taken, or there will be no more rounds.
    changed: Arc<Notify>,
}

impl Rounds {
    /// Rounds for all threads of the runtime that this is called on.
    pub fn start() -> Arc<Rounds> {
        let most = TURNS * Handle::current().metrics().num_workers();
        let changed = Arc::new(Notify::new());
        let rounds =
            Rounds { turns: Semaphore::new(most), most, round: AtomicU64::new(1), changed: Arc::clone(&changed) };
        let rounds = Arc::new(rounds);
        let these = Arc::downgrade(&rounds);
        tokio::spawn(async move {
            loop {
                changed.notified().await;
                // Until everything that is ready is done, and what has come from outside is ready too.
                yield_now().await;
                let Some(rounds) = these.upgrade() else { return };
                rounds.next();
            }
        });
        rounds
    }

    fn next(&self) {
        self.round.fetch_add(1, Ordering::Relaxed);
        self.turns.add_permits(self.most.saturating_sub(self.turns.available_permits()));
    }

    /// Whether this is still the round of an answer's last turn: what it has ready together it sends in one turn.
    pub fn has_turn(&self, last: u64) -> bool {
        last == self.round.load(Ordering::Relaxed)
    }

    /// Waits for an answer's turn to send a token. `last`: the round of its last turn, 0 at first.
    pub async fn turn(&self, last: &mut u64) {
        // It is never closed.
        if let Ok(turn) = self.turns.acquire().await {
            turn.forget();
        }
        *last = self.round.load(Ordering::Relaxed);
        self.changed.notify_one();
    }
}

impl Drop for Rounds {
    fn drop(&mut self) {
        self.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// What happened, in order: a token of an answer, or something that came from outside.
    type Log = Arc<Mutex<Vec<Option<u32>>>>;

    fn answer(rounds: &Arc<Rounds>, log: &Log, number: u32, tokens: u32) -> tokio::task::JoinHandle<()> {
        let (rounds, log) = (Arc::clone(rounds), Arc::clone(log));
        tokio::spawn(async move {
            let mut last = 0;
            for _ in 0..tokens {
                if !rounds.has_turn(last) {
                    rounds.turn(&mut last).await;
                }
                log.lock().unwrap().push(Some(number));
            }
        })
    }

    #[tokio::test]
    async fn what_comes_from_outside_waits_for_one_round_at_most() {
        let (rounds, log) = (Rounds::start(), Log::default());
        let answers: Vec<_> = (0..100).map(|number| answer(&rounds, &log, number, 1)).collect();
        let outside = Arc::clone(&log);
        let comes = tokio::spawn(async move {
            loop {
                yield_now().await;
                outside.lock().unwrap().push(None);
            }
        });
        for answer in answers {
            answer.await.unwrap();
        }
        comes.abort();
        let log = log.lock().unwrap();
        let longest = log.split(Option::is_none).map(<[_]>::len).max();
        assert_eq!(longest, Some(TURNS), "{log:?}");
        let order: Vec<u32> = log.iter().copied().flatten().collect();
        assert_eq!(order, (0..100).collect::<Vec<_>>(), "who came first is sent first");
    }

    #[tokio::test]
    async fn tokens_that_are_ready_together_have_one_turn() {
        let (rounds, log) = (Rounds::start(), Log::default());
        let answers = [0, 1].map(|number| answer(&rounds, &log, number, 50));
        for answer in answers {
            answer.await.unwrap();
        }
        let order: Vec<u32> = log.lock().unwrap().iter().copied().flatten().collect();
        assert_eq!(order, [vec![0; 50], vec![1; 50]].concat());
        assert_eq!(rounds.turns.available_permits(), TURNS - 2);
    }
}
