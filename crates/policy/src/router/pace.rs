//! How long a worker takes for a token, from what one request sees of it.

use std::time::{Duration, Instant};

/// Tokens of an answer below which the time between them says little.
const ENOUGH: u32 = 8;
/// A prompt counts as so long at least: what a step takes by itself must not look like slow tokens.
const LEAST_PROMPT: u32 = 64;

/// The tokens of one decode stream.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DecodePace {
    /// When the first token came, and the last.
    span: Option<(Instant, Instant)>,
    tokens: u32,
    /// How long the client kept tokens waiting since the first one, which kept the stream waiting, too.
    waited: Duration,
}

impl DecodePace {
    /// A token came from the decode worker.
    pub fn token(&mut self, now: Instant) {
        self.tokens += 1;
        self.span = Some((self.span.map_or(now, |(first, _)| first), now));
    }

    /// A token waited this long for the client.
    pub fn waited(&mut self, time: Duration) {
        if self.tokens > 0 {
            self.waited += time;
        }
    }

    /// Whether any token came.
    pub fn has_begun(&self) -> bool {
        self.tokens > 0
    }

    /// The time from one token to the next, if there were enough.
    pub fn per_token(&self) -> Option<Duration> {
        let (first, last) = self.span.filter(|_| self.tokens >= ENOUGH)?;
        Some(last.duration_since(first).saturating_sub(self.waited) / (self.tokens - 1))
    }
}

/// The time that a computed token of a prompt took.
pub(super) fn of_prompt(time: Duration, tokens: usize, cached_tokens: u32) -> Duration {
    let computed = u32::try_from(tokens).unwrap_or(u32::MAX).saturating_sub(cached_tokens);
    time / computed.max(LEAST_PROMPT)
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)] // Tests begin at some time.
mod tests {
    use super::*;

    #[test]
    fn what_the_client_keeps_waiting_is_not_the_worker_s() {
        let (begun, step) = (Instant::now(), Duration::from_millis(10));
        let mut pace = DecodePace::default();
        for token in 0..ENOUGH {
            assert_eq!(pace.per_token(), None);
            pace.token(begun + 5 * step * token);
            pace.waited(if token + 1 < ENOUGH { 4 * step } else { Duration::ZERO });
        }
        assert_eq!(pace.per_token(), Some(step));
    }

    #[test]
    fn a_short_prompt_does_not_look_slow() {
        let time = Duration::from_millis(128);
        assert_eq!(of_prompt(time, 1, 0), Duration::from_millis(2));
        assert_eq!(of_prompt(time, 1128, 1000), Duration::from_millis(1));
    }
}
