//! From which length on a step of prompt tokens saturates the hardware: which lengths to time, and what the times say.
//!
//! A step has a part that does not grow with its tokens (weights are read once, operations started once), so short steps
//! waste the hardware; from some length on, twice the tokens take twice the time, and a longer step only makes the prompts
//! in it wait for each other. That length is L_m of DistServe (Zhong et al., OSDI 2024, section 3.1), and what
//! [`crate::EngineConfig::pack_tokens`] is for. Times come in from outside; who runs the steps is not known here.

use std::time::Duration;

/// The first length that is timed, tokens.
const FIRST: u32 = 16;
/// Growth of tokens a second that counts as none: 1 in so many.
const TOLERANCE: u32 = 10;
/// Time the whole search may take, if the first step allows that much.
const BUDGET: Duration = Duration::from_millis(300);
/// Where it does not: so many times the first step, and never more than the second.
const BUDGET_STEPS: u32 = 16;
const MOST: Duration = Duration::from_secs(4);

/// The search. Ask for [`Self::next_length`], time a step of it, tell [`Self::timed`], until there is no next.
///
/// Lengths double while tokens a second grow and the time allows; then all are timed once more, since what else runs on
/// the machine can only make a step slower.
#[derive(Clone, Debug)]
pub struct Saturation {
    longest: u32,
    /// The first step of all sets up what later ones find, and is not counted.
    warm: bool,
    /// Lengths in ascending order and the least time of each.
    points: Vec<(u32, Duration)>,
    /// The point to be timed again next, in the second round.
    again: Option<usize>,
    spent: Duration,
    budget: Duration,
}

impl Saturation {
    /// No step has more than `longest` tokens.
    pub fn new(longest: u32) -> Saturation {
        Saturation { longest, warm: false, points: Vec::new(), again: None, spent: Duration::ZERO, budget: BUDGET }
    }

    /// Tokens of the next step to time; `None` when nothing more is to be learned in time.
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

    /// The step that [`Self::next_length`] asked for took so long.
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
            // A step of which there is no time left to wait for is not begun.
            let late = self.points.get(next).is_some_and(|point| self.spent + point.1 > self.budget);
            self.again = Some(if late { self.points.len() } else { next });
            return;
        }
        self.points.push((length, took));
        let over = self.spent + 2 * took > self.budget / 2 || length.saturating_mul(2) > self.longest;
        // Twice as long, and twice again, and not faster: it will not be.
        let sure = self.found().is_some_and(|found| found <= length / 4);
        if over || sure {
            self.again = Some(0);
        }
    }

    /// The shortest of the lengths timed so far that no longer one beats by a tenth in tokens a second; `None` while that
    /// is the longest of them.
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

    /// Runs the search over steps of these microseconds; the result, the lengths timed and the time spent.
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

    /// The time of a step that costs `fixed` and then so much a token, but the more the better up to `width` tokens at once.
    fn step(fixed: f64, token: f64, width: f64) -> impl Fn(u32) -> f64 {
        move |length| fixed + token * f64::from(length).max(width)
    }

    #[test]
    fn it_is_where_the_fixed_part_no_longer_counts() {
        // A fixed part of 100 tokens' time is less than a tenth of what is to come at 1024 and more.
        let (found, lengths, _) = search(8192, step(1000.0, 10.0, 0.0));
        assert_eq!(found, Some(1024));
        assert_eq!(lengths[..3], [16, 16, 32], "the first step is not counted");
        // Nothing but tokens counts: the shortest will do, and two doublings are proof enough.
        let (found, lengths, _) = search(8192, step(0.0, 10.0, 0.0));
        assert_eq!((found, lengths.as_slice()), (Some(16), [16, 16, 32, 64, 16, 32, 64].as_slice()));
        // Hardware that does 256 tokens at once as fast as one.
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
