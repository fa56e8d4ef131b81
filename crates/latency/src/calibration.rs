//! Corrects predictions by what came of earlier ones.

/// The longest delay, in seconds.
const LONGEST: f64 = 0.05;
/// A delay moves by this share of what was measured, with each measurement.
const STEP: f64 = 0.02;
/// Measurements before an error says anything.
const ENOUGH: u64 = 8;
/// How fast the typical error follows.
const FOLLOW: f64 = 0.05;

/// Learns what predictions leave out whatever the load: messages on their way, and what happens between steps. It is the moving median of
/// measured - predicted. What comes of a long queue is known only when the queue is over, so nothing is learned of queues here: who admits
/// requests by what it learned so late admits too many, and then too few.
#[derive(Clone, Debug, Default)]
pub struct Calibration {
    delay: f64,
    /// The least delay, in seconds.
    least: f64,
    seen: u64,
    error: f64,
}

impl Calibration {
    /// Learns as well by how much predictions are too long. Not for predictions by which requests are admitted: what is too long there leaves room for
    /// what is not known.
    pub fn either_way() -> Calibration {
        Calibration { least: -LONGEST, ..Calibration::default() }
    }

    /// A time in seconds was measured that had been predicted as so much, without the delay.
    pub fn add(&mut self, predicted: f64, measured: f64) {
        if !(predicted.is_finite() && measured.is_finite() && predicted > 0.0 && measured > 0.0) {
            return;
        }
        self.compare(predicted + self.delay, measured);
        let step = if measured > predicted + self.delay { STEP * measured } else { -STEP * measured };
        self.delay = (self.delay + step).clamp(self.least, LONGEST);
    }

    /// A time in seconds was measured that had been expected to be so much; nothing is learned from it but how good predictions are.
    pub fn compare(&mut self, expected: f64, measured: f64) {
        let error = (measured - expected).abs() / measured.max(1e-9);
        self.seen += 1;
        // A step towards the measurement by a share of the value, whichever its distance: this finds the median.
        let typical = if self.seen == 1 { error } else { self.error };
        self.error = if error > typical { typical.max(0.01) * (1.0 + FOLLOW) } else { typical * (1.0 - FOLLOW) };
    }

    /// What to add to predictions, in seconds.
    pub fn delay(&self) -> f64 {
        self.delay
    }

    /// Median relative error of predictions lately, with the delay; `None` before there were enough.
    pub fn error(&self) -> Option<f64> {
        (self.seen > ENOUGH).then_some(self.error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_predictions_leave_out_is_learned() {
        let mut calibration = Calibration::default();
        assert_eq!((calibration.error(), calibration.delay()), (None, 0.0));
        for at in 0..2000 {
            let predicted = 0.01 + f64::from(at * 37 % 50) / 1000.0;
            calibration.add(predicted, 0.005 + predicted);
        }
        assert!((0.004..0.006).contains(&calibration.delay()), "{calibration:?}");
        assert!(calibration.error().unwrap() < 0.05);
    }

    #[test]
    fn what_is_too_long_is_learned_where_that_is_wanted() {
        for (mut calibration, least, most) in
            [(Calibration::default(), 0.0, 0.0), (Calibration::either_way(), -0.0011, -0.0009)]
        {
            (0..2000).for_each(|_| calibration.add(0.01, 0.009));
            assert!((least..=most).contains(&calibration.delay()), "{calibration:?}");
        }
    }

    #[test]
    fn outliers_and_nonsense_hardly_move_it() {
        let mut calibration = Calibration::default();
        for at in 0..1000 {
            calibration.add(0.1, if at % 10 == 0 { 0.5 } else { 0.11 });
            for nonsense in [0.0, -1.0, f64::NAN, f64::INFINITY] {
                calibration.add(1.0, nonsense);
                calibration.add(nonsense, 1.0);
            }
        }
        assert!((0.005..0.025).contains(&calibration.delay()), "{calibration:?}");
        (0..1000).for_each(|_| calibration.add(1.0, 1e6));
        assert_eq!(calibration.delay(), LONGEST);
        (0..1000).for_each(|_| calibration.add(1.0, 0.5));
        assert_eq!(calibration.delay(), 0.0);
    }
}
