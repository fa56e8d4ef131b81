//! Workers, and pairs of a prefill and a decode worker, that do worse than the others. They are ejected: for a while no request is placed
//! on them, as long as there are others. Then one request tries them, and how it fares decides.
//!
//! A worker that answers every request with an error at once is always idle, and so attracts load. A pair whose workers cannot reach each
//! other fails every handoff, although each of the two works well with others.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_types::WorkerId;

/// Weight of the newest request in the means.
const WEIGHT: f64 = 1.0 / 8.0;
/// Share of failures from which on a worker is ejected. Six failures in a row reach it.
const FAILING: f64 = 0.5;
/// Requests that must have been seen before speeds are compared.
const ENOUGH: u32 = 8;
/// How many times as long as the median of the others a worker must take for a token to count as slow.
const SLOW: f64 = 4.0;
/// A difference of less than this, seconds a token, is not slow.
const SLOWER: f64 = 0.002;
/// A request counts as this many times as slow as the mean before it at most.
const MOST: f64 = 2.0;
/// The first ejection lasts this long, each further one twice as long as the one before, up to the second value.
const EJECTED: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));
/// The request that tries an ejected worker may take this long; then the next request tries.
const TRIAL: Duration = Duration::from_secs(30);

/// What is judged.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Subject {
    /// A worker by itself.
    Worker(WorkerId),
    /// A prefill worker and a decode worker, for handoffs between them.
    Pair {
        /// The prefill worker.
        prefill: WorkerId,
        /// The decode worker.
        decode: WorkerId,
    },
}

impl Subject {
    /// A stable word for metric labels.
    pub fn kind(self) -> &'static str {
        match self {
            Subject::Worker(_) => "worker",
            Subject::Pair { .. } => "pair",
        }
    }
}

impl std::fmt::Display for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Subject::Worker(id) => write!(f, "worker {id}"),
            Subject::Pair { prefill, decode } => write!(f, "handoffs from {prefill} to {decode}"),
        }
    }
}

/// How one request fared.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Verdict {
    /// With whom.
    pub on: Subject,
    /// When the request was placed there.
    pub placed: Instant,
    /// How.
    pub outcome: Outcome,
}

/// See [`Verdict`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Outcome {
    /// It failed, and another worker might not have.
    Failed,
    /// It went well. The time that a token took, if that says anything: computed, of a prompt; from one to the next, of an answer.
    Worked(Option<Duration>),
}

/// A change that people want to read of.
#[derive(Clone, PartialEq, Debug)]
pub enum Judgement {
    /// No request is placed on it for this long.
    Ejected {
        /// Who.
        on: Subject,
        /// For how long.
        time: Duration,
        /// Why, a sentence for people.
        why: String,
    },
    /// It takes part again.
    Readmitted(Subject),
}

#[derive(Clone, Debug, Default)]
struct Record {
    /// Share of failures, and mean seconds a token, the newest request with [`WEIGHT`].
    failing: f64,
    pace: Option<f64>,
    /// Requests since the record began.
    requests: u32,
    /// Ejections since the last long time without.
    ejections: u32,
}

#[derive(Clone, Copy, Debug)]
struct Ejected {
    until: Instant,
    /// A request is trying it; after this time another one may.
    trial: Option<Instant>,
}

/// The records of all workers and pairs that something is known of, and who of them is ejected: few, where placement looks them up.
#[derive(Clone, Debug, Default)]
pub(super) struct Outliers {
    records: BTreeMap<Subject, Record>,
    ejected: BTreeMap<Subject, Ejected>,
}

impl Outliers {
    /// Whether a request may be placed on it now.
    pub fn allows(&self, on: Subject, now: Instant) -> bool {
        self.ejected.get(&on).is_none_or(|e| e.until <= now && e.trial.is_none_or(|trial| trial <= now))
    }

    /// Whether it is ejected, or only on trial.
    pub fn is_ejected(&self, on: Subject) -> bool {
        self.ejected.contains_key(&on)
    }

    /// The pairs between which no handoff may be placed now.
    pub fn apart(&self, now: Instant) -> Vec<(WorkerId, WorkerId)> {
        let pair = |on: &Subject| match *on {
            Subject::Pair { prefill, decode } if !self.allows(*on, now) => Some((prefill, decode)),
            _ => None,
        };
        self.ejected.keys().filter_map(pair).collect()
    }

    /// A request was placed on it.
    pub fn placed(&mut self, on: Subject, now: Instant) {
        if let Some(ejected) = self.ejected.get_mut(&on).filter(|ejected| ejected.until <= now) {
            ejected.trial = Some(now + TRIAL);
        }
    }

    /// Forgets what is known of a worker and of all its pairs: another process, or one that was away.
    pub fn forget(&mut self, worker: WorkerId) {
        let other = |on: &Subject| match *on {
            Subject::Worker(id) => id != worker,
            Subject::Pair { prefill, decode } => prefill != worker && decode != worker,
        };
        self.records.retain(|on, _| other(on));
        self.ejected.retain(|on, _| other(on));
    }

    /// Takes in how a request fared. `equals` are the workers that could have run it as well, with `on` itself; of those, no more than half
    /// are ejected at a time. Pairs have none: where no handoff is possible, decode workers compute prompts themselves.
    pub fn judge(&mut self, verdict: Verdict, equals: &[WorkerId], now: Instant) -> Option<Judgement> {
        let Verdict { on, placed, outcome } = verdict;
        if matches!(on, Subject::Pair { .. }) && outcome != Outcome::Failed && !self.records.contains_key(&on) {
            return None;
        }
        let record = self.records.entry(on).or_default();
        match (self.ejected.get(&on), outcome) {
            // Requests from before its trial, which say nothing new.
            (Some(ejected), _) if ejected.trial.is_none_or(|until| placed + TRIAL < until) => return None,
            (Some(_), Outcome::Failed) => return Some(self.eject(on, "the request that tried it failed, too", now)),
            (Some(_), Outcome::Worked(_)) => {
                *record = Record { ejections: record.ejections, ..Record::default() };
                self.ejected.remove(&on);
                return Some(Judgement::Readmitted(on));
            }
            (None, _) => record.add(outcome),
        }
        let why = record.fails().or_else(|| self.is_slow(on, equals))?;
        let out = equals.iter().filter(|id| self.is_ejected(Subject::Worker(**id))).count();
        let may = matches!(on, Subject::Pair { .. }) || 2 * (out + 1) <= equals.len();
        may.then(|| self.eject(on, &why, now))
    }

    fn eject(&mut self, on: Subject, why: &str, now: Instant) -> Judgement {
        let record = self.records.entry(on).or_default();
        let time = EJECTED.0.saturating_mul(1 << record.ejections.min(8)).min(EJECTED.1);
        record.ejections += 1;
        self.ejected.insert(on, Ejected { until: now + time, trial: None });
        Judgement::Ejected { on, time, why: why.to_owned() }
    }

    /// Why a worker counts as slow beside its equals.
    fn is_slow(&self, on: Subject, equals: &[WorkerId]) -> Option<String> {
        let pace = |on: Subject| {
            self.records.get(&on).filter(|record| record.requests >= ENOUGH).and_then(|record| record.pace)
        };
        let own = pace(on)?;
        let others =
            equals.iter().map(|id| Subject::Worker(*id)).filter(|other| *other != on && !self.is_ejected(*other));
        let mut others: Vec<f64> = others.filter_map(pace).collect();
        others.sort_by(f64::total_cmp);
        let median = *others.get(others.len() / 2)?;
        let slow = own > SLOW * median && own > median + SLOWER;
        slow.then(|| format!("a token takes {:.1} ms, and {:.1} ms elsewhere", own * 1e3, median * 1e3))
    }
}

impl Record {
    fn add(&mut self, outcome: Outcome) {
        self.requests = self.requests.saturating_add(1);
        self.failing += (f64::from(outcome == Outcome::Failed) - self.failing) * WEIGHT;
        if let Outcome::Worked(Some(time)) = outcome {
            // No single request makes a worker slow: it may have waited, or been preempted.
            let time = self.pace.map_or(time.as_secs_f64(), |mean| time.as_secs_f64().min(MOST * mean));
            self.pace = Some(self.pace.map_or(time, |mean| mean + (time - mean) * WEIGHT));
        }
        // It has done well for long.
        if self.requests >= 8 * ENOUGH && self.failing < FAILING / 4.0 {
            self.ejections = 0;
        }
    }

    fn fails(&self) -> Option<String> {
        let share = self.failing * 100.0;
        (self.failing >= FAILING).then(|| format!("{share:.0}% of its last requests failed"))
    }
}
