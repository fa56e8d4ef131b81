//! How fast KV leaves a worker for others, and comes from its own store.

use baton_types::WorkerId;

/// Bytes per second over a link of which nothing is known.
const UNKNOWN: f64 = 1e9;

/// What one worker says of its links. Empty: it says nothing.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Links {
    /// Bytes of KV that a token has.
    token_bytes: u32,
    /// Bytes per second to each worker, in the order of their ids.
    rates: Vec<(WorkerId, f64)>,
    /// Seconds that a byte takes, in the mean over these.
    usual: f64,
    /// Seconds that a token takes from the worker's own store into its pool; 0: it has no store.
    load: f64,
}

impl Links {
    /// Nothing is said.
    pub const NONE: Links = Links { token_bytes: 0, rates: Vec::new(), usual: 0.0, load: 0.0 };

    /// What was said: bytes of a token's KV, and bytes per second to each worker. Rates that cannot be are left out.
    pub fn new(token_bytes: u32, rates: impl Iterator<Item = (WorkerId, f64)>) -> Links {
        let mut rates: Vec<_> = rates.filter(|(_, rate)| rate.is_finite() && *rate >= 1.0).collect();
        rates.sort_unstable_by_key(|(worker, _)| *worker);
        let sum: f64 = rates.iter().map(|(_, rate)| 1.0 / rate).sum();
        Links { token_bytes, usual: sum / rates.len().max(1) as f64, rates, load: 0.0 }
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

    /// Seconds that the KV of a token takes to this worker; as long as is usual to others where it was not measured. 0: nothing was.
    pub fn token(&self, to: WorkerId) -> f64 {
        let known = self.rates.binary_search_by_key(&to, |(worker, _)| *worker);
        let byte = known.map_or(self.usual, |at| 1.0 / self.rates[at].1);
        byte * f64::from(self.token_bytes)
    }

    /// Whether KV goes to this worker over a session that is open. Workers tell the rates of open sessions only.
    pub fn is_open(&self, to: WorkerId) -> bool {
        self.rates.binary_search_by_key(&to, |(worker, _)| *worker).is_ok()
    }

    /// As [`Links::token`], but where none was measured at a nominal rate. None: the worker does not say how large its KV is.
    pub fn travels(&self, to: WorkerId) -> Option<f64> {
        let nominal = f64::from(self.token_bytes) / UNKNOWN;
        (self.token_bytes > 0).then(|| if self.rates.is_empty() { nominal } else { self.token(to) })
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
        assert_eq!([1, 2, 7].map(|to| links.token(id(to))), [0.002, 0.001, 0.0015]);
        assert_eq!((links.travels(id(1)), Links::new(1000, [].into_iter()).travels(id(1))), (Some(0.002), Some(1e-6)));
        assert_eq!([1, 2, 7].map(|to| links.is_open(id(to))), [true, true, false]);
        assert_eq!(Links::default().travels(id(1)), None);
        let load = |seconds| Links::NONE.with_load(seconds).load();
        assert_eq!([0.5, 0.0, -1.0, f64::NAN, f64::INFINITY].map(load), [Some(0.5), None, None, None, None]);
        assert_eq!((Links::default().token(id(1)), Links::new(9, odd.into_iter()).token(id(7))), (0.0, 0.0));
    }
}
