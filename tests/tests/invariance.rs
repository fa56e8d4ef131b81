//! I1: the same tokens and the same logits, to the bit, whatever the batch, the chunks, the threads and the instruction set.
//! `routes.rs` holds the same promise over the routes between processes.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;

use baton_engine::{Batch, CacheConfig, ModelRunner, Row, Sample, conformance};
use baton_kernels::{CpuBackend, CpuOptions, HostPool, Isa};
use baton_kv_cache::KvPools;
use baton_model::{Decoder, DecoderLimits, kv_layout};
use baton_model_files::Model;
use baton_tests::local::{Local, Options};
use baton_tests::tiny;
use baton_transfer::Segment;
use baton_types::{KvDtype, PoolGeometry, SamplingParams, SeqId};
use proptest::prelude::*;

type Request = (Vec<u32>, SamplingParams);
/// Bits of every logit, by (request, token index).
type Bits = BTreeMap<(usize, u32), Vec<u32>>;

fn answers(model: &Model, options: Options, requests: &[Request]) -> (Vec<Vec<u32>>, Bits) {
    let mut bits = Bits::new();
    let mut local = Local::new(model, options).unwrap();
    let answers = local
        .run(requests, &mut |request, index, logits| {
            // A preempted sequence may be computed again; it must say the same again.
            let new: Vec<u32> = logits.iter().map(|x| x.to_bits()).collect();
            let old = bits.insert((request, index), new.clone());
            assert!(old.is_none_or(|old| old == new), "request {request} changed its mind at {index}");
            None
        })
        .unwrap();
    (answers.into_iter().map(|tokens| tokens.into_iter().map(|t| t.id).collect()).collect(), bits)
}

/// Each request alone, its prompt in one piece, on one thread.
fn alone(model: &Model, kv: KvDtype, requests: &[Request]) -> (Vec<Vec<u32>>, Bits) {
    let (mut tokens, mut bits) = (Vec::new(), Bits::new());
    for (place, request) in requests.iter().enumerate() {
        let options = Options { kv, threads: 1, ..Options::default() };
        let (mut answer, logits) = answers(model, options, std::slice::from_ref(request));
        tokens.append(&mut answer);
        bits.extend(logits.into_iter().map(|((_, index), row)| ((place, index), row)));
    }
    (tokens, bits)
}

fn request(vocab: u32, longest: usize) -> impl Strategy<Value = Request> {
    let sampling = (0u32..3, any::<u64>(), 1u32..12, prop_oneof![Just(1.0f32), Just(1.3)]);
    (prop::collection::vec(0..vocab, 1..longest), sampling).prop_map(|(prompt, (kind, seed, max_tokens, penalty))| {
        let params = SamplingParams {
            temperature: if kind == 0 { 0.0 } else { 0.9 },
            top_p: if kind == 2 { 0.9 } else { 1.0 },
            repetition_penalty: penalty,
            max_tokens,
            seed,
            ..SamplingParams::default()
        };
        (prompt, params)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// Random weights in every attention shape there is.
    #[test]
    fn tiny_models_answer_alike_however_they_are_run(
        which in any::<prop::sample::Index>(),
        seed in any::<u64>(),
        requests in prop::collection::vec(request(200, 70), 1..6),
        chunk in prop_oneof![Just(1u32), Just(16), Just(512), 2u32..40],
        budget in 8u32..64,
        // A small pool forces preemption, a large one none.
        blocks in prop_oneof![Just(8u32), Just(64)],
        kv in prop::sample::select(&KvDtype::ALL[..]),
        portable in any::<bool>(),
    ) {
        let configs = tiny::configs().unwrap();
        let mut config = configs[which.index(configs.len())].clone();
        config.seed = seed;
        let directory = tempfile::tempdir().unwrap();
        config.write(directory.path()).unwrap();
        let model = Model::open(directory.path()).unwrap();
        let wanted = alone(&model, kv, &requests);
        let isa = if portable { Isa::Portable } else { Isa::detect() };
        let options = Options { kv, chunk, budget, max_running: 8, blocks, threads: 3, isa, ..Options::default() };
        prop_assert_eq!(answers(&model, options, &requests), wanted);
    }

    /// Prompts that begin alike, at once and one after the other: blocks are shared, copied and found again.
    #[test]
    fn tiny_models_answer_alike_whatever_they_share(
        which in any::<prop::sample::Index>(),
        first in request(200, 70),
        forks in prop::collection::vec((any::<prop::sample::Index>(), request(200, 20)), 1..6),
        chunk in prop_oneof![Just(16u32), Just(512), 2u32..40],
        blocks in prop_oneof![Just(8u32), Just(64)],
    ) {
        let configs = tiny::configs().unwrap();
        let directory = tempfile::tempdir().unwrap();
        configs[which.index(configs.len())].write(directory.path()).unwrap();
        let model = Model::open(directory.path()).unwrap();
        let fork = |(cut, (suffix, params)): &(prop::sample::Index, Request)| {
            let begin = &first.0[..cut.index(first.0.len() + 1)];
            ([begin, suffix].concat(), params.clone())
        };
        let mut requests: Vec<Request> = forks.iter().map(fork).collect();
        requests.extend([first.clone(), (first.0.clone(), SamplingParams { seed: 99, ..first.1.clone() })]);
        let wanted = alone(&model, KvDtype::F16, &requests);
        let share = true;
        let options = Options { chunk, max_running: 8, blocks, threads: 2, share, ..Options::default() };
        prop_assert_eq!(answers(&model, options, &requests), wanted);
    }
}

/// Sequences that outgrow the pool lose their blocks, and answer bit by bit as they would have.
#[test]
fn tiny_models_answer_alike_when_they_are_preempted() {
    for config in tiny::configs().unwrap() {
        let directory = tempfile::tempdir().unwrap();
        config.write(directory.path()).unwrap();
        let model = Model::open(directory.path()).unwrap();
        let prompt = |seed: u32| (0..40).map(|at| (at * 7 + seed * 31) % 200).collect();
        let params = |seed| SamplingParams { temperature: 0.9, max_tokens: 40, seed, ..SamplingParams::default() };
        let requests: Vec<Request> = (0..4).map(|seed| (prompt(seed), params(seed.into()))).collect();
        let options = Options { max_running: 4, blocks: 12, ..Options::default() };
        let mut local = Local::new(&model, options).unwrap();
        let together = local.run(&requests, &mut |_, _, _| None).unwrap();
        // Where every layer has a window, blocks are given back before they run out.
        let layout = kv_layout(model.config(), 0, KvDtype::F16, 16);
        let windows_only = layout.groups.iter().all(|group| group.window.is_some());
        assert_eq!(local.preemptions() == 0, windows_only, "{}", config.name);
        let ids: Vec<Vec<u32>> =
            together.into_iter().map(|tokens| tokens.into_iter().map(|t| t.id).collect()).collect();
        assert_eq!(ids, alone(&model, KvDtype::F16, &requests).0, "{}", config.name); // I1
    }
}

/// The suite every runner passes, with the copies of blocks that sharing needs.
#[test]
fn the_decoder_conforms() {
    for config in tiny::configs().unwrap() {
        let directory = tempfile::tempdir().unwrap();
        config.write(directory.path()).unwrap();
        let model = Model::open(directory.path()).unwrap();
        let layout = kv_layout(model.config(), model.fingerprint(), KvDtype::F16, 16);
        let vocab = model.config().vocab_size;
        let mut setup = conformance::Setup { geometry: PoolGeometry::uniform(layout, 1), vocab, answer_tokens: 5 };
        let blocks = setup.blocks();
        setup.geometry.blocks.fill(blocks);
        let limits = DecoderLimits { tokens: 256, samples: 4, context: 128, table_entries: blocks as usize };
        let make = || {
            let pool = Arc::new(HostPool::in_memory(setup.geometry.clone()).unwrap());
            let backend = CpuBackend::new(CpuOptions { threads: 2, ..CpuOptions::default() }, pool).unwrap();
            Decoder::load(&model, &setup.geometry.layout, backend, limits).unwrap()
        };
        assert_eq!(conformance::check(&setup, make), Ok(()), "{}", config.name);
    }
}

/// Each layer's K and V of a prefix may come to the pool as late as when that layer is reported, as they do from the KV store. The answer is the
/// same, to the bit.
#[test]
fn a_prefix_may_come_to_the_pool_layer_by_layer() {
    for config in tiny::configs().unwrap() {
        let directory = tempfile::tempdir().unwrap();
        config.write(directory.path()).unwrap();
        let model = Model::open(directory.path()).unwrap();
        let layout = kv_layout(model.config(), model.fingerprint(), KvDtype::F16, 16);
        let geometry = PoolGeometry::uniform(layout, 4);
        let segments = [0; 2].map(|_| Arc::new(Segment::create("test", geometry.bytes()).unwrap()));
        let [mut whole, mut layered] = segments.each_ref().map(|segment| {
            let (base, bytes, owner) = (segment.as_ptr(), segment.len(), Arc::clone(segment));
            // SAFETY: the segment lives as long as its owner.
            let pool = Arc::new(unsafe { HostPool::new(base, bytes, geometry.clone(), owner) }.unwrap());
            let backend = CpuBackend::new(CpuOptions { threads: 2, ..CpuOptions::default() }, pool).unwrap();
            let limits = DecoderLimits { tokens: 64, samples: 4, context: 64, table_entries: 8 };
            Decoder::load(&model, &geometry.layout, backend, limits).unwrap()
        });
        let mut pools = KvPools::new(&geometry, CacheConfig::default()).unwrap();
        let tables = pools.allocate(40).unwrap();
        let prompt: Vec<u32> = (0..40).map(|at| at * 7 % 200).collect();
        let params = SamplingParams { temperature: 0.0, top_logprobs: Some(5), ..SamplingParams::default() };
        let sample = Some(Sample { params: &params, index: 0, prompt: &prompt, generated: &[] });
        let row = |start: u32| {
            let (tokens, tables) = (&prompt[start as usize..], tables.as_slice());
            [Row { seq: SeqId(1), tokens, follows: None, start, tables, score: None, sample }]
        };
        let mut answers = [Vec::new(), Vec::new()];
        whole.run(&Batch { rows: &row(0), copies: &[] }, &mut |_| (), &mut answers[0]).unwrap();
        assert!(layered.reads_by_layer());
        let mut come = |layer| {
            let (group, inner) = geometry.layout.locate(layer).unwrap();
            for block in &tables.as_slice()[group].blocks()[..2] {
                let range = geometry.block_range(group, inner, *block);
                // SAFETY: nobody else touches either segment now.
                unsafe { segments[1].write(range.start, &segments[0].read(range.start, range.len())) };
            }
        };
        layered.run(&Batch { rows: &row(32), copies: &[] }, &mut come, &mut answers[1]).unwrap();
        assert_eq!(answers[0], answers[1], "{}", config.name); // I1
        pools.free(tables).unwrap();
    }
}
