//! How fast this worker computes prompts, measured as it computes them.

use std::time::Duration;

/// Tokens per second in steps that mostly prefill. The latest tokens count most.
#[derive(Debug, Default)]
pub(crate) struct PrefillRate {
    tokens: f64,
    seconds: f64,
}

impl PrefillRate {
    /// After this many further tokens, an earlier measurement counts for about a third (1/e).
    const MEMORY: f64 = 4096.0;

    /// Tokens per second; zero before the first step.
    pub(crate) fn get(&self) -> u64 {
        (self.tokens / self.seconds.max(1e-9)) as u64
    }

    /// Adds a step of `tokens` tokens that `took` this long.
    pub(crate) fn add(&mut self, tokens: u64, took: Duration) {
        let kept = (-(tokens as f64) / Self::MEMORY).exp();
        self.tokens = self.tokens * kept + tokens as f64;
        self.seconds = self.seconds * kept + took.as_secs_f64();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_of_prefills_follows_the_latest_tokens() {
        let (mut rate, second) = (PrefillRate::default(), Duration::from_secs(1));
        let add = |rate: &mut PrefillRate, tokens, took| {
            rate.add(tokens, took);
            rate.get()
        };
        assert_eq!(add(&mut rate, 100, second), 100);
        // One step does not undo thousands of tokens, thousands of tokens do.
        assert_eq!([0; 10].map(|_| add(&mut rate, 1000, second))[9] / 100, 9);
        assert!((900..1000).contains(&add(&mut rate, 1, Duration::from_millis(100))));
        assert!([0; 40].map(|_| add(&mut rate, 1000, 10 * second))[39] <= 101);
        assert_eq!(add(&mut PrefillRate::default(), 0, Duration::ZERO), 0);
    }
}
