//! Where the time of an answer went, and whether its tokens came in time: for metrics.

use baton_policy::Targets;
use baton_runtime::metrics as names;
use metrics::{counter, histogram};

use super::{End, How, Mark, State, Times, Trace};

impl Trace {
    /// Counts a choice that has ended.
    pub(super) fn count(&self) {
        for (phase, seconds) in phases(&self.state()) {
            histogram!(names::PHASE_SECONDS, "phase" => phase).record(seconds);
        }
        if let Some(good) = self.subject.targets.and_then(|targets| self.times().good(targets)) {
            let met = if good { "yes" } else { "no" };
            counter!(names::SLO, "class" => self.subject.class.as_str(), "met" => met).increment(1);
        }
    }
}

impl Times {
    /// Whether both targets were met; None: it has not ended. Who left before the first token may have waited too long for it.
    pub fn good(&self, targets: Targets) -> Option<bool> {
        let (_, how) = self.ended?;
        let first = self.tokens.first().map(|at| f64::from(*at) / 1e6);
        let in_time = first.map_or(how == How::Answered, |first| first <= targets.first_token);
        Some(how != How::Failed && in_time && self.mean.is_none_or(|mean| mean <= targets.token))
    }
}

/// The phases of a choice, in seconds. None of one that failed, was given up or was recovered: its times are not those of its phases.
fn phases(state: &State) -> Vec<(&'static str, f64)> {
    let answered = matches!(&state.end, Some((_, end @ End::Finished(_))) if end.how() == How::Answered);
    if !answered || state.recoveries > 0 {
        return Vec::new();
    }
    let at = |wanted: &dyn Fn(&Mark) -> bool| state.marks.iter().find(|(_, mark)| wanted(mark)).map(|(at, _)| *at);
    let asked = at(&|mark| matches!(mark, Mark::Decode { .. } | Mark::Prefill { .. }));
    let split = at(&|mark| matches!(mark, Mark::FirstToken));
    let computed = split.or_else(|| state.tokens.first().copied());
    let verified = at(&|mark| matches!(mark, Mark::Transferred)).filter(|_| split.is_some());
    // Where nothing was handed over, the next step begins at once.
    let ready = if split.is_some() { verified } else { computed };
    let next = state.tokens.get(1).copied();
    [
        ("queue", Some(0), asked),
        ("prefill", asked, computed),
        ("transfer", split, verified),
        ("first_decode", ready, next),
    ]
    .into_iter()
    .filter_map(|(phase, from, to)| Some((phase, f64::from(to?.saturating_sub(from?)) / 1e6)))
    .collect()
}

#[cfg(test)]
mod tests {
    use baton_types::{FinishReason, WorkerId};

    use super::*;

    const W: WorkerId = WorkerId(1);

    fn ended(marks: Vec<(u32, Mark)>, tokens: &[u32]) -> State {
        let end = Some((900_000, End::Finished(FinishReason::Length)));
        State { marks, tokens: tokens.to_vec(), end, ..State::default() }
    }

    fn decode(at: u32, local: bool) -> (u32, Mark) {
        (at, Mark::Decode { worker: W, local, span: None })
    }

    #[test]
    fn a_split_answer_has_all_phases() {
        let marks = |told: bool| {
            let mut marks =
                vec![(1, Mark::Begins), decode(1_000, false), (2_000, Mark::Prefill { worker: W, span: None })];
            marks.extend([(101_000, Mark::FirstToken)]);
            marks.extend(told.then_some((131_000, Mark::Transferred)));
            marks
        };
        let whole = ended(marks(true), &[101_000, 141_000, 150_000]);
        let wanted = [("queue", 0.001), ("prefill", 0.1), ("transfer", 0.03), ("first_decode", 0.01)];
        assert_eq!(phases(&whole), wanted);
        // The prefill worker had not said so when the answer ended.
        let late = ended(marks(false), &[101_000, 141_000]);
        assert_eq!(phases(&late), wanted[..2]);
        let recovered = State { recoveries: 1, ..ended(marks(true), &[1, 2]) };
        let cancelled = State { end: Some((1, End::Finished(FinishReason::Cancelled))), ..ended(marks(true), &[1, 2]) };
        assert!(phases(&recovered).is_empty() && phases(&cancelled).is_empty());
    }

    #[test]
    fn an_answer_of_one_worker_has_no_transfer() {
        let marks = vec![decode(1_000, true), (1_500, Mark::Started)];
        let state = ended(marks, &[51_000, 61_000]);
        assert_eq!(phases(&state), [("queue", 0.001), ("prefill", 0.05), ("first_decode", 0.01)]);
        assert_eq!(phases(&ended(vec![decode(1_000, true)], &[51_000])).len(), 2, "one token");
    }

    #[test]
    fn goodput_meets_both_targets() {
        let targets = Targets { first_token: 0.5, token: 0.1 };
        let times =
            |tokens: &[u32], mean, how| Times { tokens: tokens.to_vec(), mean, tail: None, ended: Some((1.0, how)) };
        let good = |times: Times| times.good(targets);
        assert_eq!(good(times(&[400_000], Some(0.1), How::Answered)), Some(true));
        assert_eq!(good(times(&[600_000], Some(0.1), How::Answered)), Some(false), "the first token was late");
        assert_eq!(good(times(&[400_000], Some(0.2), How::Answered)), Some(false), "the others were");
        assert_eq!(good(times(&[], None, How::Cancelled)), Some(false), "somebody waited in vain");
        assert_eq!(good(times(&[400_000], None, How::Cancelled)), Some(true));
        assert_eq!(good(times(&[400_000], Some(0.1), How::Failed)), Some(false));
        assert_eq!(good(Times { ended: None, ..times(&[], None, How::Answered) }), None, "it runs");
    }
}
