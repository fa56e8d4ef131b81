//! I1: the same tokens and the same logits, to the bit, whatever the batch, the chunks, the threads and the instruction set.
//! `routes.rs` holds the same promise over the routes between processes.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use baton_kernels::Isa;
use baton_model_files::Model;
use baton_tests::local::{Local, Options};
use baton_tests::tiny;
use baton_types::{KvDtype, SamplingParams};
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
        kv in prop_oneof![Just(KvDtype::F32), Just(KvDtype::F16), Just(KvDtype::Bf16)],
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
        let options = Options { kv, chunk, budget, max_running: 8, blocks, threads: 3, isa };
        prop_assert_eq!(answers(&model, options, &requests), wanted);
    }
}
