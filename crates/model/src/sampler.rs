//! Chooses tokens. Randomness is a function of (seed, token index) only, so an answer does not depend on its route (I1).
//!
//! Order: the constraint's mask, penalties, logit bias, temperature, top-k, top-p, min-p, one draw. Log probabilities are
//! those of the model's own logits, before any of that. Ties go to the lower id.

use baton_engine::Sample;
use baton_grammar::{GrammarError, Matchers};
use baton_types::{SamplingParams, TokenOut, digest_f32};

/// Candidates looked at before the whole vocabulary is sorted for top-p.
const FIRST_LOOK: usize = 512;

/// Reusable memory for sampling from one vocabulary.
pub struct Sampler {
    candidates: Vec<(f32, u32)>,
    seen: Vec<u32>,
    /// Logits as the model gave them, kept while penalties change them, when log probabilities are asked for.
    raw: Vec<f32>,
    matchers: Option<Matchers>,
}

impl Sampler {
    /// For logits of `vocab` tokens; without constraints.
    pub fn new(vocab: usize) -> Self {
        let (candidates, raw) = (Vec::with_capacity(vocab), Vec::with_capacity(vocab));
        Sampler { candidates, seen: Vec::new(), raw, matchers: None }
    }

    /// Answers under a constraint are matched by these.
    pub fn with_constraints(self, matchers: Matchers) -> Self {
        Sampler { matchers: Some(matchers), ..self }
    }

    /// The next token, or in its place why there is none. Overwrites `logits` (`[vocab]`).
    pub fn sample(&mut self, logits: &mut [f32], sample: &Sample<'_>) -> TokenOut {
        self.try_sample(logits, sample).unwrap_or_else(|e| TokenOut {
            index: sample.index,
            failed: Some(e.to_string()),
            ..TokenOut::default()
        })
    }

    fn try_sample(&mut self, logits: &mut [f32], sample: &Sample<'_>) -> Result<TokenOut, GrammarError> {
        let params = sample.params;
        let Some(count) = params.top_logprobs else {
            return Ok(TokenOut { index: sample.index, id: self.choose(logits, sample)?, ..TokenOut::default() });
        };
        let log_sum = log_sum_exp(logits);
        let logprob = |x: f32| (x as f64 - log_sum) as f32;
        self.fill(logits, 1.0);
        self.keep_first(count as usize);
        let top = self.candidates.iter().map(|&(x, id)| (id, logprob(x))).collect();
        self.raw.clear();
        self.raw.extend_from_slice(logits);
        let id = self.choose(logits, sample)?;
        let logprob = Some(logprob(self.raw[id as usize]));
        let logits_digest = Some(digest_f32(&self.raw));
        Ok(TokenOut { index: sample.index, id, logprob, top, logits_digest, failed: None })
    }

    fn choose(&mut self, logits: &mut [f32], sample: &Sample<'_>) -> Result<u32, GrammarError> {
        let params = sample.params;
        if let Some(constraint) = &params.constraint {
            let matchers = self
                .matchers
                .as_mut()
                .ok_or_else(|| GrammarError::Vocabulary("this sampler was made without one".to_owned()))?;
            matchers.mask(constraint, sample.generated, &params.stop_token_ids, logits)?;
        }
        self.penalise(logits, sample);
        let id = if params.greedy() { argmax(logits) } else { self.draw(logits, params, sample.index) };
        if let Some(matchers) = self.matchers.as_mut().filter(|_| params.constraint.is_some())
            && params.stop_token_ids.contains(&id)
        {
            matchers.ended();
        }
        Ok(id)
    }

    fn penalise(&mut self, logits: &mut [f32], sample: &Sample<'_>) {
        let p = sample.params;
        if p.repetition_penalty != 1.0 {
            self.seen.clear();
            self.seen.extend(sample.prompt.iter().chain(sample.generated));
            self.seen.sort_unstable();
            self.seen.dedup();
            for &id in &self.seen {
                let x = &mut logits[id as usize];
                *x = if *x > 0.0 { *x / p.repetition_penalty } else { *x * p.repetition_penalty };
            }
        }
        if p.presence_penalty != 0.0 || p.frequency_penalty != 0.0 {
            self.seen.clear();
            self.seen.extend(sample.generated);
            self.seen.sort_unstable();
            for run in self.seen.chunk_by(|a, b| a == b) {
                logits[run[0] as usize] -= p.presence_penalty + p.frequency_penalty * run.len() as f32;
            }
        }
        for &(id, bias) in &p.logit_bias {
            if let Some(x) = logits.get_mut(id as usize) {
                *x += bias;
            }
        }
    }

    fn fill(&mut self, logits: &[f32], temperature: f32) {
        self.candidates.clear();
        self.candidates.extend(logits.iter().enumerate().map(|(id, &x)| (x / temperature, id as u32)));
    }

    /// Keeps the `n` most likely candidates, most likely first.
    fn keep_first(&mut self, n: usize) {
        let order = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        if n == 0 {
            self.candidates.clear();
        } else if n < self.candidates.len() {
            self.candidates.select_nth_unstable_by(n - 1, order);
            self.candidates.truncate(n);
        }
        self.candidates.sort_unstable_by(order);
    }

    fn draw(&mut self, logits: &[f32], params: &SamplingParams, index: u32) -> u32 {
        let largest = logits[argmax(logits) as usize] / params.temperature;
        let uniform = uniform(params.seed, index);
        let weight = |x: f32| exp((x - largest) as f64);
        let wanted = if params.top_k == 0 { logits.len() } else { params.top_k as usize };
        if wanted >= logits.len() && params.top_p >= 1.0 && params.min_p <= 0.0 {
            self.fill(logits, params.temperature);
        } else {
            self.filter(logits, params, wanted, largest);
        }
        let total: f64 = self.candidates.iter().map(|c| weight(c.0)).sum();
        let mut left = uniform * total;
        for &(x, id) in &self.candidates {
            left -= weight(x);
            if left < 0.0 {
                return id;
            }
        }
        // Rounding left a crumb: the last candidate that can be drawn at all.
        self.candidates.iter().rev().find(|c| weight(c.0) > 0.0).map_or_else(|| argmax(logits), |c| c.1)
    }

    /// Leaves the candidates that pass top-k, top-p and min-p, most likely first.
    fn filter(&mut self, logits: &[f32], params: &SamplingParams, wanted: usize, largest: f32) {
        let weight = |x: f32| exp((x - largest) as f64);
        self.fill(logits, params.temperature);
        let total: f64 = if wanted >= logits.len() { self.candidates.iter().map(|c| weight(c.0)).sum() } else { 0.0 };
        let mut look = if wanted >= logits.len() { FIRST_LOOK.min(logits.len()) } else { wanted };
        loop {
            self.keep_first(look);
            // After top-k, top-p is a share of what top-k kept.
            let whole = if wanted >= logits.len() { total } else { self.candidates.iter().map(|c| weight(c.0)).sum() };
            let mut mass = 0.0;
            let enough = self.candidates.iter().position(|c| {
                mass += weight(c.0);
                mass >= whole * params.top_p as f64
            });
            match enough {
                Some(last) => self.candidates.truncate(last + 1),
                None if look < wanted.min(logits.len()) => {
                    look = logits.len();
                    self.fill(logits, params.temperature);
                    continue;
                }
                None => {}
            }
            break;
        }
        if params.min_p > 0.0 {
            let least = params.min_p as f64;
            self.candidates.retain(|c| weight(c.0) >= least);
        }
    }
}

/// Maxima kept side by side, so that the search is bound by memory.
const SIDE_BY_SIDE: usize = 32;

/// The most likely token, the lowest id among equals.
fn argmax(logits: &[f32]) -> u32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let first = logits.first().copied().unwrap_or(0.0);
    let mut largest = [first; SIDE_BY_SIDE];
    let chunks = logits.chunks_exact(SIDE_BY_SIDE);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (largest, &x) in largest.iter_mut().zip(chunk) {
            *largest = larger(*largest, x);
        }
    }
    let largest = largest.iter().chain(rest).fold(first, |a, &b| larger(a, b));
    // No logit equals the largest only if the first is not a number, which nothing is larger than.
    logits.iter().position(|&x| x == largest).unwrap_or(0) as u32
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = logits[argmax(logits) as usize] as f64;
    largest + logits.iter().map(|&x| exp(x as f64 - largest)).sum::<f64>().ln()
}

/// e^x for x ≤ 0, from multiplications and additions only, so that every host gets the same bits. Relative error below 1e-14.
fn exp(x: f64) -> f64 {
    if x < -700.0 || x.is_nan() {
        return 0.0;
    }
    let n = (x * std::f64::consts::LOG2_E).round();
    let r = n.mul_add(-1.908_214_929_270_587_7e-10, n.mul_add(-0.693_147_180_369_123_8, x));
    let mut sum = 1.0;
    for k in (1..=13).rev() {
        sum = (sum * r) / k as f64 + 1.0;
    }
    sum * f64::from_bits(((n as i64 + 1023) as u64) << 52)
}

/// A number in [0, 1) from (seed, index): the SplitMix64 finaliser over both, 53 bits.
fn uniform(seed: u64, index: u32) -> f64 {
    let mut z = seed.wrapping_add((index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    for _ in 0..2 {
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
    }
    (z >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(params: &SamplingParams, logits: &[f32], index: u32) -> TokenOut {
        let sample = Sample { params, index, prompt: &[1, 2], generated: &[3, 3, 4] };
        Sampler::new(logits.len()).sample(&mut logits.to_vec(), &sample)
    }

    fn frequencies(params: &SamplingParams, logits: &[f32]) -> Vec<f64> {
        let mut counts = vec![0.0; logits.len()];
        (0..20_000).for_each(|i| counts[sample(params, logits, i).id as usize] += 1.0 / 20_000.0);
        counts
    }

    #[test]
    fn exp_is_exp() {
        for i in 0..7000 {
            let x = -(i as f64) / 10.0;
            assert!((exp(x) - x.exp()).abs() <= 2e-14 * x.exp(), "{x}");
        }
    }

    #[test]
    fn greedy_takes_the_lowest_of_equals() {
        let params = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        assert_eq!(sample(&params, &[1.0, 3.0, 3.0], 0).id, 1);
    }

    #[test]
    fn the_search_for_the_largest_is_the_plain_one() {
        let plain = |logits: &[f32]| {
            let mut best = 0;
            (0..logits.len()).for_each(|i| {
                if logits[i] > logits[best] {
                    best = i
                }
            });
            best as u32
        };
        for len in [1, 31, 32, 33, 100] {
            for i in 0..len {
                let mut logits: Vec<f32> = (0..len).map(|j| -((j * 7 % 5) as f32) - 1.0).collect();
                logits[i] = -0.0;
                logits[(i + 40) % len] = 0.0;
                assert_eq!(argmax(&logits), plain(&logits));
                logits[(i + 1) % len] = f32::NAN;
                assert_eq!(argmax(&logits), plain(&logits));
            }
        }
        assert_eq!(argmax(&[f32::NAN, 1.0]), 0);
    }

    #[test]
    fn draws_follow_the_softmax_and_the_filters() {
        let logits: Vec<f32> = [0.5f32, 0.3, 0.15, 0.05].iter().map(|p| p.ln()).collect();
        let params = SamplingParams { seed: 11, ..SamplingParams::default() };
        let near = |got: Vec<f64>, want: [f64; 4]| {
            got.iter().zip(want).for_each(|(g, w)| assert!((g - w).abs() < 0.02, "{got:?} {want:?}"));
        };
        near(frequencies(&params, &logits), [0.5, 0.3, 0.15, 0.05]);
        near(frequencies(&SamplingParams { top_k: 2, ..params.clone() }, &logits), [0.625, 0.375, 0.0, 0.0]);
        near(frequencies(&SamplingParams { top_p: 0.9, ..params.clone() }, &logits), [0.526, 0.316, 0.158, 0.0]);
        near(frequencies(&SamplingParams { min_p: 0.5, ..params.clone() }, &logits), [0.625, 0.375, 0.0, 0.0]);
        near(frequencies(&SamplingParams { temperature: 0.01, ..params }, &logits), [1.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn a_draw_depends_on_seed_and_index_only() {
        let logits = vec![0.0; 64];
        let params = |seed| SamplingParams { seed, ..SamplingParams::default() };
        let draws = |seed| (0..32).map(|i| sample(&params(seed), &logits, i).id).collect::<Vec<_>>();
        assert_eq!(draws(5), draws(5));
        assert_ne!(draws(5), draws(6));
        assert!(draws(5).windows(2).any(|w| w[0] != w[1]));
    }

    #[test]
    fn penalties_and_bias_move_logits() {
        let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        let logits = [0.0, 0.0, 0.0, 2.0, 1.9, 1.0];
        assert_eq!(sample(&greedy, &logits, 3).id, 3);
        assert_eq!(sample(&SamplingParams { frequency_penalty: 0.2, ..greedy.clone() }, &logits, 3).id, 4);
        assert_eq!(sample(&SamplingParams { presence_penalty: 1.5, ..greedy.clone() }, &logits, 3).id, 5);
        assert_eq!(sample(&SamplingParams { repetition_penalty: 4.0, ..greedy.clone() }, &logits, 3).id, 5);
        assert_eq!(sample(&SamplingParams { logit_bias: vec![(2, 50.0)], ..greedy }, &logits, 3).id, 2);
    }

    #[test]
    fn logprobs_are_the_models_own() {
        let logits: Vec<f32> = [0.5f32, 0.3, 0.15, 0.05].iter().map(|p| p.ln()).collect();
        let params = SamplingParams {
            temperature: 0.0,
            top_logprobs: Some(2),
            logit_bias: vec![(3, 100.0)],
            ..SamplingParams::default()
        };
        let token = sample(&params, &logits, 0);
        assert_eq!(token.id, 3);
        assert!((token.logprob.unwrap() - 0.05f32.ln()).abs() < 1e-5);
        assert_eq!(token.top.iter().map(|t| t.0).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(token.logits_digest, Some(digest_f32(&logits)), "before the bias");
        let without = SamplingParams { top_logprobs: None, ..params };
        assert_eq!(sample(&without, &logits, 0).logits_digest, None);
    }

    #[test]
    fn top_p_over_a_flat_vocabulary_looks_beyond_the_first_candidates() {
        let params = SamplingParams { top_p: 0.9, seed: 3, ..SamplingParams::default() };
        let logits = vec![0.0; 4 * FIRST_LOOK];
        let largest = (0..200).map(|i| sample(&params, &logits, i).id).max().unwrap();
        assert!(largest as usize > FIRST_LOOK);
    }
}
