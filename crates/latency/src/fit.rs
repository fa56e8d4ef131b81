//! A linear model with coefficients of 0 or more, fitted while measurements arrive.
//!
//! Least squares of the *relative* error, which is the error divided by what was measured or predicted, whichever is more: a step of 1 ms and one
//! of 1 s count the same. Recursive: a measurement is added to two sums, which forget at a fixed rate, and the coefficients are solved from them
//! again. Two additions make it safe to leave alone for months:
//!
//! - **Proximity.** Each solution also stays near the one before. A direction that measurements no longer say anything of, because nothing
//!   excites it, keeps its value, where plain recursive least squares would let it drift (estimator windup).
//! - **Outliers.** A measurement far from its prediction, by the typical error lately, weighs less (Huber, "Robust estimation of a location
//!   parameter", 1964). When the machine itself has changed, the typical error grows with every measurement, and so they count again.

/// What remains of a measurement's weight after each later one: about a third after 1,000.
const KEPT: f64 = 0.999;
/// Measurements before an error says anything, and so before one can be an outlier.
const ENOUGH: u64 = 8;
/// How much the solution before counts, in measurements.
const PROXIMITY: f64 = 1e-3;
/// A relative error this many times the typical one begins to weigh less.
const HUBER: f64 = 3.0;
/// The typical relative error is never taken for less: timers and schedulers have noise of their own.
const LEAST_ERROR: f64 = 0.01;
/// Errors are never relative to less than this share of the mean measurement.
const LEAST_SCALE: f64 = 0.25;
/// How fast the typical error follows.
const FOLLOW: f64 = 0.05;

/// A linear model of `N` features.
#[derive(Clone, Debug)]
pub(crate) struct Fit<const N: usize> {
    /// Weighted sum of the outer products of the features, each divided by its measurement's scale.
    products: [[f64; N]; N],
    /// Weighted sum of the features times the measurement, both divided by its scale.
    sums: [f64; N],
    /// Largest value of each feature so far, divided by its measurement's scale: the scale of [`PROXIMITY`].
    scale: [f64; N],
    coefficients: [f64; N],
    seen: u64,
    /// Mean of the measurements so far.
    mean: f64,
    /// Moving median of the relative error of predictions.
    error: f64,
}

impl<const N: usize> Default for Fit<N> {
    fn default() -> Self {
        Fit {
            products: [[0.0; N]; N],
            sums: [0.0; N],
            scale: [0.0; N],
            coefficients: [0.0; N],
            seen: 0,
            mean: 0.0,
            error: 0.1,
        }
    }
}

impl<const N: usize> Fit<N> {
    /// Adds a measurement. What is not finite, or not above 0, is ignored.
    pub(crate) fn add(&mut self, features: [f64; N], measured: f64) {
        if !(measured.is_finite() && measured > 0.0 && features.iter().all(|f| f.is_finite() && *f >= 0.0)) {
            return;
        }
        let (weight, scale) = self.weigh(&features, measured);
        let row = features.map(|feature| feature / scale);
        for (i, a) in row.into_iter().enumerate() {
            self.scale[i] = self.scale[i].max(a);
            self.sums[i] = self.sums[i] * KEPT + weight * a * measured / scale;
            for (sum, b) in self.products[i].iter_mut().zip(row) {
                *sum = *sum * KEPT + weight * a * b;
            }
        }
        self.seen += 1;
        self.mean += (measured - self.mean) / self.seen as f64;
        self.solve();
    }

    /// The coefficients; `None` before the first measurement.
    pub(crate) fn coefficients(&self) -> Option<[f64; N]> {
        (self.seen > 0).then_some(self.coefficients)
    }

    /// Moving median of the relative error, each prediction made before its measurement was added; `None` before there were enough.
    pub(crate) fn error(&self) -> Option<f64> {
        (self.seen > ENOUGH).then_some(self.error)
    }

    /// The weight of a measurement by how far it is from its prediction, and what errors of it are relative to. Also follows the typical error.
    fn weigh(&mut self, features: &[f64; N], measured: f64) -> (f64, f64) {
        // What is far too short would outweigh all others.
        let least = self.mean * LEAST_SCALE;
        if self.seen < ENOUGH {
            return (1.0, measured.max(least));
        }
        let predicted: f64 = features.iter().zip(self.coefficients).map(|(feature, c)| feature * c).sum();
        let scale = measured.max(predicted).max(least);
        let error = (measured - predicted).abs() / scale;
        let typical = self.error.max(LEAST_ERROR);
        // A step towards the measurement by a share of the value, whichever its distance: this finds the median.
        self.error = if error > self.error { typical * (1.0 + FOLLOW) } else { self.error * (1.0 - FOLLOW) };
        ((HUBER * typical / error.max(1e-12)).min(1.0), scale)
    }

    /// Solves the sums for coefficients of 0 or more: without the bound first, then again without the most negative one, until none is.
    fn solve(&mut self) {
        let (mut matrix, mut right) = (self.products, self.sums);
        for i in 0..N {
            let near = PROXIMITY * self.scale[i] * self.scale[i];
            matrix[i][i] += near;
            right[i] += near * self.coefficients[i];
        }
        let mut used = self.scale.map(|scale| scale > 0.0);
        for _ in 0..N {
            let Some(solution) = solve_among(&matrix, &right, &used) else { return };
            let lowest = (0..N).filter(|i| used[*i]).min_by(|a, b| solution[*a].total_cmp(&solution[*b]));
            match lowest {
                Some(i) if solution[i] < 0.0 => used[i] = false,
                _ => {
                    self.coefficients = solution;
                    return;
                }
            }
        }
    }
}

/// Solves `matrix · x = right` for the variables that are `used`; the others are 0. `None`: the matrix is singular.
fn solve_among<const N: usize>(matrix: &[[f64; N]; N], right: &[f64; N], used: &[bool; N]) -> Option<[f64; N]> {
    let (mut m, mut x) = (*matrix, *right);
    for i in (0..N).filter(|i| !used[*i]) {
        m[i] = [0.0; N];
        m.iter_mut().for_each(|row| row[i] = 0.0);
        (m[i][i], x[i]) = (1.0, 0.0);
    }
    // The matrix is symmetric and positive definite, so that no row has to be exchanged.
    for i in 0..N {
        let pivot = m[i][i];
        if !(pivot > 0.0 && pivot.is_finite()) {
            return None;
        }
        let (row, value) = (m[i], x[i]);
        for j in i + 1..N {
            let factor = m[j][i] / pivot;
            m[j].iter_mut().zip(row).for_each(|(a, b)| *a -= factor * b);
            x[j] -= factor * value;
        }
    }
    for i in (0..N).rev() {
        let rest: f64 = (i + 1..N).map(|j| m[i][j] * x[j]).sum();
        x[i] = (x[i] - rest) / m[i][i];
    }
    x.iter().all(|x| x.is_finite()).then_some(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sequence of numbers that look random, from 0 to 1.
    fn noise(state: &mut u64) -> f64 {
        *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (*state >> 40) as f64 / f64::from(1 << 24)
    }

    fn fitted(measurements: u64, truth: [f64; 3], spread: f64) -> Fit<3> {
        let (mut fit, mut state) = (Fit::default(), 7);
        more(&mut fit, &mut state, measurements, truth, spread);
        fit
    }

    fn more(fit: &mut Fit<3>, state: &mut u64, measurements: u64, truth: [f64; 3], spread: f64) {
        for _ in 0..measurements {
            let features = [1.0, (noise(state) * 64.0).ceil(), noise(state) * 1e5];
            let exact: f64 = features.iter().zip(truth).map(|(f, c)| f * c).sum();
            fit.add(features, exact * (1.0 + spread * (noise(state) - 0.5)));
        }
    }

    fn near(fit: &Fit<3>, truth: [f64; 3], share: f64) {
        let found = fit.coefficients().unwrap();
        for (found, truth) in found.iter().zip(truth) {
            assert!((found - truth).abs() <= share * truth, "{found} where the truth is {truth}");
        }
    }

    const TRUTH: [f64; 3] = [5e-3, 2e-4, 1e-7];

    #[test]
    fn the_truth_is_found_from_exact_and_from_noisy_measurements() {
        near(&fitted(50, TRUTH, 0.0), TRUTH, 1e-2);
        near(&fitted(2000, TRUTH, 0.2), TRUTH, 0.05);
        let error = fitted(2000, TRUTH, 0.2).error().unwrap();
        assert!((0.03..0.08).contains(&error), "the median of |noise| is a quarter of its range: {error}");
    }

    #[test]
    fn nothing_is_said_before_the_first_measurement_and_nonsense_is_ignored() {
        let mut fit = Fit::<3>::default();
        assert_eq!((fit.coefficients(), fit.error()), (None, None));
        for measured in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            fit.add([1.0, 1.0, 1.0], measured);
        }
        fit.add([1.0, f64::NAN, 1.0], 1.0);
        assert_eq!(fit.coefficients(), None);
        assert_eq!(fitted(ENOUGH, TRUTH, 0.0).error(), None);
        assert!(fitted(ENOUGH + 1, TRUTH, 0.0).error().is_some());
        fit.add([1.0, 8.0, 100.0], 0.01);
        let [base, token, pair] = fit.coefficients().unwrap();
        let predicted = base + 8.0 * token + 100.0 * pair;
        assert!((predicted / 0.01 - 1.0).abs() < 1e-2, "one measurement predicts its like: {predicted}");
    }

    #[test]
    fn a_tiny_measurement_at_the_beginning_does_not_stay_for_long() {
        let (mut fit, mut state) = (fitted(2, TRUTH, 0.05), 9);
        fit.add([1.0, 8.0, 100.0], 1e-6);
        more(&mut fit, &mut state, 2000, TRUTH, 0.05);
        near(&fit, TRUTH, 0.15);
    }

    #[test]
    fn coefficients_are_never_negative() {
        let (mut fit, mut state) = (Fit::<2>::default(), 3);
        for _ in 0..200 {
            let x = noise(&mut state) * 10.0;
            fit.add([1.0, x], 20.0 - x);
        }
        let [base, slope] = fit.coefficients().unwrap();
        assert!(slope == 0.0 && (10.0..20.0).contains(&base), "{base} {slope}");
    }

    /// Estimator windup: what is no longer excited must stay.
    #[test]
    fn what_is_measured_no_longer_keeps_its_value() {
        let (mut fit, mut state) = (fitted(1000, TRUTH, 0.05), 11);
        for _ in 0..100_000 {
            let spread = 1.0 + 0.05 * (noise(&mut state) - 0.5);
            fit.add([1.0, 4.0, 0.0], spread * (TRUTH[0] + 4.0 * TRUTH[1]));
        }
        near(&fit, TRUTH, 0.15);
    }

    #[test]
    fn outliers_hardly_move_it_and_a_new_machine_does() {
        let (mut fit, mut state) = (fitted(1000, TRUTH, 0.05), 5);
        for at in 0..1000 {
            more(&mut fit, &mut state, 1, TRUTH, 0.05);
            if at % 20 == 0 {
                fit.add([1.0, 8.0, 100.0], if at % 40 == 0 { 1.0 } else { 1e-4 });
            }
        }
        near(&fit, TRUTH, 0.1);
        let slower = TRUTH.map(|c| 3.0 * c);
        more(&mut fit, &mut state, 5000, slower, 0.05);
        near(&fit, slower, 0.1);
    }
}
