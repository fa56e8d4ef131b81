//! Decides whether the backend or the host's sampler chooses each of a step's tokens.
//!
//! The decision depends on the row's own sequence alone (I1): backend and host agree except for rounding. Tokens that are only scored are
//! left to the host: whoever asks for them has time.

use baton_engine::{Batch, Sample};
use baton_kernels::{Backend, Draw, FOLLOWS, MAX_LOGIT_CHANGES};
use baton_types::TokenOut;

use crate::Decoder;
use crate::sampler::{Prepared, Scored, failed};

/// Most `top_logprobs` that a backend supports.
const MAX_TOP: u32 = 20;

/// What one row of logits is for.
#[derive(Clone, Copy)]
pub(crate) enum Want<'a> {
    Score(Scored),
    Sample(&'a Sample<'a>),
}

/// What a batch's rows of logits are for, in their order.
pub(crate) fn wants<'a>(batch: &Batch<'a>) -> impl Iterator<Item = Want<'a>> + Clone + use<'a> {
    batch.rows.iter().flat_map(|row| {
        let scored = row.score.into_iter().flat_map(move |score| {
            let first = row.start + score.after + 1;
            (first..).zip(score.tokens).map(move |(index, &id)| Want::Score(Scored { index, id, top: score.top }))
        });
        scored.chain(row.sample.as_ref().map(Want::Sample))
    })
}

/// Whether a backend can choose this token. `changes` is how many of its row's logits are changed first.
fn by_backend(sample: &Sample<'_>, changes: usize) -> bool {
    changes <= MAX_LOGIT_CHANGES && sample.params.top_logprobs.is_none_or(|top| top <= MAX_TOP)
}

/// Whether a backend can choose this token from the unchanged logits.
fn plain(sample: &Sample<'_>) -> bool {
    let params = sample.params;
    let changed = params.looks_back() || !params.logit_bias.is_empty() || params.goes_on(sample.index);
    !changed && by_backend(sample, 0)
}

/// The draws of a step whose tokens all can be chosen from unchanged logits; None if one cannot.
pub(crate) fn plain_draws<'a>(wants: impl Iterator<Item = Want<'a>>) -> Option<Vec<Draw<'a>>> {
    let plain = |(row, want)| match want {
        Want::Sample(sample) if plain(sample) => Some(draw(row, sample)),
        _ => None,
    };
    wants.enumerate().map(plain).collect()
}

/// A draw without mask and changes.
fn draw<'a>(row: usize, sample: &Sample<'a>) -> Draw<'a> {
    Draw { row, params: sample.params, index: sample.index, mask: None, changes: &[] }
}

/// The tokens of a step that is launched but not collected, one per row of logits.
#[derive(Default)]
pub(crate) struct PendingTokens {
    tokens: Vec<Chosen>,
    /// How many of them the backend draws.
    drawn: u32,
}

/// Where a token is known.
enum Chosen {
    /// On the host.
    Here(TokenOut),
    /// On the backend, as its draw of this number.
    There(u32),
}

impl PendingTokens {
    pub fn with_capacity(tokens: usize) -> Self {
        PendingTokens { tokens: Vec::with_capacity(tokens), drawn: 0 }
    }

    pub fn clear(&mut self) {
        self.tokens.clear();
        self.drawn = 0;
    }

    /// Adds `count` tokens that the backend draws.
    pub fn drawn(&mut self, count: usize) {
        for _ in 0..count {
            self.tokens.push(Chosen::There(self.drawn));
            self.drawn += 1;
        }
    }

    /// The id that the next step embeds for the token in this place: its token id, or a reference to the backend's draw.
    pub fn id(&self, place: usize) -> Option<u32> {
        Some(match self.tokens.get(place)? {
            Chosen::Here(token) => token.id,
            Chosen::There(number) => FOLLOWS | number,
        })
    }
}

/// Reused memory for the masks and changes of rows whose logits are computed together.
#[derive(Default)]
pub(crate) struct Choices {
    prepared: Vec<Prepared>,
}

impl<B: Backend> Decoder<B> {
    /// Scores or chooses a token for each of these, or lets the backend draw it. Row `i` of the logits buffer belongs to the `i`th.
    pub(crate) fn choose<'a>(&mut self, wants: impl Iterator<Item = Want<'a>> + Clone, pending: &mut PendingTokens) {
        let vocab = self.config.vocab_size as usize;
        if self.backend.samples(vocab) {
            return self.choose_there(vocab, wants, pending);
        }
        for (row, want) in wants.enumerate() {
            let token = self.choose_here(row, want);
            pending.tokens.push(Chosen::Here(token));
        }
    }

    fn choose_here(&mut self, row: usize, want: Want<'_>) -> TokenOut {
        self.read_logits(row);
        match want {
            Want::Sample(sample) => self.sampler.sample(&mut self.inputs.logits, sample),
            Want::Score(scored) => self.sampler.score(&self.inputs.logits, &scored),
        }
    }

    fn choose_there<'a>(
        &mut self,
        vocab: usize,
        wants: impl Iterator<Item = Want<'a>> + Clone,
        pending: &mut PendingTokens,
    ) {
        let Choices { mut prepared } = std::mem::take(&mut self.choices);
        let first = pending.tokens.len();
        for (row, want) in wants.clone().enumerate() {
            if prepared.len() <= row {
                prepared.push(Prepared::default());
            }
            if let Want::Sample(sample) = want {
                match self.sampler.prepare(sample, vocab, &mut prepared[row]) {
                    Err(error) => {
                        pending.tokens.push(Chosen::Here(failed(sample, &error)));
                        continue;
                    }
                    Ok(()) if by_backend(sample, prepared[row].changes.len()) => {
                        pending.drawn(1);
                        continue;
                    }
                    Ok(()) => {}
                }
            }
            // Read before the draws, which may overwrite the logits.
            let token = self.choose_here(row, want);
            pending.tokens.push(Chosen::Here(token));
        }
        let tokens = pending.tokens[first..].iter().zip(wants).zip(&prepared).enumerate();
        let drawn = tokens.filter_map(|(row, ((token, want), prepared))| match (token, want) {
            (Chosen::There(_), Want::Sample(sample)) => {
                Some(Draw { mask: prepared.mask(), changes: &prepared.changes, ..draw(row, sample) })
            }
            _ => None,
        });
        let draws: Vec<Draw<'_>> = drawn.collect();
        if !draws.is_empty() {
            let (backend, logits) = self.logits_buffer();
            backend.draw(logits, vocab, &draws);
        }
        drop(draws);
        self.choices = Choices { prepared };
    }

    /// Pushes the tokens of these, from a step that was collected.
    pub(crate) fn tell<'a>(
        &mut self,
        wants: impl Iterator<Item = Want<'a>>,
        pending: &mut PendingTokens,
        out: &mut Vec<TokenOut>,
    ) {
        for (want, chosen) in wants.zip(pending.tokens.drain(..)) {
            match (chosen, want) {
                (Chosen::Here(token), _) => out.push(token),
                (Chosen::There(number), Want::Sample(sample)) => {
                    let token = self.backend.drawn(number, sample.index, sample.params.top_logprobs);
                    self.sampler.chosen(sample, &token);
                    out.push(token);
                }
                // The host scores. The engine notices what is missing.
                (Chosen::There(_), Want::Score(_)) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use baton_kernels::conformance::Random;
    use baton_kernels::cuda::{CudaBackend, CudaOptions, HostDevice};
    use baton_kernels::{LogitChange, Room};
    use baton_types::{KvDtype, KvGroup, KvLayout, PoolGeometry, SamplingParams};

    use super::*;
    use crate::Sampler;

    const VOCAB: usize = 1000;
    const PROMPT: [u32; 5] = [4, 8, 15, 16, 999];
    const GENERATED: [u32; 4] = [23, 42, 23, 8];

    fn sample(params: &SamplingParams, index: u32) -> Sample<'_> {
        Sample { params, index, prompt: &PROMPT, generated: &GENERATED }
    }

    fn backend() -> Option<CudaBackend<HostDevice>> {
        let device = Arc::new(HostDevice::for_tests()?);
        let group = KvGroup { layers: vec![0], planes: 2, kv_heads: 1, head_dim: 8, window: None, sinks: 0 };
        let layout = KvLayout { version: 1, model: 0, dtype: KvDtype::F16, block_size: 16, groups: vec![group] };
        let mut backend =
            CudaBackend::new(device, PoolGeometry::uniform(layout, 1), CudaOptions::default()).expect("a backend");
        let room = Room { rows: 64, samples: 64, vocab: VOCAB, ..Room::default() };
        backend.reserve(&room).expect("room");
        Some(backend)
    }

    /// Runs a step that has only these draws.
    fn drawn<B: Backend>(backend: &mut B, logits: &mut B::Buffer, draws: &[Draw<'_>]) -> Vec<TokenOut> {
        backend.draw(logits, VOCAB, draws);
        backend.submit().expect("all asked for");
        backend.collect().expect("all done");
        let token = |(number, draw): (u32, &Draw<'_>)| backend.drawn(number, draw.index, draw.params.top_logprobs);
        (0..).zip(draws).map(token).collect()
    }

    /// Random parameters: each kind alone and together with others.
    fn kinds(random: &mut Random) -> SamplingParams {
        let mut some = |share: u64| random.bits().is_multiple_of(share);
        let (greedy, top_k, top_p, min_p) = (some(4), some(3), some(3), some(3));
        let (penalties, bias, logprobs) = (some(2), some(3), some(2));
        let unit = |random: &mut Random| f64::from(random.unit()).mul_add(0.5, 0.5) as f32;
        SamplingParams {
            temperature: if greedy { 0.0 } else { 0.3 + unit(random) },
            top_k: if top_k { 1 + random.bits() as u32 % 60 } else { 0 },
            top_p: if top_p { 0.05 + 0.9 * unit(random) } else { 1.0 },
            min_p: if min_p { 0.2 * unit(random) } else { 0.0 },
            seed: random.bits(),
            repetition_penalty: if penalties { 1.3 } else { 1.0 },
            presence_penalty: if penalties { 0.6 } else { 0.0 },
            frequency_penalty: if penalties { 0.3 } else { 0.0 },
            logit_bias: if bias { vec![(0, 3.0), (42, -50.0), (999, 2.0), (4000, 9.0)] } else { Vec::new() },
            top_logprobs: logprobs.then(|| random.bits() as u32 % 21),
            ..SamplingParams::default()
        }
    }

    /// The tokens that the host chooses when a bound moves by the largest rounding error.
    fn near(params: &SamplingParams, logits: &[f32], index: u32) -> Vec<u32> {
        const STEP: f32 = 2e-6;
        let moved = [1.0 - STEP, 1.0 + STEP].iter().flat_map(|by| {
            [
                SamplingParams { temperature: params.temperature * by, ..params.clone() },
                SamplingParams { top_p: (params.top_p * by).min(1.0), ..params.clone() },
                SamplingParams { min_p: params.min_p * by, ..params.clone() },
            ]
        });
        moved.map(|params| Sampler::new(VOCAB).sample(&mut logits.to_vec(), &sample(&params, index)).id).collect()
    }

    #[test]
    fn a_backend_chooses_what_the_host_does() {
        let Some(mut backend) = backend() else { return };
        assert!(backend.samples(VOCAB));
        let (mut random, mut sampler) = (Random(77), Sampler::new(VOCAB));
        let (mut compared, mut moved) = (0, 0);
        for spread in [0.5, 4.0, 12.0] {
            let params: Vec<SamplingParams> = (0..64).map(|_| kinds(&mut random)).collect();
            // Multiples of 1/64 of the spread, so that many are equal.
            let logits: Vec<f32> =
                (0..params.len() * VOCAB).map(|_| (random.unit() * 64.0).round() / 64.0 * spread).collect();
            let mut prepared: Vec<Prepared> = params.iter().map(|_| Prepared::default()).collect();
            for (place, params) in params.iter().enumerate() {
                sampler.prepare(&sample(params, place as u32), VOCAB, &mut prepared[place]).expect("no constraint");
            }
            let draw = |(row, params): (usize, _)| Draw {
                row,
                params,
                index: row as u32,
                mask: None,
                changes: &prepared[row].changes,
            };
            // In reverse order of their rows.
            let draws: Vec<Draw<'_>> = params.iter().enumerate().rev().map(draw).collect();
            let mut buffer = backend.upload(&logits).expect("logits");
            let out = drawn(&mut backend, &mut buffer, &draws);
            assert_eq!(out.len(), draws.len());
            for (draw, got) in draws.iter().zip(&out) {
                let row = &logits[draw.row * VOCAB..][..VOCAB];
                let want = sampler.sample(&mut row.to_vec(), &sample(draw.params, draw.index));
                compared += 1;
                if got.id != want.id {
                    moved += 1;
                    assert!(!draw.params.greedy(), "{:?}", draw.params);
                    assert!(
                        near(draw.params, row, draw.index).contains(&got.id),
                        "{got:?}, {want:?}, {:?}",
                        draw.params
                    );
                    continue;
                }
                same_logprobs(got, &want);
            }
        }
        assert!(moved * 50 < compared, "{moved} of {compared} at a bound");
    }

    fn same_logprobs(got: &TokenOut, want: &TokenOut) {
        let close = |a: f32, b: f32| (a - b).abs() < 1e-5 * (1.0 + b.abs());
        assert_eq!((got.index, got.logits_digest), (want.index, want.logits_digest));
        assert_eq!(got.logprob.is_some(), want.logprob.is_some());
        assert!(got.logprob.zip(want.logprob).is_none_or(|(a, b)| close(a, b)), "{got:?}, {want:?}");
        assert_eq!(got.top.iter().map(|t| t.0).collect::<Vec<_>>(), want.top.iter().map(|t| t.0).collect::<Vec<_>>());
        assert!(got.top.iter().zip(&want.top).all(|(a, b)| close(a.1, b.1)), "{got:?}, {want:?}");
    }

    #[test]
    fn what_a_mask_forbids_is_not_chosen_and_log_probabilities_stay_the_models() {
        let Some(mut backend) = backend() else { return };
        let logits: Vec<f32> = (0..2 * VOCAB).map(|i| (i % VOCAB) as f32 / 100.0).collect();
        let greedy = SamplingParams { temperature: 0.0, top_logprobs: Some(1), ..SamplingParams::default() };
        let mut mask = vec![0u32; VOCAB.div_ceil(32)];
        (mask[0], mask[20]) = (1 << 7, 1 << 3);
        let changes = [LogitChange { add: 100.0, ..LogitChange::none(7) }];
        let draw = |row, mask, changes| Draw { row, params: &greedy, index: 0, mask, changes };
        let mut buffer = backend.upload(&logits).expect("logits");
        let out = drawn(&mut backend, &mut buffer, &[draw(0, Some(&mask), &changes), draw(1, Some(&mask), &[])]);
        let want = Sampler::new(VOCAB).sample(&mut logits[..VOCAB].to_vec(), &sample(&greedy, 0));
        for (token, id) in out.iter().zip([7, 643]) {
            assert_eq!((token.id, token.logits_digest, token.top[0].0), (id, want.logits_digest, 999));
            let behind = (999 - id) as f32 / 100.0;
            assert!((token.top[0].1 - token.logprob.unwrap_or_default() - behind).abs() < 1e-4, "{token:?}");
        }
    }

    #[test]
    fn rows_that_ask_for_more_than_a_backend_has_room_for_stay_on_the_host() {
        let (plain, many) =
            (SamplingParams::default(), SamplingParams { top_logprobs: Some(21), ..SamplingParams::default() });
        assert!(by_backend(&sample(&plain, 0), 0) && by_backend(&sample(&plain, 0), MAX_LOGIT_CHANGES));
        assert!(!by_backend(&sample(&plain, 0), MAX_LOGIT_CHANGES + 1));
        assert!(!by_backend(&sample(&many, 0), 0));
    }
}
