//! Prompts whose KV a tenant has asked to keep, and how many tokens they have together.
//!
//! Each prompt counts with all of its tokens, also where it shares its beginning with another one. The same prompt again counts once.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::OverLimit;

/// Most prompts that are kept at a time (I5).
const MOST: usize = 1 << 16;

/// What is kept, by a hash of each prompt: its tokens, and until when.
#[derive(Clone, Debug, Default)]
pub(super) struct Kept {
    prompts: HashMap<u64, (u32, Instant)>,
}

impl Kept {
    /// Keeps a prompt of so many tokens for this long, with at most `limit` tokens in all.
    pub fn keep(
        &mut self,
        (prompt, tokens): (u64, u32),
        time: Duration,
        limit: u32,
        now: Instant,
    ) -> Result<(), OverLimit> {
        if tokens > limit {
            return Err(OverLimit::KeptNever);
        }
        self.prompts.retain(|_, (_, until)| *until > now);
        let before = self.prompts.get(&prompt).copied();
        let others = self.prompts.iter().filter(|(other, _)| **other != prompt);
        let mut ends: Vec<(Instant, u32)> = others.map(|(_, (tokens, until))| (*until, *tokens)).collect();
        let mut all = ends.iter().fold(u64::from(tokens), |all, (_, tokens)| all + u64::from(*tokens));
        if all > limit.into() || ends.len() >= MOST {
            ends.sort_unstable();
            let mut at = now;
            let mut ends = ends.into_iter();
            while all > limit.into() || ends.len() >= MOST {
                let Some((until, tokens)) = ends.next() else { break };
                (at, all) = (until, all - u64::from(tokens));
            }
            return Err(OverLimit::Kept(at.saturating_duration_since(now)));
        }
        // A shorter time does not take back a longer one.
        let until = before.map_or(now + time, |(_, until)| until.max(now + time));
        self.prompts.insert(prompt, (tokens, until));
        Ok(())
    }

    /// Whether nothing is kept.
    pub fn is_empty(&mut self, now: Instant) -> bool {
        self.prompts.retain(|_, (_, until)| *until > now);
        self.prompts.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn prompts_are_kept_up_to_the_limit_and_the_wait_is_true() {
        let (mut kept, now) = (Kept::default(), Instant::now());
        assert_eq!(kept.keep((1, 60), seconds(10), 100, now), Ok(()));
        assert_eq!(kept.keep((2, 30), seconds(20), 100, now), Ok(()));
        assert_eq!(kept.keep((3, 11), seconds(20), 100, now), Err(OverLimit::Kept(seconds(10))));
        assert_eq!(kept.keep((3, 71), seconds(20), 100, now), Err(OverLimit::Kept(seconds(20))), "both must end");
        assert_eq!(kept.keep((3, 10), seconds(5), 100, now), Ok(()), "what was refused does not count");
        assert_eq!(kept.keep((4, 60), seconds(5), 100, now + seconds(10)), Ok(()), "after the time that was said");
    }

    #[test]
    fn a_prompt_counts_once_and_its_longest_time_holds() {
        let (mut kept, now) = (Kept::default(), Instant::now());
        for time in [20, 5] {
            assert_eq!(kept.keep((1, 90), seconds(time), 100, now), Ok(()));
        }
        assert_eq!(kept.keep((2, 20), seconds(1), 100, now), Err(OverLimit::Kept(seconds(20))));
        assert!(!kept.is_empty(now + seconds(19)) && kept.is_empty(now + seconds(20)));
    }

    #[test]
    fn more_than_the_limit_is_never_kept() {
        let (mut kept, now) = (Kept::default(), Instant::now());
        assert_eq!(kept.keep((1, 101), seconds(1), 100, now), Err(OverLimit::KeptNever));
        assert_eq!(kept.keep((1, 1), seconds(1), 0, now), Err(OverLimit::KeptNever));
    }
}
