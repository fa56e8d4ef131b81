//! How long handing KV over takes between two workers, by its bytes: `wait + bytes / rate`.

use std::time::Duration;

use crate::fit::Fit;

/// Learns how long transfers over one path take.
#[derive(Clone, Debug, Default)]
pub struct TransferModel {
    fit: Fit<2>,
}

/// How long transfers over one path take. Both are 0 or more.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct TransferCost {
    /// Seconds of any transfer.
    pub wait: f64,
    /// Seconds of each byte.
    pub byte: f64,
}

impl TransferModel {
    /// Adds a transfer of so many bytes that took so long.
    pub fn add(&mut self, bytes: u64, took: Duration) {
        self.fit.add([1.0, bytes as f64], took.as_secs_f64());
    }

    /// What is known so far; `None`: nothing yet.
    pub fn cost(&self) -> Option<TransferCost> {
        self.fit.coefficients().map(|[wait, byte]| TransferCost { wait, byte })
    }

    /// Median relative error of predictions lately.
    pub fn error(&self) -> Option<f64> {
        self.fit.error()
    }
}

impl TransferCost {
    /// How long a transfer of so many bytes takes.
    pub fn of(&self, bytes: u64) -> Duration {
        let seconds = self.wait + self.byte * bytes as f64;
        Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_learned_from_transfers_of_different_sizes() {
        let (mut model, truth) = (TransferModel::default(), TransferCost { wait: 3e-4, byte: 1e-9 });
        assert_eq!(model.cost(), None);
        for at in 1..100u64 {
            model.add(at * 1_000_000, truth.of(at * 1_000_000));
        }
        let found = model.cost().unwrap();
        assert!(
            (found.wait / truth.wait - 1.0).abs() < 0.05 && (found.byte / truth.byte - 1.0).abs() < 0.05,
            "{found:?}"
        );
        assert!(model.error().unwrap() < 0.05);
    }
}
