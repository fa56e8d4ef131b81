//! What is shared, what is copied, who waits for whom: one rule at a time, then a whole trace against its oracle.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod bench;
mod replay;

use std::collections::BTreeMap;

use baton_engine::{CacheConfig, Engine, EngineConfig, Event, Eviction, NewSequence, Order, Prefix, Start, fake};
use baton_types::{PoolGeometry, SeqId};
use bench::{Bench, LIMITS, VOCAB, first, layout, request};
use proptest::prelude::*;
use replay::{BLOCK, Request, oracle};

fn sharing(seed: u64, start: Start, prompt: u32, max_tokens: u32) -> NewSequence {
    NewSequence { prefix: Some(Prefix { seed, ..Prefix::default() }), ..request(start, prompt, max_tokens) }
}

fn finish(bench: &mut Bench) -> u32 {
    let mut computed = 0;
    while !bench.engine.idle() {
        computed += bench.step().iter().map(|row| row.1).sum::<u32>();
    }
    computed
}

fn cached_of(bench: &Bench, of: SeqId) -> Option<u32> {
    let cached = |event: &Event| match event {
        Event::Token { seq, cached_tokens, .. } | Event::Prefilled { seq, cached_tokens, .. } if *seq == of => {
            Some(*cached_tokens)
        }
        _ => None,
    };
    bench.events.iter().find_map(cached)
}

/// I1: all but the last token of a prompt is reused, to the token, and the answer is the same.
#[test]
fn a_repeated_prompt_computes_its_last_token() {
    for prompt in [1, 2, 4, 5, 8, 10] {
        let mut bench = Bench::new(LIMITS, 40);
        let one = bench.engine.submit(sharing(1, Start::Compute, prompt, 6)).unwrap();
        assert_eq!(finish(&mut bench), prompt + 5);
        let two = bench.engine.submit(sharing(1, Start::Compute, prompt, 6)).unwrap();
        assert_eq!(finish(&mut bench), 6);
        assert_eq!((cached_of(&bench, one), cached_of(&bench, two)), (Some(0), Some(prompt - 1)));
        assert_eq!(bench.tokens_of(one), bench.tokens_of(two));
        assert_eq!(bench.engine.prefix_hit_tokens(), u64::from(prompt) - 1);
    }
}

/// Nothing is shared with another tenant, or with one who asked for none.
#[test]
fn other_tenants_share_nothing() {
    let mut bench = Bench::new(LIMITS, 40);
    bench.engine.submit(sharing(1, Start::Compute, 10, 2)).unwrap();
    finish(&mut bench);
    for other in [sharing(2, Start::Compute, 10, 2), request(Start::Compute, 10, 2)] {
        let seq = bench.engine.submit(other).unwrap();
        finish(&mut bench);
        assert_eq!(cached_of(&bench, seq), Some(0));
    }
}

/// n > 1: the prompt is computed once, its full blocks are shared, the partial one is copied.
#[test]
fn forks_submitted_together_compute_their_prompt_once() {
    let mut bench = Bench::new(EngineConfig { chunk: 8, ..LIMITS }, 40);
    let fork = |seed| {
        let mut new = sharing(1, Start::Compute, 30, 4);
        (new.params.temperature, new.params.seed) = (0.8, seed);
        new
    };
    let seqs: Vec<SeqId> = (0..4).map(|seed| bench.engine.submit(fork(seed)).unwrap()).collect();
    assert_eq!(bench.steps(3), [vec![(0, 8)], vec![(0, 8)], vec![(0, 8)]], "the others wait");
    assert_eq!(bench.step(), [(0, 6)]);
    assert_eq!(bench.step(), [(0, 1), (1, 1), (2, 1), (3, 1)]);
    let used = bench.blocks().0;
    assert_eq!(used, 7 + 4, "seven full blocks for all, one for each");
    finish(&mut bench);
    for (seq, seed) in seqs.into_iter().zip(0..) {
        let new = fork(seed);
        let alone = fake::answer(&layout(), VOCAB, &new.tokens, &new.params).unwrap();
        assert_eq!(bench.tokens_of(seq), alone.iter().map(|token| token.id).collect::<Vec<_>>());
    }
}

/// Who waits for another's computation goes on when that one ends or stands still.
#[test]
fn nobody_waits_for_a_leader_that_does_not_advance() {
    let mut bench = Bench::new(EngineConfig { chunk: 4, ..LIMITS }, 40);
    let leader = bench.engine.submit(sharing(1, Start::Compute, 30, 4)).unwrap();
    let follower = bench.engine.submit(sharing(1, Start::Compute, 30, 4)).unwrap();
    bench.steps(2);
    assert_eq!(bench.engine.waiting(), 1);
    bench.engine.abort(leader, false).unwrap();
    assert_eq!(bench.step(), [(follower.0, 4)]);
    assert_eq!(cached_of(&bench, follower), None);
    finish(&mut bench);
    assert_eq!(cached_of(&bench, follower), Some(8), "what the leader had computed is not lost");
    // The first in turn takes the whole budget, so the second gets no row, and the third, whose turn is before it, does not
    // wait for it.
    let order = Order::Priority { overtakes: 10 };
    let mut bench = Bench::new(EngineConfig { token_budget: 8, chunk: 8, order, ..LIMITS }, 60);
    let mut long = sharing(2, Start::Compute, 60, 1);
    long.tokens.reverse();
    bench.engine.submit(NewSequence { priority: -128, ..long }).unwrap();
    bench.engine.submit(NewSequence { priority: 127, ..sharing(1, Start::Compute, 40, 1) }).unwrap();
    bench.steps(2);
    bench.engine.submit(NewSequence { priority: -128, ..sharing(1, Start::Compute, 40, 1) }).unwrap();
    bench.step();
    assert_eq!((bench.engine.running(), bench.engine.waiting()), (3, 0));
    finish(&mut bench);
}

/// I2, I3: a reservation lends only what is not here, and what arrives is shared only once it is verified.
#[test]
fn a_reservation_lends_what_is_not_here() {
    let mut bench = Bench::new(LIMITS, 40);
    bench.engine.submit(sharing(1, Start::Compute, 10, 1)).unwrap();
    finish(&mut bench);
    let reserved = bench.engine.submit(sharing(1, Start::Receive, 18, 4)).unwrap();
    bench.step();
    assert!(matches!(bench.events.last(), Some(Event::Reserved { cached_tokens: 8, .. })));
    assert_eq!((bench.engine.lent_from(reserved), bench.blocks()), (Some(2), (2, 3, 0)));
    let other = bench.engine.submit(sharing(1, Start::Compute, 18, 1)).unwrap();
    bench.step();
    assert_eq!(cached_of(&bench, other), Some(10), "I2: nothing of what is not verified");
    // I3: only what a peer could write to waits for the fence.
    let third = bench.engine.submit(sharing(1, Start::Receive, 30, 4)).unwrap();
    bench.step();
    assert_eq!(bench.engine.lent_from(third), Some(4));
    bench.engine.abort(third, true).unwrap();
    assert_eq!(bench.blocks(), (2, 3, 4));
    bench.engine.clear_quarantine(third).unwrap();
    bench.engine.kv_arrived(reserved, &first(0), &mut bench.events).unwrap();
    assert_eq!(bench.engine.lent_from(reserved), None);
    finish(&mut bench);
}

/// n > 1 on the decode side: the same KV is lent for once, and who shares it computes the last token, for its logits.
#[test]
fn forks_that_receive_share_one_handoff() {
    for (prompt, used) in [(28, 8), (30, 11)] {
        let mut bench = Bench::new(LIMITS, 60);
        let seqs: Vec<SeqId> =
            (0..4).map(|_| bench.engine.submit(sharing(1, Start::Receive, prompt, 4)).unwrap()).collect();
        assert_eq!(bench.step(), []);
        assert_eq!((bench.engine.receiving(), bench.engine.waiting()), (1, 3), "the others wait");
        assert_eq!(bench.blocks(), (0, prompt.div_ceil(4), 0), "a prompt's blocks are lent once");
        bench.engine.kv_arrived(seqs[0], &first(0), &mut bench.events).unwrap();
        let rows: Vec<(u64, u32)> = seqs.iter().map(|seq| (seq.0, 1)).collect();
        assert_eq!(bench.step(), rows);
        assert_eq!(bench.blocks().0, used, "seven full blocks for all, one for each that has tokens beyond");
        assert_eq!(cached_of(&bench, seqs[3]), Some(prompt - 1));
        finish(&mut bench);
        let answers: Vec<Vec<u32>> = seqs.iter().map(|seq| bench.tokens_of(*seq)).collect();
        assert_eq!(answers.iter().map(Vec::len).collect::<Vec<_>>(), [3, 4, 4, 4], "the first token came another way");
        assert!(answers[1..].iter().all(|answer| *answer == answers[1]), "{answers:?}");
    }
}

/// The next turn of a conversation: a short suffix is computed beside those who decode, a long one is received, and so is a
/// short one where there is enough to compute already.
#[test]
fn a_short_suffix_is_computed_here() {
    let mut bench = Bench::new(EngineConfig { local_tokens: 10, chunk: 4, ..LIMITS }, 60);
    bench.engine.submit(sharing(1, Start::Compute, 42, 1)).unwrap();
    finish(&mut bench);
    let decodes = bench.engine.submit(sharing(2, Start::Compute, 3, 40)).unwrap();
    bench.step();
    let long = bench.engine.submit(sharing(1, Start::Receive, 53, 4)).unwrap();
    let short = bench.engine.submit(sharing(1, Start::Receive, 52, 4)).unwrap();
    let mut other = sharing(1, Start::Receive, 43, 4);
    other.tokens[41] += 1;
    let other = bench.engine.submit(other).unwrap();
    assert_eq!(bench.step(), [(decodes.0, 1), (short.0, 4)], "the decode row first");
    assert_eq!((bench.engine.lent_from(long), bench.engine.lent_from(other)), (Some(10), Some(10)));
    assert_eq!(bench.steps(2), [[(decodes.0, 1), (short.0, 4)], [(decodes.0, 1), (short.0, 2)]]);
    assert_eq!(cached_of(&bench, short), Some(42));
    let alone = request(Start::Compute, 52, 4);
    let alone = fake::answer(&layout(), VOCAB, &alone.tokens, &alone.params).unwrap();
    bench.steps(3);
    assert_eq!(bench.tokens_of(short), alone.iter().map(|token| token.id).collect::<Vec<_>>()); // I1
    // What is short as a whole is read by those who read.
    let mut bench = Bench::new(EngineConfig { local_tokens: 10, ..LIMITS }, 60);
    let cold = bench.engine.submit(sharing(1, Start::Receive, 9, 4)).unwrap();
    bench.step();
    assert_eq!(bench.engine.lent_from(cold), Some(0));
    // Never means never.
    let mut bench = Bench::new(EngineConfig { local_tokens: 0, ..LIMITS }, 60);
    bench.engine.submit(sharing(1, Start::Compute, 42, 1)).unwrap();
    finish(&mut bench);
    let received = bench.engine.submit(sharing(1, Start::Receive, 42, 4)).unwrap();
    bench.step();
    assert_eq!(bench.engine.lent_from(received), Some(10));
}

/// Who waits for a handoff that fails goes on by itself, and waits for no other.
#[test]
fn a_failed_handoff_holds_up_nobody() {
    let mut bench = Bench::new(LIMITS, 60);
    let seqs = [(); 4].map(|()| bench.engine.submit(sharing(1, Start::Receive, 30, 4)).unwrap());
    bench.step();
    bench.engine.abort(seqs[0], true).unwrap();
    bench.step();
    assert_eq!((bench.engine.receiving(), bench.engine.waiting()), (3, 0));
    // One that comes now waits for the first of them, though not for one with a later turn.
    let order = Order::Priority { overtakes: 10 };
    let mut bench = Bench::new(EngineConfig { order, ..LIMITS }, 60);
    for (priority, receiving) in [(0, 1), (-128, 2), (127, 2)] {
        bench.engine.submit(NewSequence { priority, ..sharing(1, Start::Receive, 30, 4) }).unwrap();
        bench.step();
        assert_eq!(bench.engine.receiving(), receiving, "priority {priority}");
    }
}

/// A handoff is waited for by those that lack more of it than of anything else, and who has next to all waits for nothing.
#[test]
fn a_little_in_common_is_not_waited_for() {
    for (fork, receiving) in [(14, 2), (16, 1), (30, 1)] {
        let mut bench = Bench::new(LIMITS, 60);
        bench.engine.submit(sharing(1, Start::Receive, 30, 4)).unwrap();
        let mut other = sharing(1, Start::Receive, 31, 4);
        other.tokens[fork..].iter_mut().for_each(|token| *token += 100);
        bench.engine.submit(other).unwrap();
        bench.step();
        assert_eq!(bench.engine.receiving(), receiving, "a fork after {fork}");
    }
}

#[test]
fn what_has_arrived_is_shared_to_the_token() {
    let mut bench = Bench::new(LIMITS, 40);
    let received = bench.engine.submit(sharing(1, Start::Receive, 10, 4)).unwrap();
    bench.step();
    bench.engine.kv_arrived(received, &first(0), &mut bench.events).unwrap();
    let other = bench.engine.submit(sharing(1, Start::Compute, 10, 1)).unwrap();
    bench.step();
    assert_eq!(cached_of(&bench, other), Some(9));
    finish(&mut bench);
}

/// Blocks that a transfer still reads may be shared but not given to others.
#[test]
fn a_quarantined_prefill_is_still_a_prefix() {
    let mut bench = Bench::new(LIMITS, 40);
    let held = bench.engine.submit(sharing(1, Start::ComputeAndHold, 10, 4)).unwrap();
    bench.step();
    bench.engine.abort(held, true).unwrap();
    let (used, _, quarantined) = bench.blocks();
    assert_eq!((used, quarantined), (3, 0), "indexed, so a reference keeps them");
    let step_of = bench.engine.submit(sharing(1, Start::ComputeAndHold, 10, 4)).unwrap();
    let step = bench.plan().unwrap();
    let row = step.rows()[0];
    assert_eq!((row.start, row.len, row.completed_blocks(4)), (9, 1, 0..3), "what was cached is told with the rest");
    let mut out = bench.compute(&step);
    bench.engine.apply(step, &mut out, &mut bench.events);
    bench.engine.clear_quarantine(held).unwrap();
    bench.engine.release(step_of).unwrap();
    assert!(bench.engine.idle() && bench.engine.counts().cached > 0);
}

/// A preempted sequence finds what it had computed.
#[test]
fn a_preempted_sequence_goes_on_from_what_is_cached() {
    let mut bench = Bench::new(LIMITS, 10);
    let seqs = [16, 15].map(|prompt| {
        let mut new = sharing(1, Start::Compute, prompt, 14);
        new.tokens.iter_mut().for_each(|token| *token += prompt * 20);
        bench.engine.submit(new).unwrap()
    });
    let computed = finish(&mut bench);
    assert!(bench.engine.preemptions() > 0);
    assert!(computed < 16 + 15 + 26 + 15, "{computed} tokens: not everything was computed again");
    assert_eq!(seqs.map(|seq| cached_of(&bench, seq)), [Some(0); 2], "its own blocks are no hit of the prompt");
    for (seq, prompt) in seqs.into_iter().zip([16, 15]) {
        let new = request(Start::Compute, prompt, 14);
        let tokens: Vec<u32> = new.tokens.iter().map(|token| token + prompt * 20).collect();
        let alone = fake::answer(&layout(), VOCAB, &tokens, &new.params).unwrap();
        assert_eq!(bench.tokens_of(seq), alone.iter().map(|token| token.id).collect::<Vec<_>>());
    }
}

/// A window's blocks go as the sequence goes on, and a hit needs only those that the window still shows.
#[test]
fn a_window_gives_its_blocks_back() {
    let geometry = PoolGeometry { layout: fake::tiny_layout(4), blocks: vec![30, 18] };
    let engine = Engine::new(LIMITS, &geometry).unwrap();
    let mut bench = Bench::new(LIMITS, 1);
    (bench.engine, bench.model) = (engine, fake::FakeModel::new(geometry, VOCAB));
    for (round, prefix) in [Some(Prefix::default()), None].into_iter().enumerate() {
        let seq = bench.engine.submit(NewSequence { prefix, ..request(Start::Compute, 40, 30) }).unwrap();
        bench.steps(10);
        let tables = bench.engine.tables(seq).unwrap();
        assert_eq!((tables[0].holes(), tables[1].holes()), (0, 11), "45 to 49 are seen from 49");
        assert_eq!(tables[1].slot(10, 4), None);
        finish(&mut bench);
        let alone = fake::answer(
            &fake::tiny_layout(4),
            VOCAB,
            &request(Start::Compute, 40, 30).tokens,
            &request(Start::Compute, 40, 30).params,
        );
        assert_eq!(bench.tokens_of(seq), alone.unwrap().iter().map(|token| token.id).collect::<Vec<_>>(), "{round}");
        bench.engine.check().unwrap();
    }
}

/// However long a sequence, a group with a window needs blocks for window and chunk: that is what admission asks for. Of those
/// that are held for a transfer only one at a time may have blocks yet to take.
#[test]
fn a_window_needs_no_more_than_itself_and_a_chunk() {
    let config = EngineConfig { chunk: 8, ..LIMITS };
    let layout = fake::tiny_layout(4);
    let most = layout.groups[1].most_live(config.chunk, 4).unwrap();
    let bench_of = |blocks: Vec<u32>| {
        let geometry = PoolGeometry { layout: layout.clone(), blocks };
        let mut bench = Bench::new(config, 1);
        (bench.engine, bench.model) = (Engine::new(config, &geometry).unwrap(), fake::FakeModel::new(geometry, VOCAB));
        bench
    };
    let error = bench_of(vec![60, most - 1]).engine.submit(request(Start::Compute, 90, 30)).unwrap_err();
    assert!(error.to_string().contains(&format!("the worker's pool holds {}", (most - 1) * 4)), "{error}");
    let mut bench = bench_of(vec![60, most]);
    let seq = bench.submit(Start::Compute, 90, 30);
    finish(&mut bench);
    let new = request(Start::Compute, 90, 30);
    let alone = fake::answer(&layout, VOCAB, &new.tokens, &new.params).unwrap();
    assert_eq!(bench.tokens_of(seq), alone.iter().map(|token| token.id).collect::<Vec<_>>());
    assert_eq!(bench.engine.preemptions(), 0);
    let mut bench = bench_of(vec![60, 3 * most]);
    let [first, second] = [90, 89].map(|prompt| bench.submit(Start::ComputeAndHold, prompt, 2));
    while bench.engine.held() == 0 {
        bench.step();
        let to_take = bench.engine.tables(first).unwrap()[1].tokens() < 90;
        assert!(!to_take || bench.engine.running() == 1, "the second waits while the first has blocks to take");
    }
    bench.steps(20);
    assert_eq!((bench.engine.held(), bench.engine.waiting()), (2, 0));
    for seq in [first, second] {
        assert!(bench.engine.tables(seq).unwrap()[1].present().1.len() <= 3, "what the next token sees");
        bench.engine.release(seq).unwrap();
    }
    assert!(bench.engine.idle());
}

/// Pool at 100%: everything is in use all the time, everybody ends with the right tokens.
#[test]
fn a_full_pool_preempts_and_loses_nothing() {
    let mut bench = Bench::new(EngineConfig { max_waiting: 100, ..LIMITS }, 24);
    let new = |n: u32| {
        let mut new = sharing(u64::from(n % 3), Start::Compute, 8 + n % 30, 20 + n % 40);
        new.tokens.iter_mut().skip(8).for_each(|token| *token += n);
        new
    };
    let seqs: Vec<SeqId> = (0..60).map(|n| bench.engine.submit(new(n)).unwrap()).collect();
    let (mut full, mut steps) = (0, 0);
    while !bench.engine.idle() {
        bench.step();
        let counts = bench.engine.counts();
        (full, steps) = (full + u64::from(counts.free + counts.cached <= 2), steps + 1);
        assert!(steps < 60 * 100, "livelock");
    }
    assert!(bench.engine.preemptions() > 20 && bench.engine.evictions() > 20 && full > steps / 10, "{full} of {steps}");
    for (seq, n) in seqs.into_iter().zip(0..) {
        let new = new(n);
        let alone = fake::answer(&layout(), VOCAB, &new.tokens, &new.params).unwrap();
        assert_eq!(bench.tokens_of(seq), alone.iter().map(|token| token.id).collect::<Vec<_>>());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    /// The bound of [`Order`]: so many later ones start before a sequence, and no more.
    #[test]
    fn no_more_overtake_than_the_bound_says(
        shapes in prop::collection::vec((1u32..60, 1u32..8, -300i32..300, 0u64..30), 2..40),
        overtakes in 0u32..12,
        shortest in any::<bool>(),
        max_running in 1u32..4,
        blocks in 17u32..40,
    ) {
        let order = if shortest { Order::ShortestFirst { overtakes } } else { Order::Priority { overtakes } };
        let config = EngineConfig { max_running, max_waiting: 100, context_tokens: 70, order, ..LIMITS };
        let mut bench = Bench::new(config, blocks);
        let (mut shapes, mut started, mut submitted) = (shapes, BTreeMap::new(), 0);
        shapes.sort_by_key(|shape| shape.3);
        for tick in 0.. {
            while submitted < shapes.len() && shapes[submitted].3 <= tick {
                let (prompt, most, priority, _) = shapes[submitted];
                bench.engine.submit(NewSequence { priority, ..request(Start::Compute, prompt, most) }).unwrap();
                submitted += 1;
            }
            bench.step();
            for seq in (0..submitted as u64).filter(|seq| bench.engine.tables(SeqId(*seq)) != Some(&[][..])) {
                started.entry(seq).or_insert(tick);
            }
            if submitted == shapes.len() && bench.engine.idle() {
                break;
            }
        }
        for (seq, start) in &started {
            let later = started.range(seq + 1..).filter(|(_, other)| *other < start).count();
            prop_assert!(later <= overtakes as usize, "{} overtook {}", later, seq);
        }
    }
}

/// Conversations: each request goes on from an earlier one or begins anew, some at the same time.
fn conversations() -> Vec<Request> {
    let mut state = 7u32;
    let mut random = move |below: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % below
    };
    let (mut requests, mut name): (Vec<Request>, u32) = (Vec::new(), 1);
    for at in 0..300u32 {
        let before = (at > 3 && random(4) > 0).then(|| requests[at as usize - 1 - random(at.min(40)) as usize].clone());
        let mut blocks = before.map_or(vec![0], |r| r.blocks);
        for _ in 0..random(6) {
            name += 1;
            blocks.push(name);
        }
        let whole = blocks.len() as u32 * BLOCK;
        requests.push(Request {
            at_ms: u64::from(at) * 100,
            input: whole - random(BLOCK),
            output: 1 + random(8),
            blocks,
        });
    }
    requests
}

#[test]
fn an_unlimited_cache_finds_what_the_traces_oracle_finds() {
    let requests = conversations();
    let unlimited = replay::replay(&requests, CacheConfig::default(), 8000);
    assert_eq!(unlimited.hit_tokens, oracle(&requests));
    assert_eq!((unlimited.evictions, unlimited.preemptions), (0, 0));
    for eviction in [Eviction::Lru, Eviction::Lfu, Eviction::Priority] {
        let most = unlimited.cached / 8;
        let short =
            replay::replay(&requests, CacheConfig { max_blocks: most, eviction, ..CacheConfig::default() }, 8000);
        assert!(short.cached <= most, "I5");
        assert!(short.evictions > 0 && short.hit_tokens > 0 && short.hit_tokens < unlimited.hit_tokens, "{short:?}");
    }
}
