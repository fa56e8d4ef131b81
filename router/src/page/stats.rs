//! How well the latest requests were served: percentiles, rates, goodput. Pure.

use baton_policy::Targets;
use serde_json::{Value, json};

use crate::trace::{How, Times};

/// Seconds that are looked back, at most.
const WINDOW: f64 = 60.0;
/// Times between two tokens that percentiles are taken of: with more, of each second one, and so on.
const GAPS: usize = 1 << 15;

/// A trace, and how many seconds ago its request was received.
pub(super) struct Aged {
    pub age: f64,
    pub times: Times,
}

/// Statistics of the latest requests.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Stats {
    /// Seconds that they are of.
    pub window: f64,
    /// Times to the first token, ascending.
    pub first: Vec<f64>,
    /// Times between two tokens, ascending.
    pub gaps: Vec<f64>,
    /// Tokens.
    pub tokens: u64,
    /// Requests that ended without an error, those of them that met both targets, and those that failed.
    pub ended: u64,
    pub good: u64,
    pub failed: u64,
    /// Of handoffs, the time from the first token until the KV was there.
    pub tails: Vec<f64>,
}

impl Stats {
    /// Of these traces. `known`: for how many seconds back all requests are known. Before that, some were forgotten, or the router did not run.
    pub fn of(traces: &[Aged], known: f64, targets: Targets) -> Stats {
        let window = WINDOW.min(known);
        let mut stats = Stats { window, ..Stats::default() };
        let all: usize = traces.iter().map(|trace| trace.times.tokens.len()).sum();
        let (each, mut number) = (all.div_ceil(GAPS).max(1), 0);
        for Aged { age, times } in traces {
            // Seconds from when the request was received until the window begins.
            let begin = age - window;
            let tokens = times.tokens.iter().map(|at| f64::from(*at) / 1e6);
            let first = times.tokens.first().map(|at| f64::from(*at) / 1e6);
            stats.first.extend(first.filter(|at| *at >= begin));
            let mut last = None;
            for at in tokens {
                if at >= begin {
                    stats.tokens += 1;
                    number += 1;
                    stats.gaps.extend(last.filter(|_| number % each == 0).map(|last| at - last));
                }
                last = Some(at);
            }
            stats.tails.extend(times.tail.filter(|_| first.is_some_and(|at| at >= begin)));
            match times.ended {
                Some((at, How::Failed)) if at >= begin => stats.failed += 1,
                Some((at, _)) if at >= begin => {
                    stats.ended += 1;
                    stats.good += u64::from(times.good(targets) == Some(true));
                }
                _ => {}
            }
        }
        stats.first.sort_unstable_by(f64::total_cmp);
        stats.gaps.sort_unstable_by(f64::total_cmp);
        stats
    }

    /// For the page.
    pub fn json(&self) -> Value {
        let rate = |count: u64| if self.window > 0.0 { count as f64 / self.window } else { 0.0 };
        json!({
            "window_s": self.window,
            "ttft_s": percentiles(&self.first),
            "itl_s": percentiles(&self.gaps),
            "tokens_per_s": rate(self.tokens),
            "requests_per_s": rate(self.ended),
            "goodput_per_s": rate(self.good),
            "ended": self.ended,
            "good": self.good,
            "failed": self.failed,
        })
    }
}

/// The 50th, 90th and 99th percentile of ascending values, by the nearest rank.
fn percentiles(ascending: &[f64]) -> Value {
    let at = |share: f64| {
        let rank = (share * ascending.len() as f64).ceil().max(1.0) as usize;
        ascending.get(rank - 1)
    };
    json!({"p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "n": ascending.len()})
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGETS: Targets = Targets { first_token: 0.5, token: 0.1 };

    fn aged(age: f64, tokens: &[u32], ended: Option<(f64, How)>) -> Aged {
        let mean = (tokens.len() > 1)
            .then(|| f64::from(tokens[tokens.len() - 1] - tokens[0]) * 1e-6 / (tokens.len() - 1) as f64);
        Aged { age, times: Times { tokens: tokens.to_vec(), mean, tail: Some(0.01), ended } }
    }

    #[test]
    fn only_the_window_counts_and_goodput_meets_both_targets() {
        let traces = [
            aged(100.0, &[1_000_000, 99_000_000], None),
            aged(50.0, &[200_000, 250_000], Some((0.25, How::Answered))),
            aged(20.0, &[900_000, 950_000], Some((1.0, How::Answered))),
            aged(10.0, &[100_000, 400_000], Some((0.4, How::Answered))),
            aged(5.0, &[], Some((0.1, How::Failed))),
            aged(9.0, &[], Some((8.0, How::Cancelled))),
        ];
        let stats = Stats::of(&traces, 1000.0, TARGETS);
        assert_eq!(
            (stats.window, stats.ended, stats.good, stats.failed),
            (60.0, 4, 1, 1),
            "who gave up got nothing good"
        );
        assert_eq!(stats.first, [0.1, 0.2, 0.9], "one came before the window");
        assert_eq!((stats.tokens, stats.gaps.len(), stats.gaps[3]), (7, 4, 98.0));
        assert_eq!(stats.tails.len(), 3);
        let json = stats.json();
        assert_eq!((json["ttft_s"]["p50"].as_f64(), json["ttft_s"]["p99"].as_f64()), (Some(0.2), Some(0.9)));
        assert_eq!(json["goodput_per_s"].as_f64(), Some(1.0 / 60.0));
    }

    /// I5: however many tokens there are, few are sorted.
    #[test]
    fn of_many_tokens_some_are_looked_at() {
        let tokens: Vec<u32> = (0..2000).map(|at| at * 1000).collect();
        let traces: Vec<Aged> = (0..100).map(|_| aged(3.0, &tokens, None)).collect();
        let stats = Stats::of(&traces, 1000.0, TARGETS);
        assert_eq!(stats.tokens, 200_000);
        assert!((GAPS / 2..=GAPS).contains(&stats.gaps.len()), "{}", stats.gaps.len());
        assert!(stats.gaps.iter().all(|gap| (gap - 1e-3).abs() < 1e-9));
    }

    #[test]
    fn what_was_forgotten_is_not_counted_as_if_it_had_not_been() {
        let traces = [aged(4.0, &[1], Some((1.0, How::Answered))), aged(2.0, &[1], Some((1.0, How::Answered)))];
        assert_eq!(Stats::of(&traces, 4.0, TARGETS).json()["requests_per_s"], 0.5);
        assert_eq!(Stats::of(&traces, 8.0, TARGETS).json()["requests_per_s"], 0.25);
        assert_eq!(Stats::of(&[], 0.0, TARGETS).json()["requests_per_s"], 0.0);
        assert!(Stats::of(&[], 0.0, TARGETS).json()["ttft_s"]["p50"].is_null());
    }
}
