//! How fast KV leaves a worker for others, and comes from its own store.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use baton_types::{WorkerId, mix};

/// Bytes per second over a link of which nothing is known.
const UNKNOWN: f64 = 1e9;

/// Ids of workers, which anybody in the cluster may choose, but nobody else.
#[derive(Clone, Copy, Debug, Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = mix(self.0 ^ value);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// What one worker says of its links. Empty: it says nothing.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Links {
    /// Bytes of KV that a token has.
    token_bytes: u32,
    /// Bytes per second to each worker. A placement looks up hundreds of them, each in another worker's links: hashed, that is one or two lines of
    /// memory.
    rates: HashMap<WorkerId, f64, BuildHasherDefault<IdHasher>>,
    /// Seconds that a byte takes, in the mean over these.
    usual: f64,
    /// Seconds that a token takes from the worker's own store into its pool; 0: it has no store.
    load: f64,
}

/// The link to one worker.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Link {
    /// Seconds that the KV of a token takes; as long as is usual to others where it was not measured. 0: nothing was.
    pub token: f64,
    /// A session is open.
    pub open: bool,
}

impl Links {
    /// Nothing is said.
    pub const NONE: Links =
        Links { token_bytes: 0, rates: HashMap::with_hasher(BuildHasherDefault::new()), usual: 0.0, load: 0.0 };

    /// What was said: bytes of a token's KV, and bytes per second to each worker. Rates that cannot be are left out.
    pub fn new(token_bytes: u32, rates: impl Iterator<Item = (WorkerId, f64)>) -> Links {
        let mut rates: Vec<_> = rates.filter(|(_, rate)| rate.is_finite() && *rate >= 1.0).collect();
        rates.sort_unstable_by_key(|(worker, _)| *worker);
        let sum: f64 = rates.iter().map(|(_, rate)| 1.0 / rate).sum();
        let usual = sum / rates.len().max(1) as f64;
        Links { token_bytes, usual, rates: rates.into_iter().collect(), load: 0.0 }
    }

    /// The same, with the seconds that a token takes from the worker's own store. Not finite, or not above 0: it has no store.
    #[must_use]
    pub fn with_load(self, seconds: f64) -> Links {
        Links { load: if seconds.is_finite() { seconds.max(0.0) } else { 0.0 }, ..self }
    }

    /// Seconds that the KV of a token takes from the worker's own store; `None`: it has none.
    pub fn load(&self) -> Option<f64> {
        (self.load > 0.0).then_some(self.load)
    }

    /// Whether anything was said, and is not out of date.
    pub fn known(&self) -> bool {
        self.token_bytes > 0
    }

    fn rate(&self, to: WorkerId) -> Option<f64> {
        self.rates.get(&to).copied()
    }

    /// The link to this worker.
    pub fn to(&self, to: WorkerId) -> Link {
        let rate = self.rate(to);
        let byte = rate.map_or(self.usual, |rate| 1.0 / rate);
        Link { token: byte * f64::from(self.token_bytes), open: rate.is_some() }
    }

    /// Whether KV goes to this worker over a session that is open. Workers tell the rates of open sessions only.
    pub fn is_open(&self, to: WorkerId) -> bool {
        self.rate(to).is_some()
    }

    /// Seconds that the KV of a token takes to this worker; where no rate at all was measured, at a nominal one. None: the worker
    /// does not say how large its KV is.
    pub fn travels(&self, to: WorkerId) -> Option<f64> {
        let nominal = f64::from(self.token_bytes) / UNKNOWN;
        self.known().then(|| if self.rates.is_empty() { nominal } else { self.to(to).token })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_measured_is_as_fast_as_is_usual() {
        let id = WorkerId;
        let odd = [(id(7), f64::NAN), (id(8), 0.0), (id(9), -1.0)];
        let links = Links::new(1000, [(id(2), 1e6), (id(1), 5e5)].into_iter().chain(odd));
        assert_eq!([1, 2, 7].map(|to| links.to(id(to)).token), [0.002, 0.001, 0.0015]);
        assert_eq!((links.travels(id(1)), Links::new(1000, [].into_iter()).travels(id(1))), (Some(0.002), Some(1e-6)));
        assert_eq!([1, 2, 7].map(|to| links.is_open(id(to))), [true, true, false]);
        assert_eq!(Links::default().travels(id(1)), None);
        let load = |seconds| Links::NONE.with_load(seconds).load();
        assert_eq!([0.5, 0.0, -1.0, f64::NAN, f64::INFINITY].map(load), [Some(0.5), None, None, None, None]);
        assert_eq!((Links::default().to(id(1)).token, Links::new(9, odd.into_iter()).to(id(7)).token), (0.0, 0.0));
    }
}
