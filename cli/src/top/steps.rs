//! How many steps a second workers make, from how many they have made. Pure.

use std::collections::{BTreeMap, VecDeque};

use super::snapshot::{Text, Worker};

/// Seconds that are looked back.
const WINDOW: f64 = 5.0;

/// The latest counts of each worker: when, in seconds, and how many steps.
#[derive(Debug, Default)]
pub struct Steps(BTreeMap<Text, VecDeque<(f64, u64)>>);

impl Steps {
    /// Takes what workers say now. Those that are not among them are forgotten.
    pub fn take(&mut self, workers: &[Worker], now: f64) {
        self.0.retain(|id, _| workers.iter().any(|worker| worker.id == *id));
        for worker in workers {
            let Some(steps) = worker.steps else { continue };
            let counts = self.0.entry(worker.id.clone()).or_default();
            counts.push_back((now, steps));
            while counts.len() > 2 && counts.front().is_some_and(|(at, _)| now - at > WINDOW) {
                counts.pop_front();
            }
        }
    }

    /// Steps a second of a worker; `None` until it has told twice.
    pub fn per_second(&self, id: &Text) -> Option<f64> {
        let counts = self.0.get(id)?;
        let ((from, before), (to, after)) = (counts.front()?, counts.back()?);
        (to > from).then(|| after.saturating_sub(*before) as f64 / (to - from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_those_of_the_last_seconds() {
        let worker = |steps| Worker { id: Text::from("w1".to_owned()), steps, ..Worker::default() };
        let (mut steps, id) = (Steps::default(), Text::from("w1".to_owned()));
        steps.take(&[worker(Some(1000))], 1.0);
        assert_eq!(steps.per_second(&id), None);
        steps.take(&[worker(Some(1100))], 2.0);
        assert_eq!(steps.per_second(&id), Some(100.0));
        steps.take(&[worker(None)], 2.5);
        for second in 3..20 {
            steps.take(&[worker(Some(1100 + (second - 2) * 10))], second as f64);
        }
        assert_eq!(steps.per_second(&id), Some(10.0), "what was long ago does not count");
        steps.take(&[], 20.0);
        assert_eq!(steps.per_second(&id), None);
    }
}
