//! How far rows of logits are apart.

/// The largest difference of two rows, in standard deviations of the second.
pub fn distance(got: &[f32], want: &[f32]) -> f64 {
    let mean = want.iter().map(|&x| f64::from(x)).sum::<f64>() / want.len() as f64;
    let spread = want.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / want.len() as f64;
    let differences = got.iter().zip(want).map(|(&a, &b)| (f64::from(a) - f64::from(b)).abs());
    differences.fold(0.0, |most: f64, x| if x.is_nan() { f64::INFINITY } else { most.max(x) }) / spread.sqrt()
}
