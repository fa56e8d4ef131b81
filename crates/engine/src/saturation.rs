//! Finds the length, in prompt tokens, from which on a step saturates the hardware: which lengths to time, and what the
//! times say.
//!
//! Part of a step's time does not grow with its tokens: weights are read once, operations are started once. So short
//! steps waste the hardware. From some length on, twice the tokens take twice the time, and a longer step only makes
//! the prompts in it wait for each other. That length is L_m of DistServe (Zhong et al., OSDI 2024, section 3.1) and
//! the right value for [`crate::EngineConfig::pack_tokens`]. This module does not run the steps: their times come from
//! outside.

use std::time::Duration;

/// First length to time, in tokens.
const FIRST: u32 = 16;
/// Throughput growth of at most one part in this many counts as none.
const TOLERANCE: u32 = 10;
/// Time for the whole search, unless the first step is too slow for that.
const BUDGET: Duration = Duration::from_millis(300);
/// A slow first step raises the time for the search to this many times its own, but never above [`MOST`].
const BUDGET_STEPS: u32 = 16;
const MOST: Duration = Duration::from_secs(4);

/// The search. Time a step of [`Self::next_length`] tokens and pass the time to [`Self::timed`], until there is no next
/// length.
///
/// Lengths double while the throughput grows and time is left. Then each length is timed once more and its shorter time
/// counts: other load on the machine can only make a step slower.
#[derive(Clone, Debug)]
pub struct Saturation {
    longest: u32,
    /// Whether the first step is over. It only warms up and does not count.
    warm: bool,
    /// Timed lengths in ascending order, each with its shortest time.
    points: Vec<(u32, Duration)>,
    /// Second round: index of the point to time next.
    again: Option<usize>,
    spent: Duration,
    budget: Duration,
}

impl Saturation {
    /// A search over steps of at most `longest` tokens.
    pub fn new(longest: u32) -> Saturation {
        Saturation { longest, warm: false, points: Vec::new(), again: None, spent: Duration::ZERO, budget: BUDGET }
    }

    /// Tokens of the next step to time; `None` when the search is over.
    pub fn next_length(&self) -> Option<u32> {
        if let Some(at) = self.again {
            return self.points.get(at).map(|point| point.0);
        }
        let next = match self.points.last() {
            Some((length, _)) => length.saturating_mul(2),
            None => FIRST,
        };
        (next <= self.longest).then_some(next)
    }

    /// Takes the time of the step that [`Self::next_length`] asked for.
    pub fn timed(&mut self, took: Duration) {
        let Some(length) = self.next_length() else { return };
        self.spent += took;
        if !self.warm {
            self.warm = true;
            self.budget = BUDGET.max(took * BUDGET_STEPS).min(MOST);
            return;
        }
        if let Some(at) = self.again {
            self.points[at].1 = self.points[at].1.min(took);
            let next = at + 1;
            // A step that would exceed the budget is not begun.
            let late = self.points.get(next).is_some_and(|point| self.spent + point.1 > self.budget);
            self.again = Some(if late { self.points.len() } else { next });
            return;
        }
        self.points.push((length, took));
        let over = self.spent + 2 * took > self.budget / 2 || length.saturating_mul(2) > self.longest;
        // Neither twice nor four times this length was faster, so no longer step will be.
        let sure = self.found().is_some_and(|found| found <= length / 4);
        if over || sure {
            self.again = Some(0);
        }
    }

    /// The shortest length timed so far that no longer one beats by a tenth in tokens per second. `None` while only the
    /// longest one qualifies.
    pub fn found(&self) -> Option<u32> {
        let beats = |(longer, slower): &(u32, Duration), (length, time): &(u32, Duration)| {
            // longer / slower > (1 + 1 / TOLERANCE) · length / time, in whole numbers.
            let ours = u128::from(*length) * slower.as_nanos() * u128::from(TOLERANCE + 1);
            u128::from(*longer) * time.as_nanos() * u128::from(TOLERANCE) > ours
        };
        let (_, shorter) = self.points.split_last()?;
        let saturates = |at: &usize| !self.points[at + 1..].iter().any(|longer| beats(longer, &self.points[*at]));
        (0..shorter.len()).find(saturates).map(|at| self.points[at].0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the search over steps that take `micros(length)` microseconds. Returns the result, the lengths timed and
    /// the time spent.
    fn search(longest: u32, mut micros: impl FnMut(u32) -> f64) -> (Option<u32>, Vec<u32>, Duration) {
        let (mut search, mut lengths, mut spent) = (Saturation::new(longest), Vec::new(), Duration::ZERO);
        while let Some(length) = search.next_length() {
            let took = Duration::from_nanos((micros(length) * 1e3) as u64);
            lengths.push(length);
            spent += took;
            search.timed(took);
            assert!(lengths.len() < 100, "it ends");
        }
        (search.found(), lengths, spent)
    }

    /// Time of a step: `fixed`, plus `token` for each token. Fewer than `width` tokens cost as much as `width`.
    fn step(fixed: f64, token: f64, width: f64) -> impl Fn(u32) -> f64 {
        move |length| fixed + token * f64::from(length).max(width)
    }

    #[test]
    fn it_is_where_the_fixed_part_no_longer_counts() {
        // The fixed part is worth 100 tokens: less than a tenth of a step of 1024 tokens or more.
        let (found, lengths, _) = search(8192, step(1000.0, 10.0, 0.0));
        assert_eq!(found, Some(1024));
        assert_eq!(lengths[..3], [16, 16, 32], "the first step is not counted");
        // Without a fixed part the shortest length saturates, and two doublings are proof enough.
        let (found, lengths, _) = search(8192, step(0.0, 10.0, 0.0));
        assert_eq!((found, lengths.as_slice()), (Some(16), [16, 16, 32, 64, 16, 32, 64].as_slice()));
        // Hardware that computes 256 tokens as fast as one.
        assert_eq!(search(8192, step(0.0, 1.0, 256.0)).0, Some(256));
    }

    #[test]
    fn what_still_grows_at_the_longest_step_saturates_nowhere() {
        assert_eq!(search(512, step(10_000.0, 1.0, 0.0)).0, None);
        assert_eq!(search(16, step(0.0, 10.0, 0.0)).0, None);
        assert_eq!(search(15, step(0.0, 10.0, 0.0)), (None, vec![], Duration::ZERO));
    }

    #[test]
    fn attention_that_slows_long_steps_down_does_not_matter() {
        assert_eq!(search(4096, |n| 200.0 + f64::from(n) + f64::from(n).powi(2) / 4000.0).0, Some(512));
    }

    #[test]
    fn a_step_that_something_else_held_up_is_outdone_by_the_next() {
        for slow in 0..14 {
            let (mut at, step) = (0, step(0.0, 10.0, 64.0));
            let (found, ..) = search(8192, |length| {
                at += 1;
                step(length) * if at == slow { 3.0 } else { 1.0 }
            });
            assert_eq!(found, Some(64), "the {slow}th was slow");
        }
    }

    #[test]
    fn the_time_is_bounded() {
        // I5: the slower the model, the fewer lengths.
        for fixed in [10.0, 1e3, 1e4, 1e5, 1e6, 1e7] {
            for token in [fixed / 1e6, fixed / 100.0, fixed / 10.0, fixed] {
                let step = step(fixed, token, 0.0);
                let (_, lengths, spent) = search(1 << 20, &step);
                let first = Duration::from_secs_f64(step(FIRST) / 1e6);
                let most = (first * BUDGET_STEPS).clamp(BUDGET, MOST).max(3 * first);
                assert!(spent <= most + Duration::from_micros(1), "{spent:?} for {lengths:?}");
            }
        }
    }
}
