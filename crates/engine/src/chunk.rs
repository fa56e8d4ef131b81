//! How many tokens of a prompt a step computes, where attention costs more the longer the prompt is.
//!
//! A token attends to all tokens before it. So equal chunks take longer and longer, and who comes meanwhile, or decodes in the same step, waits
//! longer for a long prompt than for a short one. Chunks that cost the same have about the same time each.

/// Lengths are multiples of this, so that products of matrices have whole tiles.
const TILE: u32 = 16;

/// The length of a chunk that begins at `start`: what costs as much as `whole` tokens at the beginning of a prompt, but not less than `least`.
///
/// `pairs_per_token`: how many pairs of a token and one that it attends to cost as much as the rest of a token. 0: not known, then `whole`.
///
/// `n` tokens from `start` on cost `n · pairs_per_token + n · start + n² / 2` pairs.
pub(crate) fn chunk_at(start: u32, whole: u32, least: u32, pairs_per_token: u32) -> u32 {
    if pairs_per_token == 0 || start == 0 {
        return whole;
    }
    let (start, per_token, n) = (f64::from(start), f64::from(pairs_per_token), f64::from(whole));
    let (linear, most) = (per_token + start, n * per_token + n * n / 2.0);
    let length = (linear * linear + 2.0 * most).sqrt() - linear;
    let length = length as u32 / TILE * TILE;
    length.clamp(least.min(whole), whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_of_a_prompt_cost_the_same() {
        let cost = |start: u32, n: u32| f64::from(n) * (750.0 + f64::from(start) + f64::from(n) / 2.0);
        let (mut start, mut lengths) = (0, Vec::new());
        while start < 4000 {
            let n = chunk_at(start, 512, 16, 750);
            let share = cost(start, n) / cost(0, 512);
            assert!((0.75..=1.0).contains(&share), "{n} tokens from {start} cost {share}");
            lengths.push(n);
            start += n;
        }
        assert!(lengths.is_sorted_by(|one, next| one >= next), "{lengths:?}");
        assert_eq!((lengths[0], lengths[1]), (512, 352));
    }

    #[test]
    fn a_chunk_is_never_less_than_what_fills_the_hardware_nor_more_than_a_whole_one() {
        assert_eq!(chunk_at(1 << 30, 128, 32, 50), 32);
        assert_eq!(chunk_at(1 << 30, 128, 1, 50), 1, "a step always advances");
        assert_eq!(chunk_at(1 << 30, 128, 512, 50), 128);
        assert_eq!(chunk_at(u32::MAX, u32::MAX, 1, u32::MAX) % 16, 0);
    }

    #[test]
    fn without_a_known_cost_all_chunks_are_whole() {
        assert_eq!((chunk_at(5000, 128, 32, 0), chunk_at(0, 7, 1, 50)), (128, 7));
    }
}
