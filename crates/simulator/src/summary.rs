//! Results of runs.

use std::collections::BTreeMap;

use crate::Fault;

/// Results of a run, or the sum of several.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Summary {
    /// Requests whose answer is complete; each answer was compared with the one that its request yields alone.
    pub finished: u64,
    /// Requests whose client left, or whose router died.
    pub left: u64,
    /// Requests that ended with an error, by kind.
    pub failed: BTreeMap<String, u64>,
    /// Tokens that clients took.
    pub tokens: u64,
    /// Failures that requests recovered from, by leg.
    pub recoveries: BTreeMap<&'static str, u64>,
    /// Reservations made.
    pub handoffs: u64,
    /// Of these, verified; each was compared with the KV of its tokens.
    pub verified: u64,
    /// Of these, failed: by cause.
    pub handoffs_failed: BTreeMap<&'static str, u64>,
    /// Of these, withdrawn by their owner.
    pub withdrawn: u64,
    /// Prefixes that were fetched; each was compared with the KV of its tokens.
    pub fetched: u64,
    /// Prefixes that routers wanted fetched and that were not, by what became of them.
    pub fetches_failed: BTreeMap<&'static str, u64>,
    /// Pieces of what workers computed that KV stores took.
    pub kept: u64,
    /// Pieces of hot prefixes that idle workers took.
    pub hot: u64,
    /// Pieces that routers wanted kept and that were not, by what became of them.
    pub keeps_failed: BTreeMap<&'static str, u64>,
    /// Prefixes that workers took from KV stores.
    pub given: u64,
    /// Of these, what stores had only from processes that were gone.
    pub outlived: u64,
    /// Tokens of sequences whose KV came from a KV store, where the worker that took it computed on it.
    pub given_tokens: u64,
    /// Rows that were computed on fetched KV.
    pub rows_fetched: u64,
    /// Prefixes that were loaded from stores; each was compared with the KV of its tokens.
    pub stored: u64,
    /// Tokens of these that were not in the pool.
    pub stored_tokens: u64,
    /// Connections that joined a session over TCP beside its own.
    pub joined: u64,
    /// Connections that could not join: refused, broken or too late.
    pub left_out: u64,
    /// Sessions that were replaced by one over a better path.
    pub replaced: u64,
    /// Completions that overtook writes on other connections and had to wait for them.
    pub overtook: u64,
    /// Checks made, by invariant.
    pub looked: BTreeMap<&'static str, u64>,
    /// What engines did, by name. Some counts include only engines that lived to the end of their run.
    pub engines: BTreeMap<&'static str, u64>,
    /// Faults that struck.
    pub faults: BTreeMap<Fault, u64>,
    /// How often each event happened that a scenario may wait for.
    pub milestones: BTreeMap<&'static str, u64>,
    /// Rules of a scenario that struck.
    pub rules: u64,
    /// Events that were played.
    pub events: u64,
    /// Virtual time, microseconds.
    pub micros: u64,
}

impl Summary {
    /// Adds the results of other runs.
    pub fn add(&mut self, other: &Summary) {
        for (sum, more) in [
            (&mut self.finished, other.finished),
            (&mut self.left, other.left),
            (&mut self.tokens, other.tokens),
            (&mut self.handoffs, other.handoffs),
            (&mut self.verified, other.verified),
            (&mut self.withdrawn, other.withdrawn),
            (&mut self.fetched, other.fetched),
            (&mut self.rows_fetched, other.rows_fetched),
            (&mut self.kept, other.kept),
            (&mut self.hot, other.hot),
            (&mut self.given, other.given),
            (&mut self.outlived, other.outlived),
            (&mut self.given_tokens, other.given_tokens),
            (&mut self.stored, other.stored),
            (&mut self.stored_tokens, other.stored_tokens),
            (&mut self.joined, other.joined),
            (&mut self.left_out, other.left_out),
            (&mut self.replaced, other.replaced),
            (&mut self.overtook, other.overtook),
            (&mut self.rules, other.rules),
            (&mut self.events, other.events),
            (&mut self.micros, other.micros),
        ] {
            *sum += more;
        }
        add(&mut self.failed, &other.failed);
        add(&mut self.recoveries, &other.recoveries);
        add(&mut self.handoffs_failed, &other.handoffs_failed);
        add(&mut self.fetches_failed, &other.fetches_failed);
        add(&mut self.keeps_failed, &other.keeps_failed);
        add(&mut self.looked, &other.looked);
        add(&mut self.engines, &other.engines);
        add(&mut self.faults, &other.faults);
        add(&mut self.milestones, &other.milestones);
    }
}

fn add<K: Ord + Clone>(sum: &mut BTreeMap<K, u64>, more: &BTreeMap<K, u64>) {
    more.iter().for_each(|(key, count)| *sum.entry(key.clone()).or_default() += count);
}
