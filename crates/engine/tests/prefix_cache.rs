//! What is shared, what is copied, who waits for whom: one rule at a time, then a whole trace against its oracle.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod replay;
mod rig;

use std::collections::BTreeMap;

use baton_engine::{CacheConfig, Engine, EngineConfig, Event, Eviction, NewSequence, Order, Prefix, Start, fake};
use baton_types::{PoolGeometry, SeqId};
use proptest::prelude::*;
use replay::{BLOCK, Request, oracle};
use rig::{LIMITS, Rig, VOCAB, first, layout, request};

fn sharing(seed: u64, start: Start, prompt: u32, max_tokens: u32) -> NewSequence {
    NewSequence { prefix: Some(Prefix { seed, ..Prefix::default() }), ..request(start, prompt, max_tokens) }
}

fn finish(rig: &mut Rig) -> u32 {
    let mut computed = 0;
    while !rig.engine.idle() {
        computed += rig.step().iter().map(|row| row.1).sum::<u32>();
    }
    computed
}

/// Of a parked prompt counts what is to be computed, as far as that is known.
#[test]
fn a_parked_prompt_that_is_cached_holds_up_no_other() {
    let mut rig = Rig::new(EngineConfig { reserve_ahead: 10, ..LIMITS }, 60);
    let first = rig.engine.submit(sharing(1, Start::ComputeAndHold, 41, 1)).unwrap();
    rig.steps(2);
    rig.engine.release(first).unwrap();
    (0..2).for_each(|_| {
        rig.engine.submit(NewSequence { parked: true, ..sharing(1, Start::ComputeAndHold, 41, 1) }).unwrap();
    });
    rig.step();
    assert_eq!(rig.events.iter().filter(|event| matches!(event, Event::Due { .. })).count(), 2);
}

/// What is short and follows a long cached prefix finishes beside a long prompt, as any short one.
#[test]
fn a_short_rest_behind_a_cached_prefix_is_not_split() {
    let mut rig = Rig::new(EngineConfig { chunk: 32, pack_tokens: 1, ..LIMITS }, 400);
    rig.engine.set_pairs_per_token(1);
    rig.engine.submit(sharing(1, Start::Compute, 201, 1)).unwrap();
    finish(&mut rig);
    let long = rig.engine.submit(sharing(2, Start::ComputeAndHold, 200, 2)).unwrap();
    let short = rig.engine.submit(sharing(1, Start::ComputeAndHold, 230, 2)).unwrap();
    assert_eq!(rig.step(), [(long.0, 32), (short.0, 29)]);
}

fn cached_of(rig: &Rig, of: SeqId) -> Option<u32> {
    let cached = |event: &Event| match event {
        Event::Token { seq, cached_tokens, .. } | Event::Prefilled { seq, cached_tokens, .. } if *seq == of => {
            Some(*cached_tokens)
        }
        _ => None,
    };
    rig.events.iter().find_map(cached)
}

/// I1: all but the last token of a prompt is reused, to the token, and the answer is the same.
#[test]
fn a_repeated_prompt_computes_its_last_token() {
    for prompt in [1, 2, 4, 5, 8, 10] {
        let mut rig = Rig::new(LIMITS, 40);
        let one = rig.engine.submit(sharing(1, Start::Compute, prompt, 6)).unwrap();
        assert_eq!(finish(&mut rig), prompt + 5);
        let two = rig.engine.submit(sharing(1, Start::Compute, prompt, 6)).unwrap();
        assert_eq!(finish(&mut rig), 6);
        assert_eq!((cached_of(&rig, one), cached_of(&rig, two)), (Some(0), Some(prompt - 1)));
        assert_eq!(rig.tokens_of(one), rig.tokens_of(two));
        assert_eq!(rig.engine.prefix_hit_tokens(), u64::from(prompt) - 1);
    }
}

/// Nothing is shared with another tenant, or with a request that shares with nobody.
#[test]
fn other_tenants_share_nothing() {
    let mut rig = Rig::new(LIMITS, 40);
    rig.engine.submit(sharing(1, Start::Compute, 10, 2)).unwrap();
    finish(&mut rig);
    for other in [sharing(2, Start::Compute, 10, 2), request(Start::Compute, 10, 2)] {
        let seq = rig.engine.submit(other).unwrap();
        finish(&mut rig);
        assert_eq!(cached_of(&rig, seq), Some(0));
    }
}

/// n > 1: the prompt is computed once, its full blocks are shared, the partial one is copied.
#[test]
fn forks_submitted_together_compute_their_prompt_once() {
    let mut rig = Rig::new(EngineConfig { chunk: 8, ..LIMITS }, 40);
    let fork = |seed| {
        let mut new = sharing(1, Start::Compute, 30, 4);
        (new.params.temperature, new.params.seed) = (0.8, seed);
        new
    };
    let seqs: Vec<SeqId> = (0..4).map(|seed| rig.engine.submit(fork(seed)).unwrap()).collect();
    assert_eq!(rig.steps(3), [vec![(0, 8)], vec![(0, 8)], vec![(0, 8)]], "the others wait");
    assert_eq!(rig.step(), [(0, 6)]);
    assert_eq!(rig.step(), [(0, 1), (1, 1), (2, 1), (3, 1)]);
    let used = rig.blocks().0;
    assert_eq!(used, 7 + 4, "seven full blocks for all, one for each");
    finish(&mut rig);
    for (seq, seed) in seqs.into_iter().zip(0..) {
        let new = fork(seed);
        let alone = fake::answer(&layout(), VOCAB, &new.tokens, &new.params).unwrap();
        assert_eq!(rig.tokens_of(seq), alone.iter().map(|token| token.id).collect::<Vec<_>>());
    }
}

/// A sequence that waits for another's computation goes on when that one ends or stands still.
#[test]
fn nobody_waits_for_a_leader_that_does_not_advance() {
    let mut rig = Rig::new(EngineConfig { chunk: 4, ..LIMITS }, 40);
    let leader = rig.engine.submit(sharing(1, Start::Compute, 30, 4)).unwrap();
    let follower = rig.engine.submit(sharing(1, Start::Compute, 30, 4)).unwrap();
    rig.steps(2);
    assert_eq!(rig.engine.waiting(), 1);
    rig.engine.abort(leader, false).unwrap();
    assert_eq!(rig.step(), [(follower.0, 4)]);
    assert_eq!(cached_of(&rig, follower), None);
    finish(&mut rig);
    assert_eq!(cached_of(&rig, follower), Some(8), "what the leader had computed is not lost");
    // The first in turn takes the whole budget, so the second gets no row. The third has a turn before the second and
    // does not wait for it.
    let (order, overtakes) = (Order::Priority, 10);
    let mut rig = Rig::new(EngineConfig { token_budget: 8, chunk: 8, order, overtakes, ..LIMITS }, 60);
    let mut long = sharing(2, Start::Compute, 60, 1);
    long.tokens.reverse();
    rig.engine.submit(NewSequence { priority: -128, ..long }).unwrap();
    rig.engine.submit(NewSequence { priority: 127, ..sharing(1, Start::Compute, 40, 1) }).unwrap();
    rig.steps(2);
    rig.engine.submit(NewSequence { priority: -128, ..sharing(1, Start::Compute, 40, 1) }).unwrap();
    rig.step();
    assert_eq!((rig.engine.running(), rig.engine.waiting()), (3, 0));
    finish(&mut rig);
}

/// I2, I3: a reservation lends only what is not here, and what arrives is shared only once it is verified.
#[test]
fn a_reservation_lends_what_is_not_here() {
    let mut rig = Rig::new(LIMITS, 40);
    rig.engine.submit(sharing(1, Start::Compute, 10, 1)).unwrap();
    finish(&mut rig);
    let reserved = rig.engine.submit(sharing(1, Start::Receive, 18, 4)).unwrap();
    rig.step();
    assert!(matches!(rig.events.last(), Some(Event::Reserved { cached_tokens: 8, .. })));
    assert_eq!((rig.engine.lent_from(reserved), rig.blocks()), (Some(2), (2, 3, 0)));
    let other = rig.engine.submit(sharing(1, Start::Compute, 18, 1)).unwrap();
    rig.step();
    assert_eq!(cached_of(&rig, other), Some(10), "I2: nothing of what is not verified");
    // I3: only what a peer could write to waits for the fence.
    let third = rig.engine.submit(sharing(1, Start::Receive, 30, 4)).unwrap();
    rig.step();
    assert_eq!(rig.engine.lent_from(third), Some(4));
    rig.engine.abort(third, true).unwrap();
    assert_eq!(rig.blocks(), (2, 3, 4));
    rig.engine.clear_quarantine(third).unwrap();
    rig.engine.kv_arrived(reserved, &first(0), &mut rig.events).unwrap();
    assert_eq!(rig.engine.lent_from(reserved), None);
    finish(&mut rig);
}

/// n > 1 on the decode side: blocks are lent once for the same KV. The others share it and compute the prompt's last
/// token, for its logits.
#[test]
fn forks_that_receive_share_one_handoff() {
    for (prompt, used) in [(28, 8), (30, 11)] {
        let mut rig = Rig::new(LIMITS, 60);
        let seqs: Vec<SeqId> =
            (0..4).map(|_| rig.engine.submit(sharing(1, Start::Receive, prompt, 4)).unwrap()).collect();
        assert_eq!(rig.step(), []);
        assert_eq!((rig.engine.receiving(), rig.engine.waiting()), (1, 3), "the others wait");
        assert_eq!(rig.blocks(), (0, prompt.div_ceil(4), 0), "a prompt's blocks are lent once");
        rig.engine.kv_arrived(seqs[0], &first(0), &mut rig.events).unwrap();
        let rows: Vec<(u64, u32)> = seqs.iter().map(|seq| (seq.0, 1)).collect();
        assert_eq!(rig.step(), rows);
        assert_eq!(rig.blocks().0, used, "seven full blocks for all, one for each that has tokens beyond");
        assert_eq!(cached_of(&rig, seqs[3]), Some(prompt - 1));
        finish(&mut rig);
        let answers: Vec<Vec<u32>> = seqs.iter().map(|seq| rig.tokens_of(*seq)).collect();
        assert_eq!(answers.iter().map(Vec::len).collect::<Vec<_>>(), [3, 4, 4, 4], "the first token came another way");
        assert!(answers[1..].iter().all(|answer| *answer == answers[1]), "{answers:?}");
    }
}

/// The next request of a conversation: a short suffix is computed here beside the decodes, a long one is received. A
/// short one is received too when there is enough to compute here already.
#[test]
fn a_short_suffix_is_computed_here() {
    let mut rig = Rig::new(EngineConfig { local_prefill_tokens: 10, chunk: 4, ..LIMITS }, 60);
    rig.engine.submit(sharing(1, Start::Compute, 42, 1)).unwrap();
    finish(&mut rig);
    let decodes = rig.engine.submit(sharing(2, Start::Compute, 3, 40)).unwrap();
    rig.step();
    let long = rig.engine.submit(sharing(1, Start::Receive, 53, 4)).unwrap();
    let short = rig.engine.submit(sharing(1, Start::Receive, 52, 4)).unwrap();
    let mut other = sharing(1, Start::Receive, 43, 4);
    other.tokens[41] += 1;
    let other = rig.engine.submit(other).unwrap();
    assert_eq!(rig.step(), [(decodes.0, 1), (short.0, 4)], "the decode row first");
    assert_eq!((rig.engine.lent_from(long), rig.engine.lent_from(other)), (Some(10), Some(10)));
    assert_eq!(rig.steps(2), [[(decodes.0, 1), (short.0, 4)], [(decodes.0, 1), (short.0, 2)]]);
    assert_eq!(cached_of(&rig, short), Some(42));
    let alone = request(Start::Compute, 52, 4);
    let alone = fake::answer(&layout(), VOCAB, &alone.tokens, &alone.params).unwrap();
    rig.steps(3);
    assert_eq!(rig.tokens_of(short), alone.iter().map(|token| token.id).collect::<Vec<_>>()); // I1
    // A short prompt of which nothing is here goes to a prefill worker.
    let mut rig = Rig::new(EngineConfig { local_prefill_tokens: 10, ..LIMITS }, 60);
    let cold = rig.engine.submit(sharing(1, Start::Receive, 9, 4)).unwrap();
    rig.step();
    assert_eq!(rig.engine.lent_from(cold), Some(0));
    // With 0, not even a single missing token is computed here.
    let mut rig = Rig::new(EngineConfig { local_prefill_tokens: 0, ..LIMITS }, 60);
    rig.engine.submit(sharing(1, Start::Compute, 42, 1)).unwrap();
    finish(&mut rig);
    let received = rig.engine.submit(sharing(1, Start::Receive, 42, 4)).unwrap();
    rig.step();
    assert_eq!(rig.engine.lent_from(received), Some(10));
}

/// A sequence that waited for a handoff that failed goes on by itself, and waits for no other.
#[test]
fn a_failed_handoff_holds_up_nobody() {
    let mut rig = Rig::new(LIMITS, 60);
    let seqs = [(); 4].map(|()| rig.engine.submit(sharing(1, Start::Receive, 30, 4)).unwrap());
    rig.step();
    rig.engine.abort(seqs[0], true).unwrap();
    rig.step();
    assert_eq!((rig.engine.receiving(), rig.engine.waiting()), (3, 0));
    // A new sequence waits for a handoff with an earlier turn, but not for one with a later turn.
    let (order, overtakes) = (Order::Priority, 10);
    let mut rig = Rig::new(EngineConfig { order, overtakes, ..LIMITS }, 60);
    for (priority, receiving) in [(0, 1), (-128, 2), (127, 2)] {
        rig.engine.submit(NewSequence { priority, ..sharing(1, Start::Receive, 30, 4) }).unwrap();
        rig.step();
        assert_eq!(rig.engine.receiving(), receiving, "priority {priority}");
    }
}

/// A sequence waits for another's handoff only if that brings most of what it lacks.
#[test]
fn a_little_in_common_is_not_waited_for() {
    for (fork, receiving) in [(14, 2), (16, 1), (30, 1)] {
        let mut rig = Rig::new(LIMITS, 60);
        rig.engine.submit(sharing(1, Start::Receive, 30, 4)).unwrap();
        let mut other = sharing(1, Start::Receive, 31, 4);
        other.tokens[fork..].iter_mut().for_each(|token| *token += 100);
        rig.engine.submit(other).unwrap();
        rig.step();
        assert_eq!(rig.engine.receiving(), receiving, "a fork after {fork}");
    }
}

#[test]
fn what_has_arrived_is_shared_to_the_token() {
    let mut rig = Rig::new(LIMITS, 40);
    let received = rig.engine.submit(sharing(1, Start::Receive, 10, 4)).unwrap();
    rig.step();
    rig.engine.kv_arrived(received, &first(0), &mut rig.events).unwrap();
    let other = rig.engine.submit(sharing(1, Start::Compute, 10, 1)).unwrap();
    rig.step();
    assert_eq!(cached_of(&rig, other), Some(9));
    finish(&mut rig);
}

/// Blocks that a transfer still reads may be shared as a prefix, but not given to others to write.
#[test]
fn a_quarantined_prefill_is_still_a_prefix() {
    let mut rig = Rig::new(LIMITS, 40);
    let held = rig.engine.submit(sharing(1, Start::ComputeAndHold, 10, 4)).unwrap();
    rig.step();
    rig.engine.abort(held, true).unwrap();
    let (used, _, quarantined) = rig.blocks();
    assert_eq!((used, quarantined), (3, 0), "indexed, so a reference keeps them");
    let step_of = rig.engine.submit(sharing(1, Start::ComputeAndHold, 10, 4)).unwrap();
    let step = rig.plan().unwrap();
    let row = step.rows()[0];
    assert_eq!((row.start, row.len, row.completed_blocks(4)), (9, 1, 0..3), "what was cached is told with the rest");
    let mut out = rig.compute(&step);
    rig.engine.apply(step, &mut out, &mut rig.events);
    rig.engine.clear_quarantine(held).unwrap();
    rig.engine.release(step_of).unwrap();
    assert!(rig.engine.idle() && rig.engine.counts().cached > 0);
}

/// A preempted sequence finds in the cache what it had computed.
#[test]
fn a_preempted_sequence_goes_on_from_what_is_cached() {
    let mut rig = Rig::new(LIMITS, 10);
    let seqs = [16, 15].map(|prompt| {
        let mut new = sharing(1, Start::Compute, prompt, 14);
        new.tokens.iter_mut().for_each(|token| *token += prompt * 20);
        rig.engine.submit(new).unwrap()
    });
    let computed = finish(&mut rig);
    assert!(rig.engine.preemptions() > 0);
    assert!(computed < 16 + 15 + 26 + 15, "{computed} tokens: not everything was computed again");
    assert_eq!(seqs.map(|seq| cached_of(&rig, seq)), [Some(0); 2], "its own blocks are no hit of the prompt");
    for (seq, prompt) in seqs.into_iter().zip([16, 15]) {
        let new = request(Start::Compute, prompt, 14);
        let tokens: Vec<u32> = new.tokens.iter().map(|token| token + prompt * 20).collect();
        let alone = fake::answer(&layout(), VOCAB, &tokens, &new.params).unwrap();
        assert_eq!(rig.tokens_of(seq), alone.iter().map(|token| token.id).collect::<Vec<_>>());
    }
}

/// A sequence gives back the blocks that its window has passed, and a hit needs only those that the window still sees.
#[test]
fn a_window_gives_its_blocks_back() {
    let geometry = PoolGeometry { layout: fake::tiny_layout(4), blocks: vec![30, 18] };
    let engine = Engine::new(LIMITS, &geometry).unwrap();
    let mut rig = Rig::new(LIMITS, 1);
    (rig.engine, rig.model) = (engine, fake::FakeModel::new(geometry, VOCAB));
    for (round, prefix) in [Some(Prefix::default()), None].into_iter().enumerate() {
        let seq = rig.engine.submit(NewSequence { prefix, ..request(Start::Compute, 40, 30) }).unwrap();
        rig.steps(10);
        let tables = rig.engine.tables(seq).unwrap();
        assert_eq!((tables[0].holes(), tables[1].holes()), (0, 11), "45 to 49 are seen from 49");
        assert_eq!(tables[1].slot(10, 4), None);
        finish(&mut rig);
        let alone = fake::answer(
            &fake::tiny_layout(4),
            VOCAB,
            &request(Start::Compute, 40, 30).tokens,
            &request(Start::Compute, 40, 30).params,
        );
        assert_eq!(rig.tokens_of(seq), alone.unwrap().iter().map(|token| token.id).collect::<Vec<_>>(), "{round}");
        rig.engine.check().unwrap();
    }
}

/// However long a sequence is, a group with a window needs blocks only for window and chunk, and admission asks for no
/// more. Of the sequences held for a transfer, only one at a time may have blocks yet to take.
#[test]
fn a_window_needs_no_more_than_itself_and_a_chunk() {
    let config = EngineConfig { chunk: 8, ..LIMITS };
    let layout = fake::tiny_layout(4);
    let most = layout.groups[1].most_live(config.chunk, 4).unwrap();
    let rig_of = |blocks: Vec<u32>| {
        let geometry = PoolGeometry { layout: layout.clone(), blocks };
        let mut rig = Rig::new(config, 1);
        (rig.engine, rig.model) = (Engine::new(config, &geometry).unwrap(), fake::FakeModel::new(geometry, VOCAB));
        rig
    };
    let error = rig_of(vec![60, most - 1]).engine.submit(request(Start::Compute, 90, 30)).unwrap_err();
    assert!(error.to_string().contains(&format!("the worker's pool holds {}", (most - 1) * 4)), "{error}");
    let mut rig = rig_of(vec![60, most]);
    let seq = rig.submit(Start::Compute, 90, 30);
    finish(&mut rig);
    let new = request(Start::Compute, 90, 30);
    let alone = fake::answer(&layout, VOCAB, &new.tokens, &new.params).unwrap();
    assert_eq!(rig.tokens_of(seq), alone.iter().map(|token| token.id).collect::<Vec<_>>());
    assert_eq!(rig.engine.preemptions(), 0);
    let mut rig = rig_of(vec![60, 3 * most]);
    let [first, second] = [90, 89].map(|prompt| rig.submit(Start::ComputeAndHold, prompt, 2));
    while rig.engine.held() == 0 {
        rig.step();
        let to_take = rig.engine.tables(first).unwrap()[1].tokens() < 90;
        assert!(!to_take || rig.engine.running() == 1, "the second waits while the first has blocks to take");
    }
    rig.steps(20);
    assert_eq!((rig.engine.held(), rig.engine.waiting()), (2, 0));
    for seq in [first, second] {
        assert!(rig.engine.tables(seq).unwrap()[1].present().1.len() <= 3, "what the next token sees");
        rig.engine.release(seq).unwrap();
    }
    assert!(rig.engine.idle());
}

/// The pool is full all the time, and still every sequence ends with the right tokens.
#[test]
fn a_full_pool_preempts_and_loses_nothing() {
    let mut rig = Rig::new(EngineConfig { max_waiting: 100, ..LIMITS }, 24);
    let new = |n: u32| {
        let mut new = sharing(u64::from(n % 3), Start::Compute, 8 + n % 30, 20 + n % 40);
        new.tokens.iter_mut().skip(8).for_each(|token| *token += n);
        new
    };
    let seqs: Vec<SeqId> = (0..60).map(|n| rig.engine.submit(new(n)).unwrap()).collect();
    let (mut full, mut steps) = (0, 0);
    while !rig.engine.idle() {
        rig.step();
        let counts = rig.engine.counts();
        (full, steps) = (full + u64::from(counts.free + counts.cached <= 2), steps + 1);
        assert!(steps < 60 * 100, "livelock");
    }
    assert!(rig.engine.preemptions() > 20 && rig.engine.evictions() > 20 && full > steps / 10, "{full} of {steps}");
    for (seq, n) in seqs.into_iter().zip(0..) {
        let new = new(n);
        let alone = fake::answer(&layout(), VOCAB, &new.tokens, &new.params).unwrap();
        assert_eq!(rig.tokens_of(seq), alone.iter().map(|token| token.id).collect::<Vec<_>>());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    /// The bound of [`Order`]: at most `overtakes` sequences submitted later start before a sequence.
    #[test]
    fn no_more_overtake_than_the_bound_says(
        shapes in prop::collection::vec((1u32..60, 1u32..8, -300i32..300, 0u64..30), 2..40),
        overtakes in 0u32..12,
        shortest in any::<bool>(),
        max_running in 1u32..4,
        blocks in 17u32..40,
    ) {
        let order = if shortest { Order::ShortestFirst } else { Order::Priority };
        let config = EngineConfig { max_running, max_waiting: 100, context_tokens: 70, order, overtakes, ..LIMITS };
        let mut rig = Rig::new(config, blocks);
        let (mut shapes, mut started, mut submitted) = (shapes, BTreeMap::new(), 0);
        shapes.sort_by_key(|shape| shape.3);
        for tick in 0.. {
            while submitted < shapes.len() && shapes[submitted].3 <= tick {
                let (prompt, most, priority, _) = shapes[submitted];
                rig.engine.submit(NewSequence { priority, ..request(Start::Compute, prompt, most) }).unwrap();
                submitted += 1;
            }
            rig.step();
            for seq in (0..submitted as u64).filter(|seq| rig.engine.tables(SeqId(*seq)) != Some(&[][..])) {
                started.entry(seq).or_insert(tick);
            }
            if submitted == shapes.len() && rig.engine.idle() {
                break;
            }
        }
        for (seq, start) in &started {
            let later = started.range(seq + 1..).filter(|(_, other)| *other < start).count();
            prop_assert!(later <= overtakes as usize, "{} overtook {}", later, seq);
        }
    }
}

/// Conversations: each request goes on from an earlier one or begins a new one, some at the same time.
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
