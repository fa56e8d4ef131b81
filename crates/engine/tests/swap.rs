//! Preemption to host memory: when it is chosen, what comes back, what must wait for the copies; one rule at a time.
//! Random combinations with everything else are the simulator's (`crates/simulator`).
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod rig;

use baton_engine::{EngineConfig, NewSequence, Order, Prefix, RunError, Start, SwapConfig, SwapRates, fake};
use baton_types::SeqId;
use rig::{LIMITS, Rig, VOCAB, layout, request};

/// Bytes of a block of each group together.
const BLOCK: u64 = 4 * 64;
/// A block of tokens takes a second to compute, and two thirds of that to go out and in.
const RATES: SwapRates = SwapRates { copy_bytes_per_second: 3 * BLOCK, prefill_tokens_per_second: 4 };

fn config(blocks: u64, rates: SwapRates) -> EngineConfig {
    EngineConfig { swap: SwapConfig { bytes: blocks * BLOCK, rates }, ..LIMITS }
}

/// Two sequences that outgrow a pool of six blocks, the second of which is preempted.
fn two(config: EngineConfig) -> (Rig, [SeqId; 2]) {
    let mut rig = Rig::new(config, 6);
    let seqs = [8, 7].map(|prompt| rig.submit(Start::Compute, prompt, 12));
    while rig.engine.preemptions() == 0 {
        rig.step();
    }
    (rig, seqs)
}

/// Runs until both have ended and checks their tokens (I1). Returns how many tokens were computed.
fn finish(rig: &mut Rig, seqs: [SeqId; 2]) -> u32 {
    let mut computed = 0;
    while !rig.engine.idle() {
        computed += rig.step().iter().map(|row| row.1).sum::<u32>();
    }
    for (seq, prompt) in seqs.into_iter().zip([8, 7]) {
        let new = request(Start::Compute, prompt, 12);
        let alone = fake::answer(&layout(), VOCAB, &new.tokens, &new.params).unwrap();
        assert_eq!(rig.tokens_of(seq), alone.iter().map(|token| token.id).collect::<Vec<_>>(), "I1");
    }
    computed
}

#[test]
fn what_was_swapped_comes_back_and_is_not_computed_again() {
    let (mut rig, seqs) = two(config(10, RATES));
    let (used, moved) = (rig.engine.host_counts().used, rig.engine.swapped_blocks());
    assert_eq!((rig.engine.swaps(), u64::from(used), moved), (1, moved[0], [6, 0]), "three blocks of two groups");
    let left: u32 = seqs.map(|seq| 12 - rig.tokens_of(seq).len() as u32).iter().sum();
    // One token a step, none of them twice.
    assert_eq!(finish(&mut rig, seqs), left);
    assert_eq!((rig.engine.swapped_blocks(), rig.engine.host_counts().used), ([6, 6], 0));
}

#[test]
fn without_room_or_gain_it_is_computed_again() {
    let dear = SwapRates { copy_bytes_per_second: BLOCK, ..RATES };
    let unknown = SwapRates { prefill_tokens_per_second: 0, ..RATES };
    for config in [config(0, RATES), config(2, RATES), config(10, dear), config(10, unknown)] {
        let (mut rig, seqs) = two(config);
        assert_eq!((rig.engine.swaps(), rig.engine.host_counts().used), (0, 0));
        let left: u32 = seqs.map(|seq| 12 - rig.tokens_of(seq).len() as u32).iter().sum();
        assert!(finish(&mut rig, seqs) > left);
    }
}

#[test]
fn rates_may_be_learnt_while_it_runs() {
    let mut rig = Rig::new(config(10, SwapRates::default()), 6);
    let seqs = [8, 7].map(|prompt| rig.submit(Start::Compute, prompt, 12));
    rig.step();
    rig.engine.set_swap_rates(RATES);
    finish(&mut rig, seqs);
    assert!(rig.engine.swaps() > 0);
}

/// I3: the step being planned copies the preempted sequence's blocks; a peer may write to them only after it.
#[test]
fn blocks_are_not_lent_before_their_copy_is_made() {
    let config = EngineConfig { order: Order::Priority, overtakes: 50, ..config(10, RATES) };
    let start = || {
        let mut rig = Rig::new(config, 6);
        for (prompt, priority) in [(8, -128), (7, 127)] {
            rig.engine.submit(NewSequence { priority, ..request(Start::Compute, prompt, 12) }).unwrap();
        }
        rig
    };
    let (mut twin, mut steps) = (start(), 0);
    while twin.engine.preemptions() == 0 {
        twin.step();
        steps += 1;
    }
    let mut rig = start();
    rig.steps(steps - 1);
    let receiver = NewSequence { priority: -128, ..request(Start::Receive, 4, 2) };
    let receiver = rig.engine.submit(receiver).unwrap();
    assert!(!rig.step().is_empty());
    assert_eq!((rig.engine.swaps(), rig.engine.receiving()), (1, 0), "it is next, and there is room");
    assert_eq!(rig.engine.tables(receiver), Some(&[][..]));
    rig.step();
    assert_eq!(rig.engine.receiving(), 1);
}

/// An abort in any state of a swap frees all blocks, in the pool and in host memory (I6).
#[test]
fn an_abort_frees_host_memory() {
    let (mut rig, [_, swapped]) = two(config(10, RATES));
    rig.engine.abort(swapped, false).unwrap();
    assert_eq!(rig.engine.host_counts().used, 0);
    rig.steps(12);
    assert!(rig.engine.idle());
    // During the step that copies it out, and during the one that copies it in.
    for copied_in in [false, true] {
        let mut rig = Rig::new(config(10, RATES), 6);
        let seqs = [8, 7].map(|prompt| rig.submit(Start::Compute, prompt, 12));
        loop {
            let step = rig.plan().unwrap();
            let comes_back = rig.engine.swaps() == 1 && step.rows().iter().any(|row| row.seq == seqs[1]);
            if if copied_in { comes_back } else { rig.engine.preemptions() == 1 } {
                rig.engine.abort(seqs[1], false).unwrap();
            }
            let mut out = rig.compute(&step);
            rig.engine.apply(step, &mut out, &mut rig.events);
            rig.engine.check().unwrap();
            if rig.engine.tables(seqs[1]).is_none() {
                break;
            }
        }
        assert_eq!(rig.engine.host_counts().used, 0);
        rig.steps(12);
        assert!(rig.engine.idle());
    }
}

/// It is unknown what a failed step has copied: a sequence on its way out is computed again, one on its way in fails.
#[test]
fn a_failed_step_leaves_nothing_to_rely_on() {
    let mut rig = Rig::new(config(10, RATES), 6);
    let seqs = [8, 7].map(|prompt| rig.submit(Start::Compute, prompt, 12));
    let step = loop {
        let step = rig.plan().unwrap();
        if rig.engine.preemptions() == 1 {
            break step;
        }
        let mut out = rig.compute(&step);
        rig.engine.apply(step, &mut out, &mut rig.events);
    };
    assert!(rig.engine.host_counts().used > 0);
    rig.engine.fail(step, RunError("no".into()), &mut rig.events);
    assert_eq!((rig.engine.swaps(), rig.engine.host_counts().used), (0, 0));
    assert!(rig.engine.tables(seqs[0]).is_none() && rig.engine.tables(seqs[1]).is_some());
    rig.steps(12);
    assert_eq!(rig.tokens_of(seqs[1]).len(), 12);
    let (mut rig, seqs) = two(config(10, RATES));
    let step = loop {
        let step = rig.plan().unwrap();
        if step.rows().iter().any(|row| row.seq == seqs[1]) {
            break step;
        }
        let mut out = rig.compute(&step);
        rig.engine.apply(step, &mut out, &mut rig.events);
    };
    rig.engine.fail(step, RunError("no".into()), &mut rig.events);
    assert!(rig.engine.idle(), "it was alone in its step");
}

/// The KV that a cached block is copied for is not in a sequence's blocks before its first step (I2). A sequence that is preempted
/// before that is not swapped.
#[test]
fn what_is_not_copied_yet_is_not_swapped() {
    let limits = EngineConfig { token_budget: 4, chunk: 4, max_running: 4, ..config(40, RATES) };
    let mut rig = Rig::new(limits, 20);
    let shared = |tokens: Vec<u32>, max_tokens| {
        let new = request(Start::Compute, tokens.len() as u32, max_tokens);
        NewSequence { prefix: Some(Prefix::default()), tokens, ..new }
    };
    // Two full blocks and half of a third one stay in the cache.
    rig.engine.submit(shared((100..110).collect(), 1)).unwrap();
    while !rig.engine.idle() {
        rig.step();
    }
    // One that decodes and takes blocks, and one whose prompt takes what is left of each step.
    rig.submit(Start::Compute, 8, 20);
    rig.steps(3);
    rig.submit(Start::Compute, 40, 1);
    rig.step();
    let last = shared((100..110).chain(200..204).collect(), 6);
    let alone = fake::answer(&layout(), VOCAB, &last.tokens, &last.params).unwrap();
    let last = rig.engine.submit(last).unwrap();
    while rig.engine.preemptions() == 0 {
        assert!(rig.step().iter().all(|row| row.0 != last.0), "it has no row before it is preempted");
    }
    assert_eq!((rig.engine.prefix_hit_tokens(), rig.engine.swaps()), (10, 0));
    while !rig.engine.idle() {
        rig.step();
    }
    assert_eq!(rig.tokens_of(last), alone.iter().map(|token| token.id).collect::<Vec<_>>(), "I1");
}

/// KV that a failed step was to bring back may be missing from its blocks, so nobody finds it as a prefix (I2).
#[test]
fn what_did_not_come_back_is_not_found() {
    let mut rig = Rig::new(config(10, RATES), 6);
    rig.submit(Start::Compute, 8, 12);
    let shared = |tokens: Vec<u32>| NewSequence {
        prompt_tokens: tokens.len() as u32,
        prefix: Some(Prefix::default()),
        tokens,
        ..request(Start::Compute, 1, 3)
    };
    let mut swapped = shared((100..107).collect());
    swapped.params.max_tokens = 12;
    let swapped = rig.engine.submit(swapped).unwrap();
    let step = loop {
        let step = rig.plan().unwrap();
        if rig.engine.swaps() == 1 && step.rows().iter().any(|row| row.seq == swapped) {
            break step;
        }
        let mut out = rig.compute(&step);
        rig.engine.apply(step, &mut out, &mut rig.events);
    };
    let tokens = (100..107).chain(rig.tokens_of(swapped)).collect::<Vec<_>>();
    rig.engine.fail(step, RunError("no".into()), &mut rig.events);
    assert!(rig.engine.tables(swapped).is_none());
    let next = shared(tokens);
    let alone = fake::answer(&layout(), VOCAB, &next.tokens, &next.params).unwrap();
    let next = rig.engine.submit(next).unwrap();
    rig.steps(5);
    assert_eq!(rig.tokens_of(next), alone.iter().map(|token| token.id).collect::<Vec<_>>(), "I1");
}

/// Blocks that others share are not copied, and KV that is cached again by then does not come back from host memory.
#[test]
fn only_what_nobody_else_has_is_swapped() {
    let mut rig = Rig::new(config(20, RATES), 8);
    let shared = || NewSequence { prefix: Some(Prefix::default()), ..request(Start::Compute, 9, 14) };
    let first = rig.engine.submit(shared()).unwrap();
    rig.step();
    let mut sampled = shared();
    (sampled.params.temperature, sampled.params.seed) = (0.9, 5);
    let second = rig.engine.submit(sampled).unwrap();
    while rig.engine.swaps() == 0 {
        rig.step();
    }
    // Both begin with the same two full blocks.
    let computed = 9 + rig.tokens_of(second).len() as u32 - 1;
    assert_eq!(rig.engine.swapped_blocks()[0], u64::from(2 * (computed.div_ceil(4) - 2)));
    while !rig.engine.idle() {
        rig.step();
        rig.engine.check().unwrap();
    }
    assert_eq!([first, second].map(|seq| rig.tokens_of(seq).len()), [14, 14]);
    let mut params = shared().params;
    (params.temperature, params.seed) = (0.9, 5);
    let alone = fake::answer(&layout(), VOCAB, &shared().tokens, &params).unwrap();
    assert_eq!(rig.tokens_of(second), alone.iter().map(|token| token.id).collect::<Vec<_>>(), "I1");
}
