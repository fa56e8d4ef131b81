//! How loaded a worker is, for who decides how many workers there should be.

use std::time::Duration;

use baton_engine::Time;

/// What a worker has to do, in time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Load {
    /// Prompt tokens that are to be computed here. Of a prompt that has not started, all count, though some may be cached.
    pub queued_tokens: u64,
    /// How long these will take at the rate of the latest prompts; zero before the first. A prompt that arrives now has its first
    /// token after that and its own computation.
    pub ahead: Duration,
    /// Mean time between two tokens of an answer, over at least the last [`SPAN`] and at most twice that; zero: there were none.
    pub inter_token: Duration,
}

/// See [`Load::inter_token`].
pub const SPAN: Duration = Duration::from_secs(15);

/// Time between two tokens, over two spans: the present one and the one before.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct InterToken {
    began: Time,
    before: Rows,
    now: Rows,
}

/// Decode rows, and the time of each row's step, summed.
#[derive(Clone, Copy, Debug, Default)]
struct Rows {
    count: u64,
    seconds: f64,
}

impl InterToken {
    /// Adds a step with so many decode rows that took so long.
    pub(crate) fn add(&mut self, rows: u64, took: Duration, now: Time) {
        *self = self.at(now);
        self.now.count += rows;
        self.now.seconds += rows as f64 * took.as_secs_f64();
    }

    /// The mean; zero if there were no rows.
    pub(crate) fn mean(&self, now: Time) -> Duration {
        let InterToken { before, now, .. } = self.at(now);
        let rows = before.count + now.count;
        Duration::from_secs_f64((before.seconds + now.seconds) / rows.max(1) as f64)
    }

    /// The spans as they are at this time.
    fn at(self, now: Time) -> InterToken {
        let spans = u128::from(now.0.saturating_sub(self.began.0)) / SPAN.as_nanos();
        match spans {
            0 => self,
            1 => InterToken {
                began: Time(self.began.0 + SPAN.as_nanos() as u64),
                before: self.now,
                now: Rows::default(),
            },
            _ => InterToken { began: now, ..InterToken::default() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: f64) -> Time {
        Time((seconds * 1e9) as u64)
    }

    #[test]
    fn the_time_between_tokens_is_that_of_the_last_two_spans() {
        let (mut recent, ms) = (InterToken::default(), Duration::from_millis);
        assert_eq!(recent.mean(at(1.0)), Duration::ZERO);
        recent.add(1, ms(10), at(1.0));
        recent.add(3, ms(30), at(2.0));
        assert_eq!(recent.mean(at(2.0)), ms(25), "each row counts");
        recent.add(4, ms(75), at(16.0));
        assert_eq!(recent.mean(at(16.0)), ms(50));
        assert_eq!(recent.mean(at(29.9)), ms(50));
        assert_eq!(recent.mean(at(30.1)), ms(75), "the first span is over");
        assert_eq!(recent.mean(at(45.1)), Duration::ZERO);
        recent.add(1, ms(7), at(100.0));
        assert_eq!(recent.mean(at(100.0)), ms(7));
        assert_eq!(recent.mean(at(114.0)), ms(7));
    }
}
