//! Chooses tokens. Randomness is a function of (seed, token index) only, so an answer does not depend on its route (I1).
//!
//! Order: the constraint's mask, penalties, logit bias, temperature, top-k, top-p, min-p, one draw. Log probabilities are computed from
//! the model's own logits, before all of these. Ties go to the lower id.

use baton_engine::Sample;
use baton_grammar::{GrammarError, Matchers};
use baton_kernels::LogitChange;
use baton_types::{SamplingParams, TokenOut, digest_f32, mix, split_mix};

use crate::changes::changes;
use crate::softmax::{CHUNK, SoftmaxWeights};

/// A filter's candidates are the logits at most this far below the largest. The depths are tried in order until there are enough.
const DEPTHS: [f32; 5] = [2.0, 4.0, 8.0, 16.0, f32::INFINITY];

/// Reusable memory for sampling from one vocabulary.
pub struct Sampler {
    candidates: Vec<(f32, u32)>,
    /// See [`SoftmaxWeights::sum`].
    sums: Vec<f64>,
    seen: Vec<u32>,
    prepared: Prepared,
    /// The model's own logits, kept when log probabilities are asked for, because penalties change the row.
    raw: Vec<f32>,
    matchers: Option<Matchers>,
}

/// The mask and the changes for a row's logits before a token is chosen.
#[derive(Default)]
pub(crate) struct Prepared {
    mask: Vec<u32>,
    masked: bool,
    /// Applied after the mask.
    pub changes: Vec<LogitChange>,
}

impl Prepared {
    /// The tokens that may come next, as [`Matchers::mask`] returns them; `None`: any token.
    pub fn mask(&self) -> Option<&[u32]> {
        self.masked.then_some(&self.mask)
    }

    fn apply(&self, logits: &mut [f32]) {
        for (word, logits) in self.mask().unwrap_or_default().iter().zip(logits.chunks_mut(32)) {
            let forbidden = logits.iter_mut().enumerate().filter(|(bit, _)| word >> bit & 1 == 0);
            forbidden.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
        }
        for change in &self.changes {
            let x = &mut logits[change.id as usize];
            *x = change.of(*x);
        }
    }
}

/// A token whose log probability is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Scored {
    /// Its position in the prompt.
    pub index: u32,
    pub id: u32,
    /// How many of the most likely tokens come with it.
    pub top: u32,
}

/// A result that holds the error instead of a token.
pub(crate) fn failed(sample: &Sample<'_>, error: &GrammarError) -> TokenOut {
    TokenOut { index: sample.index, failed: Some(error.to_string()), ..TokenOut::default() }
}

impl Sampler {
    /// A sampler for `vocab` logits, without support for constraints.
    pub fn new(vocab: usize) -> Self {
        let (candidates, raw) = (Vec::with_capacity(vocab), Vec::with_capacity(vocab));
        let sums = Vec::with_capacity(vocab.div_ceil(CHUNK));
        Sampler { candidates, sums, seen: Vec::new(), prepared: Prepared::default(), raw, matchers: None }
    }

    /// Adds matchers for answers under a constraint.
    pub fn with_constraints(self, matchers: Matchers) -> Self {
        Sampler { matchers: Some(matchers), ..self }
    }

    /// Returns the next token, or the reason why there is none. Overwrites `logits` (`[vocab]`).
    pub fn sample(&mut self, logits: &mut [f32], sample: &Sample<'_>) -> TokenOut {
        let token = self.try_sample(logits, sample).unwrap_or_else(|error| failed(sample, &error));
        self.chosen(sample, &token);
        token
    }

    /// Writes to `out`, in place of its contents, the mask and the changes that this token needs.
    pub(crate) fn prepare(
        &mut self,
        sample: &Sample<'_>,
        vocab: usize,
        out: &mut Prepared,
    ) -> Result<(), GrammarError> {
        let params = sample.params;
        out.masked = params.constraint.is_some();
        if let Some(constraint) = &params.constraint {
            let matchers = self
                .matchers
                .as_mut()
                .ok_or_else(|| GrammarError::Vocabulary("this sampler was made without one".to_owned()))?;
            matchers.mask(constraint, sample.generated, &params.stop_token_ids, vocab, &mut out.mask)?;
        }
        changes(sample, vocab, &mut self.seen, &mut out.changes);
        Ok(())
    }

    /// Takes note of a chosen token. When it ends its answer, the answer's matcher is dropped.
    pub(crate) fn chosen(&mut self, sample: &Sample<'_>, token: &TokenOut) {
        let params = sample.params;
        if let (Some(matchers), Some(constraint)) = (&mut self.matchers, &params.constraint)
            && token.failed.is_none()
            && params.stop_token_ids.contains(&token.id)
        {
            matchers.ended(constraint, sample.generated);
        }
    }

    /// The log probability of a known token, and what comes with it, from the logits (`[vocab]`) before it. The most likely tokens are
    /// `scored.top` many.
    pub(crate) fn score(&mut self, logits: &[f32], scored: &Scored) -> TokenOut {
        let (log_sum, top) = self.logprobs(logits, scored.top);
        let logprob = logits.get(scored.id as usize).map(|&x| (x as f64 - log_sum) as f32);
        let logits_digest = Some(digest_f32(logits));
        TokenOut { index: scored.index, id: scored.id, logprob, top, logits_digest, failed: None }
    }

    /// The logarithm of the sum of all weights, and the `count` most likely tokens with their log probabilities, most likely first.
    fn logprobs(&mut self, logits: &[f32], count: u32) -> (f64, Vec<(u32, f32)>) {
        let weights = weights(logits, 1.0);
        let log_sum = weights.largest as f64 + weights.sum(&mut self.sums).ln();
        self.gather(weights, |found| found.len() >= count as usize);
        self.candidates.truncate(count as usize);
        (log_sum, self.candidates.iter().map(|&(x, id)| (id, (x as f64 - log_sum) as f32)).collect())
    }

    fn try_sample(&mut self, logits: &mut [f32], sample: &Sample<'_>) -> Result<TokenOut, GrammarError> {
        let params = sample.params;
        let Some(count) = params.top_logprobs else {
            return Ok(TokenOut { index: sample.index, id: self.choose(logits, sample)?, ..TokenOut::default() });
        };
        let (log_sum, top) = self.logprobs(logits, count);
        self.raw.clear();
        self.raw.extend_from_slice(logits);
        let id = self.choose(logits, sample)?;
        let logprob = Some((self.raw[id as usize] as f64 - log_sum) as f32);
        let logits_digest = Some(digest_f32(&self.raw));
        Ok(TokenOut { index: sample.index, id, logprob, top, logits_digest, failed: None })
    }

    fn choose(&mut self, logits: &mut [f32], sample: &Sample<'_>) -> Result<u32, GrammarError> {
        let mut prepared = std::mem::take(&mut self.prepared);
        let ready = self.prepare(sample, logits.len(), &mut prepared);
        if ready.is_ok() {
            prepared.apply(logits);
        }
        self.prepared = prepared;
        ready?;
        let params = sample.params;
        Ok(if params.greedy() { argmax(logits) } else { self.draw(logits, params, sample.index) })
    }

    fn draw(&mut self, logits: &[f32], params: &SamplingParams, index: u32) -> u32 {
        let weights = weights(logits, params.temperature);
        let uniform = uniform(params.seed, index);
        if params.top_k == 0 && params.top_p >= 1.0 && params.min_p <= 0.0 {
            return self.draw_any(weights, uniform);
        }
        self.filter(weights, params);
        let total: f64 = self.candidates.iter().map(|c| weights.of(c.0)).sum();
        let weighed = self.candidates.iter().map(|&(x, id)| (weights.of(x), id));
        pick(weighed, uniform * total).unwrap_or_else(|| argmax(logits))
    }

    /// Draws from the whole vocabulary: finds the chunk first, then the token in it.
    fn draw_any(&mut self, weights: SoftmaxWeights<'_>, uniform: f64) -> u32 {
        let mut left = uniform * weights.sum(&mut self.sums);
        let chunk = self.sums.iter().position(|sum| {
            let here = left < *sum;
            left -= if here { 0.0 } else { *sum };
            here
        });
        // Rounding left a remainder: take the last chunk that has any weight.
        let chunk = chunk.or_else(|| self.sums.iter().rposition(|sum| *sum > 0.0));
        let ids = chunk.map_or(0..0, |at| at * CHUNK..weights.logits.len().min((at + 1) * CHUNK));
        pick(ids.map(|id| (weights.at(id), id as u32)), left).unwrap_or_else(|| argmax(weights.logits))
    }

    /// Collects candidates, most likely first: all logits within the first of [`DEPTHS`] that gives `enough`.
    fn gather(&mut self, weights: SoftmaxWeights<'_>, enough: impl Fn(&[(f32, u32)]) -> bool) {
        for depth in DEPTHS {
            let (least, temperature) = (weights.largest - depth, weights.temperature);
            self.candidates.clear();
            for (chunk, ids) in weights.logits.chunks(SIDE_BY_SIDE).zip((0u32..).step_by(SIDE_BY_SIDE)) {
                // Few chunks hold a candidate.
                if chunk.iter().fold(false, |any, x| any | (x / temperature >= least)) {
                    let found = chunk.iter().zip(ids..).map(|(x, id)| (x / temperature, id));
                    self.candidates.extend(found.filter(|(x, _)| *x >= least));
                }
            }
            if enough(&self.candidates) {
                break;
            }
        }
        self.candidates.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    }

    /// Keeps the candidates that pass top-k, top-p and min-p, most likely first.
    fn filter(&mut self, weights: SoftmaxWeights<'_>, params: &SamplingParams) {
        let mass = |found: &[(f32, u32)]| -> f64 { found.iter().map(|c| weights.of(c.0)).sum() };
        let (top_p, min_p) = (f64::from(params.top_p), f64::from(params.min_p));
        // Top-p is a share of the mass that top-k kept.
        let mut whole = 0.0;
        if params.top_k > 0 {
            self.gather(weights, |found| found.len() >= params.top_k as usize);
            self.candidates.truncate(params.top_k as usize);
            whole = mass(&self.candidates);
        } else if top_p < 1.0 {
            whole = weights.sum(&mut self.sums);
            self.gather(weights, |found| mass(found) >= whole * top_p);
        } else {
            let likely = weights.logits.len();
            self.gather(weights, |found| found.len() == likely || found.iter().any(|c| weights.of(c.0) < min_p));
        }
        if top_p < 1.0 {
            let mut mass = 0.0;
            let enough = self.candidates.iter().position(|c| {
                mass += weights.of(c.0);
                mass >= whole * top_p
            });
            self.candidates.truncate(enough.map_or(usize::MAX, |last| last + 1));
        }
        self.candidates.retain(|c| weights.of(c.0) >= min_p);
    }
}

/// Softmax weights of logits at a temperature.
fn weights(logits: &[f32], temperature: f32) -> SoftmaxWeights<'_> {
    SoftmaxWeights { logits, temperature, largest: logits[argmax(logits) as usize] / temperature }
}

/// The first token at which the running sum of weights exceeds `left`. If rounding leaves a remainder, the last token with a weight above
/// 0.
fn pick(weighed: impl Iterator<Item = (f64, u32)>, mut left: f64) -> Option<u32> {
    let mut last = None;
    for (weight, id) in weighed.filter(|(weight, _)| *weight > 0.0) {
        left -= weight;
        last = Some(id);
        if left < 0.0 {
            break;
        }
    }
    last
}

/// Number of maxima kept side by side, so that memory bandwidth limits the search.
const SIDE_BY_SIDE: usize = 32;

/// The most likely token; the lowest id among equals.
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
    // `position` finds nothing only if the first logit is NaN: nothing compares larger than NaN, and NaN equals nothing.
    logits.iter().position(|&x| x == largest).unwrap_or(0) as u32
}

/// A number in [0, 1) from (seed, index): SplitMix64, its finaliser applied twice, 53 bits.
fn uniform(seed: u64, index: u32) -> f64 {
    (mix(split_mix(seed, index.into())) >> 11) as f64 / (1u64 << 53) as f64
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
    fn no_stop_token_is_chosen_before_the_least_length() {
        let params = SamplingParams {
            temperature: 0.0,
            min_tokens: 3,
            stop_token_ids: vec![1, 99],
            top_logprobs: Some(1),
            ..SamplingParams::default()
        };
        let logits = [0.0, 9.0, 3.0, 1.0];
        assert_eq!([0, 2, 3].map(|index| sample(&params, &logits, index).id), [2, 2, 1]);
        assert_eq!(sample(&params, &logits, 0).top[0].0, 1, "log probabilities are the model's own");
        let warm = SamplingParams { temperature: 1.0, ..params };
        assert!((0..50).all(|seed| sample(&SamplingParams { seed, ..warm.clone() }, &logits, 1).id != 1));
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
        let logits = vec![0.0; 2048];
        let largest = (0..200).map(|i| sample(&params, &logits, i).id).max().unwrap();
        assert!(largest > 512);
    }

    /// Compares each filter with its definition over the whole sorted vocabulary: the same draw gives the same token.
    #[test]
    fn filters_are_their_definitions() {
        let plain = |logits: &[f32], p: &SamplingParams, index: u32| {
            let mut sorted: Vec<(f32, u32)> = logits.iter().zip(0..).map(|(x, id)| (x / p.temperature, id)).collect();
            sorted.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            let largest = f64::from(sorted[0].0);
            let mut kept: Vec<(f64, u32)> =
                sorted.iter().map(|(x, id)| ((f64::from(*x) - largest).exp(), *id)).collect();
            kept.truncate(if p.top_k == 0 { usize::MAX } else { p.top_k as usize });
            let (whole, mut mass) = (kept.iter().map(|c| c.0).sum::<f64>(), 0.0);
            kept.retain(|c| {
                let before = mass;
                mass += c.0;
                before < whole * f64::from(p.top_p)
            });
            kept.retain(|c| c.0 >= f64::from(p.min_p));
            let total: f64 = kept.iter().map(|c| c.0).sum();
            let mut left = uniform(p.seed, index) * total;
            kept.into_iter().find(|c| {
                left -= c.0;
                left < 0.0
            })
        };
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 40) as f32 / (1u64 << 24) as f32
        };
        for (top_k, top_p, min_p) in [
            (1, 1.0, 0.0),
            (7, 1.0, 0.0),
            (300, 0.5, 0.0),
            (0, 0.3, 0.0),
            (0, 0.95, 0.0),
            (0, 1.0, 0.02),
            (50, 0.9, 0.1),
            (5000, 0.999, 0.0),
        ] {
            for spread in [0.1, 3.0, 30.0] {
                let logits: Vec<f32> = (0..1000).map(|_| (random() - 0.5) * spread).collect();
                let params =
                    SamplingParams { top_k, top_p, min_p, temperature: 0.8, seed: 9, ..SamplingParams::default() };
                for index in 0..30 {
                    let want = plain(&logits, &params, index).unwrap().1;
                    assert_eq!(sample(&params, &logits, index).id, want, "{top_k} {top_p} {min_p} {spread} {index}");
                }
            }
        }
    }

    #[test]
    fn what_is_masked_or_no_number_is_never_drawn() {
        let mut logits = vec![f32::NEG_INFINITY; 1000];
        (logits[300], logits[301], logits[999]) = (1.0, f32::NAN, 1.0);
        for (top_k, top_p, min_p) in [(0, 1.0, 0.0), (10, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1)] {
            let params = SamplingParams { top_k, top_p, min_p, ..SamplingParams::default() };
            let drawn: std::collections::BTreeSet<u32> = (0..50).map(|i| sample(&params, &logits, i).id).collect();
            assert_eq!(drawn.into_iter().collect::<Vec<_>>(), [300, 999], "{top_k} {top_p} {min_p}");
        }
    }
}
