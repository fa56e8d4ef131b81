//! Rotary embedding tables, computed in f64 and rounded once.

use baton_kernels::{Backend, KernelError, Rope};
use baton_model_files::{RopeConfig, RopeScaling};

/// Rotation angle per token, in radians, of dimension pair `i` of `head_dim / 2`.
fn frequency(config: &RopeConfig, i: usize, head_dim: usize) -> f64 {
    let base = (config.theta as f64).powf(-2.0 * i as f64 / head_dim as f64);
    if let Some(factors) = &config.rope_freq_factors {
        return factors.get(i).map_or(base, |&f| base / f as f64);
    }
    match config.scaling {
        RopeScaling::None => base,
        RopeScaling::Linear { factor } => base / factor as f64,
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            let (factor, low, high) = (factor as f64, low_freq_factor as f64, high_freq_factor as f64);
            let turns = original_context as f64 * base / (2.0 * std::f64::consts::PI);
            // Pairs that turn often within the original context keep their speed. Pairs that turn rarely slow down. Others blend.
            let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
            base * (keep + (1.0 - keep) / factor)
        }
    }
}

/// Cosine and sine tables, each `[positions, head_dim / 2]`.
pub(crate) fn tables<B: Backend>(
    backend: &B,
    config: &RopeConfig,
    positions: usize,
    head_dim: usize,
) -> Result<Rope<B::Buffer>, KernelError> {
    let frequencies: Vec<f64> = (0..head_dim / 2).map(|i| frequency(config, i, head_dim)).collect();
    let table = |f: fn(f64) -> f64| -> Vec<f32> {
        (0..positions).flat_map(|p| frequencies.iter().map(move |w| f(p as f64 * w) as f32)).collect()
    };
    Ok(Rope { cos: backend.upload(&table(f64::cos))?, sin: backend.upload(&table(f64::sin))? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(scaling: RopeScaling) -> RopeConfig {
        RopeConfig { theta: 10_000.0, scaling, rope_freq_factors: None }
    }

    #[test]
    fn llama3_scaling_keeps_fast_pairs_and_slows_slow_ones() {
        let plain = config(RopeScaling::None);
        let scaled = config(RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        });
        assert_eq!(frequency(&scaled, 0, 128), frequency(&plain, 0, 128));
        assert_eq!(frequency(&scaled, 63, 128), frequency(&plain, 63, 128) / 8.0);
        let (mid_scaled, mid_plain) = (frequency(&scaled, 46, 128), frequency(&plain, 46, 128));
        assert!(mid_scaled < mid_plain && mid_scaled > mid_plain / 8.0);
    }

    #[test]
    fn linear_scaling_and_file_factors_divide() {
        let plain = config(RopeScaling::None);
        assert_eq!(frequency(&config(RopeScaling::Linear { factor: 4.0 }), 5, 64), frequency(&plain, 5, 64) / 4.0);
        let file = RopeConfig { rope_freq_factors: Some(vec![2.0; 32]), ..plain.clone() };
        assert_eq!(frequency(&file, 5, 64), frequency(&plain, 5, 64) / 2.0);
    }
}
