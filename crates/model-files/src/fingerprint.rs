//! The model's fingerprint. KV from one worker is of use to another only if their fingerprints are equal (I2).
//!
//! It depends on the configuration and on names, types, shapes and sampled bytes of the tensors, not on paths, mapping or host.

use std::collections::BTreeMap;

use baton_types::hash_bytes;

use crate::names::Naming;
use crate::store::{Entry, TensorStore};
use crate::{ModelConfig, TensorName};

/// Samples of each tensor: enough to tell fine-tunes apart, but few enough not to read the whole file.
const SAMPLES: usize = 16;
const SAMPLE_BYTES: usize = 64;

pub(crate) fn fingerprint(
    config: &ModelConfig,
    store: &TensorStore,
    bound: &BTreeMap<TensorName, Entry>,
    naming: &Naming,
) -> u64 {
    // Debug prints every field, and prints floats so that they read back the same.
    let mut state = hash_bytes(0, format!("{config:?}").as_bytes());
    for (name, entry) in bound {
        let facts = format!("{} {:?} {:?}", naming.text(*name), entry.dtype, entry.shape);
        state = hash_bytes(state, facts.as_bytes());
        for sample in samples(store.bytes_of(entry)) {
            state = hash_bytes(state, sample);
        }
    }
    state
}

/// Evenly spread samples of a tensor's bytes, including its beginning and its end.
fn samples(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let last = bytes.len().saturating_sub(SAMPLE_BYTES);
    (0..SAMPLES).map(move |i| {
        let start = (last as u128 * i as u128 / (SAMPLES - 1) as u128) as usize;
        &bytes[start..bytes.len().min(start + SAMPLE_BYTES)]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_reach_both_ends_and_fit_short_tensors() {
        for length in [0, 1, 63, 64, 65, 100_000] {
            let bytes = vec![0u8; length];
            let base = bytes.as_ptr() as usize;
            let ranges: Vec<(usize, usize)> = samples(&bytes).map(|s| (s.as_ptr() as usize - base, s.len())).collect();
            assert_eq!(ranges.len(), SAMPLES);
            assert_eq!(ranges[0].0, 0);
            let (start, len) = ranges[SAMPLES - 1];
            assert_eq!(start + len, length);
        }
    }
}
