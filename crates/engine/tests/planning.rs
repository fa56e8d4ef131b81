//! What is refused, what runs in which order, who is preempted: one rule at a time. Random combinations are the
//! simulator's (`crates/simulator`).
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod rig;

use baton_engine::{
    Aborted, Engine, EngineConfig, EngineError, Event, NewSequence, Order, SequenceError, Share, Start, Time, fake,
};
use baton_types::{BatonError, Class, ErrorKind, FinishReason, PoolGeometry, RequestId, SamplingParams, SeqId};
use proptest::prelude::*;
use rig::{LIMITS, Rig, VOCAB, first, layout, request};

#[test]
fn limits_that_cannot_work_are_named() {
    let cases = [
        ("chunk", EngineConfig { chunk: 0, ..LIMITS }),
        ("pack_tokens", EngineConfig { pack_tokens: 0, ..LIMITS }),
        ("max_running", EngineConfig { max_running: 0, ..LIMITS }),
        ("context_tokens", EngineConfig { context_tokens: 1, ..LIMITS }),
        ("token_budget", EngineConfig { token_budget: 7, ..LIMITS }),
    ];
    for (name, config) in cases {
        let error = Engine::new(config, &PoolGeometry::uniform(fake::tiny_layout(4), 4)).err().unwrap();
        assert!(matches!(error, EngineError::Config { field, .. } if field == name), "{error}");
    }
}

/// I8: what can never run is refused at once, with the numbers, and costs nothing.
#[test]
fn what_can_never_fit_is_refused() {
    let mut rig = Rig::new(EngineConfig { context_tokens: 100, ..LIMITS }, 10);
    let resumed = |tokens: u32, stop| NewSequence {
        prompt_tokens: 5,
        params: SamplingParams { stop_token_ids: vec![stop], ..request(Start::Compute, 5, 4).params },
        ..request(Start::Compute, tokens, 4)
    };
    let cases = [
        (NewSequence { prompt_tokens: 0, ..request(Start::Compute, 5, 4) }, "prompt_tokens is 0"),
        (NewSequence { prompt_tokens: 6, ..request(Start::Compute, 5, 4) }, "the 5 tokens given"),
        (request(Start::Compute, 5, 0), "max_tokens is 0"),
        (
            request(Start::Compute, 90, 11),
            "prompt of 90 tokens and max_tokens 11 need 101, more than the context of 100",
        ),
        (request(Start::Compute, u32::MAX / 1_000_000, u32::MAX), "more than the context"),
        (request(Start::Compute, 36, 6), "KV for 41 tokens, the worker's pool holds 40"),
        (request(Start::Receive, 36, 6), "KV for 41 tokens"),
        (request(Start::ComputeAndHold, 41, 1), "KV for 41 tokens"),
        (resumed(9, 400), "as many as max_tokens allows"),
        (resumed(8, 7), "the last of them one of stop_token_ids"),
    ];
    for (new, expected) in cases {
        let error = rig.engine.submit(new).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }
    assert!(rig.engine.idle());
    rig.submit(Start::Compute, 36, 5);
    rig.submit(Start::ComputeAndHold, 40, 60);
}

/// I5: the queue is bounded; a place that frees makes room again.
#[test]
fn a_full_queue_refuses() {
    let mut rig = Rig::new(EngineConfig { max_running: 2, max_waiting: 3, ..LIMITS }, 100);
    let seqs: Vec<SeqId> = (0..5).map(|_| rig.submit(Start::Compute, 4, 50)).collect();
    for _ in 0..2 {
        let error = rig.engine.submit(request(Start::Compute, 4, 4)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ResourceExhausted);
        rig.step();
    }
    assert_eq!((rig.engine.running(), rig.engine.waiting()), (2, 3));
    assert_eq!(rig.engine.abort(seqs[3], false), Ok(Aborted::Freed));
    rig.submit(Start::Compute, 4, 50);
}

/// A parked sequence keeps its turn and holds nobody up. Its turn is said to be near when little is left before it.
#[test]
fn a_parked_sequence_waits_for_its_owner_and_holds_nobody_up() {
    let mut rig = Rig::new(EngineConfig { chunk: 8, pack_tokens: 8, reserve_ahead: 10, ..LIMITS }, 100);
    rig.submit(Start::ComputeAndHold, 24, 1);
    let seqs: Vec<SeqId> = [6, 6, 6].into_iter().map(|prompt| rig.engine.submit(parked(prompt, 0)).unwrap()).collect();
    rig.submit(Start::ComputeAndHold, 5, 1);
    assert_eq!(rig.step(), [(0, 8), (4, 5)], "no parked one, though two would fit");
    assert_eq!(due(&mut rig), []);
    rig.step();
    assert_eq!(due(&mut rig), [], "16 tokens were left before them");
    assert_eq!(rig.step(), [(0, 8)]);
    assert_eq!(due(&mut rig), [1], "8 were left, and with its own, 14 before the next");
    assert_eq!(rig.step(), []);
    assert_eq!(due(&mut rig), [2], "only 6 are before it; and of the first it was said");
    rig.now = Time(0).after_ms(49);
    assert_eq!((rig.step(), due(&mut rig)), (vec![], vec![]));
    rig.now = Time(0).after_ms(50);
    assert_eq!((rig.step(), due(&mut rig)), (vec![], vec![3]), "what the others wait for may be long in coming");
    rig.engine.unpark(seqs[1]).unwrap();
    assert_eq!(rig.step(), [(2, 6)]);
    rig.engine.unpark(seqs[0]).unwrap();
    assert_eq!(rig.step(), [(1, 6)]);
    assert_eq!(rig.engine.abort(seqs[2], false), Ok(Aborted::Freed));
    for held in [0, 1, 2, 4] {
        rig.engine.release(SeqId(held)).unwrap();
    }
    assert!(rig.engine.idle());
}

fn due(rig: &mut Rig) -> Vec<u64> {
    let due = |event| if let Event::Due { seq } = event { Some(seq.0) } else { None };
    rig.events.drain(..).filter_map(due).collect()
}

fn parked(prompt: u32, priority: i32) -> NewSequence {
    NewSequence { parked: true, priority, ..request(Start::ComputeAndHold, prompt, 1) }
}

/// What comes later in turn is not before a parked sequence, however much it is.
#[test]
fn a_parked_sequence_is_due_though_later_ones_compute() {
    let config = EngineConfig { order: Order::Priority, overtakes: 9, chunk: 8, pack_tokens: 8, ..LIMITS };
    let mut rig = Rig::new(EngineConfig { reserve_ahead: 10, ..config }, 100);
    for priority in [1, baton_types::Class::Batch.at_workers(0)] {
        rig.engine.submit(NewSequence { priority, ..request(Start::ComputeAndHold, 60, 1) }).unwrap();
    }
    rig.step();
    let first = rig.engine.submit(parked(6, 0)).unwrap();
    rig.engine.submit(parked(6, 2)).unwrap();
    rig.step();
    assert_eq!(due(&mut rig), [2], "but the last one has 52 tokens of an earlier turn before it");
    rig.engine.unpark(first).unwrap();
    assert_eq!(rig.step()[0], (2, 6), "and it is computed first");
}

/// While there is something else to compute, what was due has time.
#[test]
fn those_behind_wait_longer_while_there_is_something_to_compute() {
    let mut rig = Rig::new(EngineConfig { chunk: 1, pack_tokens: 1, reserve_ahead: 16, ..LIMITS }, 100);
    rig.submit(Start::ComputeAndHold, 9, 1);
    for _ in 0..3 {
        rig.engine.submit(parked(10, 0)).unwrap();
    }
    rig.step();
    assert_eq!(due(&mut rig), [1]);
    for (ms, want) in [(499, vec![]), (500, vec![2])] {
        rig.now = Time(0).after_ms(ms);
        rig.step();
        assert_eq!(due(&mut rig), want, "after {ms} ms");
    }
}

#[test]
fn decodes_go_first_then_one_long_prompt_and_what_fits_beside_it() {
    let config = EngineConfig { token_budget: 10, chunk: 6, max_running: 4, ..LIMITS };
    let mut rig = Rig::new(config, 100);
    for prompt in [3, 20, 7, 2, 4] {
        rig.submit(Start::Compute, prompt, 5);
    }
    let rows = rig.steps(4);
    // 0 is first, 3 can be finished too, and the rest of the budget goes to the first of the long ones.
    assert_eq!(rows[0], [(0, 3), (1, 5), (3, 2)]);
    assert_eq!(rows[1], [(0, 1), (3, 1), (1, 6), (2, 2)]);
    assert_eq!(rows[2], [(0, 1), (3, 1), (1, 6), (2, 2)]);
    // A place for 4 comes only when one of the four ends.
    assert_eq!(rows[3], [(0, 1), (3, 1), (1, 3), (2, 3)]);
    assert_eq!((rig.engine.running(), rig.engine.waiting()), (4, 1));
}

/// Prompts share a step up to the length that saturates the hardware. A longer prompt ends alone; until then, others
/// may end beside it.
#[test]
fn prompts_are_packed_up_to_the_saturating_length() {
    let config = EngineConfig { token_budget: 64, chunk: 20, pack_tokens: 12, max_running: 8, ..LIMITS };
    let mut rig = Rig::new(config, 100);
    for prompt in [15, 2, 40, 13, 3] {
        rig.submit(Start::Compute, prompt, 9);
    }
    assert_eq!(rig.step(), [(0, 15)]);
    assert_eq!(rig.step(), [(0, 1), (1, 2), (2, 7), (4, 3)], "filled up, decode rows not counted");
    assert_eq!(rig.step(), [(0, 1), (1, 1), (4, 1), (2, 20), (3, 13)]);
    assert_eq!(rig.step(), [(0, 1), (1, 1), (3, 1), (4, 1), (2, 13)]);
}

/// Attention makes later chunks slower: they are shorter where somebody else would wait for them.
#[test]
fn chunks_of_a_long_prompt_get_shorter_beside_others() {
    let config = EngineConfig { chunk: 64, pack_tokens: 1, max_running: 1, ..LIMITS };
    let lens = |pairs_per_token, others: u32| {
        let mut rig = Rig::new(config, 200);
        rig.engine.set_pairs_per_token(pairs_per_token);
        rig.submit(Start::ComputeAndHold, 400, 2);
        for _ in 0..others {
            rig.submit(Start::ComputeAndHold, 400, 2);
        }
        (0..4).map(|_| rig.step()[0].1).collect::<Vec<u32>>()
    };
    assert_eq!(lens(300, 1), [64, 48, 48, 32]);
    assert_eq!(lens(1, 1), [64, 16, 16, 16], "a quarter at least");
    assert_eq!(lens(0, 1), [64; 4], "while the cost is not known");
    assert_eq!(lens(300, 0), [64; 4], "nobody waits");
}

/// Who has a share of the computing waits for a short step, not for a whole one of somebody else.
#[test]
fn chunks_are_short_where_tenants_share() {
    let config = EngineConfig { order: Order::Priority, overtakes: 9, chunk: 64, pack_tokens: 20, ..LIMITS };
    let lens = |tenants: &[u64], priority| {
        let mut rig = Rig::new(config, 400);
        for tenant in tenants {
            let share = Share { tenant: *tenant, weight: 1 };
            rig.engine.submit(NewSequence { share, priority, ..request(Start::ComputeAndHold, 400, 2) }).unwrap();
        }
        (0..3).map(|_| rig.step()[0].1).collect::<Vec<u32>>()
    };
    let batch = Class::Batch.at_workers(0);
    assert_eq!(lens(&[1, 1], 0), [64; 3], "of one tenant");
    assert_eq!(lens(&[1, 2], 0), [20; 3]);
    assert_eq!((lens(&[1, 1], batch), lens(&[1], batch)), (vec![20; 3], vec![64; 3]));
}

/// A step's rest is no way around a share: a short prompt goes before a longer one of its own tenant, not of another.
#[test]
fn a_short_prompt_does_not_take_the_place_of_another_tenants() {
    let config = EngineConfig { order: Order::Priority, overtakes: 9, pack_tokens: 30, ..LIMITS };
    let rows = |tenants: [u64; 4]| {
        let mut rig = Rig::new(config, 100);
        for (tenant, prompt) in tenants.into_iter().zip([20, 25, 8, 9]) {
            let share = Share { tenant, weight: 1 };
            rig.engine.submit(NewSequence { share, ..request(Start::Compute, prompt, 2) }).unwrap();
        }
        rig.step()
    };
    assert_eq!(rows([1, 1, 1, 1]), [(0, 20), (1, 2), (2, 8)], "of one tenant, what can end does");
    // Of the second tenant, which is to have as much: its two short prompts are before the first one's long ones.
    assert_eq!(rows([1, 1, 2, 2]), [(2, 8), (3, 9), (0, 13)]);
    // The first tenant has the earliest prompt and the second the next one, which does not fit: nobody takes its place.
    assert_eq!(rows([1, 2, 1, 1]), [(0, 20), (1, 10)]);
    assert_eq!(rows([1, 2, 2, 2]), [(0, 20), (1, 2), (2, 8)], "but its own tenant");
}

#[test]
fn an_answer_ends_with_max_tokens_or_a_stop_token_which_is_told() {
    let alone = fake::answer(&layout(), VOCAB, &[0, 1, 2], &request(Start::Compute, 3, 6).params).unwrap();
    let ids: Vec<u32> = alone.iter().map(|token| token.id).collect();
    let mut rig = Rig::new(LIMITS, 100);
    let whole = rig.submit(Start::Compute, 3, 6);
    let mut stopping = request(Start::Compute, 3, 6);
    stopping.params.stop_token_ids = vec![ids[2]];
    let stopped = rig.engine.submit(stopping).unwrap();
    rig.steps(6);
    assert_eq!((rig.tokens_of(whole), rig.tokens_of(stopped)), (ids.clone(), ids[..3].to_vec()));
    let end = |seq, reason| Event::Finished { seq, request_id: RequestId("r".into()), reason, cached_tokens: 0 };
    assert!(rig.events.contains(&end(whole, FinishReason::Length)));
    assert!(rig.events.contains(&end(stopped, FinishReason::Stop)));
    assert!(rig.engine.idle() && rig.plan().is_none());
}

/// The last token of an answer needs no KV: an answer that exactly fills the pool ends.
#[test]
fn an_answer_may_fill_the_pool_to_the_last_slot() {
    let mut rig = Rig::new(LIMITS, 10);
    let seq = rig.submit(Start::Compute, 20, 21);
    rig.steps(21);
    assert_eq!(rig.tokens_of(seq).len(), 21);
    assert!(rig.engine.idle());
}

/// I1: the youngest sequence is preempted, waits in its old place, and goes on with the same tokens.
#[test]
fn the_youngest_is_preempted_and_loses_nothing() {
    let mut rig = Rig::new(LIMITS, 10);
    let seqs = [16, 12, 4].map(|prompt| rig.submit(Start::Compute, prompt, 12));
    let late = rig.submit(Start::Compute, 5, 12);
    let mut order = Vec::new();
    while !rig.engine.idle() {
        let before = rig.engine.preemptions();
        let rows = rig.step();
        if rig.engine.preemptions() > before {
            order.push((rig.engine.running(), rows.iter().map(|row| row.0).max().unwrap()));
        }
    }
    assert!(!order.is_empty() && order.iter().all(|(running, _)| *running >= 1));
    for (seq, prompt) in seqs.into_iter().chain([late]).zip([16u32, 12, 4, 5]) {
        let new = request(Start::Compute, prompt, 12);
        let alone = fake::answer(&layout(), VOCAB, &new.tokens, &new.params).unwrap();
        assert_eq!(rig.tokens_of(seq), alone.iter().map(|token| token.id).collect::<Vec<_>>());
    }
    let ends: Vec<SeqId> = rig.events.iter().filter(|e| matches!(e, Event::Finished { .. })).map(|e| e.seq()).collect();
    assert!(ends.is_sorted(), "equal answers end in the order of submission: {ends:?}");
}

#[test]
fn a_newcomer_leaves_each_running_sequence_its_next_block() {
    let mut rig = Rig::new(LIMITS, 6);
    rig.submit(Start::Compute, 8, 8);
    rig.submit(Start::Compute, 8, 8);
    rig.step();
    assert_eq!((rig.engine.running(), rig.blocks().0), (2, 4));
    // Two blocks are free, and two sequences run.
    rig.submit(Start::Compute, 4, 2);
    rig.submit(Start::Receive, 4, 2);
    rig.step();
    assert_eq!((rig.engine.running(), rig.engine.waiting(), rig.engine.receiving()), (2, 2, 0));
    assert_eq!(rig.engine.preemptions(), 0);
}

/// Lent blocks cannot be taken. A sequence that needs one waits, keeps what it has, and goes on when a block is free.
#[test]
fn growth_waits_for_lent_blocks_without_losing_work() {
    let mut rig = Rig::new(LIMITS, 5);
    let grower = rig.submit(Start::Compute, 8, 12);
    rig.step();
    let lent = rig.submit(Start::Receive, 4, 2);
    let computed: u32 = rig.steps(20).iter().flatten().map(|row| row.1).sum();
    assert_eq!((computed, rig.blocks()), (8, (4, 1, 0)), "4 blocks are full, the fifth is lent");
    assert_eq!((rig.engine.running(), rig.engine.preemptions()), (1, 0));
    assert_eq!(rig.engine.abort(lent, true), Ok(Aborted::Quarantined));
    assert_eq!((rig.step(), rig.blocks()), (vec![], (4, 0, 1)), "I3: not before the fence");
    rig.engine.clear_quarantine(lent).unwrap();
    rig.steps(3);
    assert_eq!(rig.tokens_of(grower).len(), 12);
    assert!(rig.engine.idle() && rig.engine.preemptions() == 0);
}

/// I5: a peer that stands still may keep blocks for ever, but nobody waits for ever for those alone.
#[test]
fn blocks_in_quarantine_are_waited_for_only_so_long() {
    let mut rig = Rig::new(LIMITS, 5);
    let lent = rig.submit(Start::Receive, 16, 2);
    rig.step();
    assert_eq!(rig.engine.abort(lent, true), Ok(Aborted::Quarantined));
    let [long, short] = [8, 1].map(|prompt| rig.submit(Start::Compute, prompt, 3));
    let at = |rig: &mut Rig, ms| {
        rig.now = Time(0).after_ms(ms);
        rig.step()
    };
    assert_eq!((at(&mut rig, 100), at(&mut rig, 2_099)), (vec![], vec![]));
    assert_eq!(rig.engine.waiting(), 2);
    // The first fails; the one behind it has room enough.
    at(&mut rig, 2_100);
    let error = SequenceError::Quarantined { blocks: 8 };
    assert_eq!(error.kind(), ErrorKind::ResourceExhausted);
    let request_id = RequestId("r".into());
    assert_eq!(rig.events.last(), Some(&Event::Failed { seq: long, request_id, error, quarantined: false }));
    assert_eq!(at(&mut rig, 2_101), [(short.0, 1)]);
    // The wait starts anew for the next sequence, and it goes on if blocks come back in time.
    rig.steps(5);
    let patient = rig.submit(Start::Compute, 8, 1);
    assert_eq!((at(&mut rig, 3_000), at(&mut rig, 4_999)), (vec![], vec![]));
    rig.engine.clear_quarantine(lent).unwrap();
    assert_eq!(at(&mut rig, 5_000), [(patient.0, 8)]);
    assert!(rig.engine.idle());
}

/// The blocks of a prefill are on their way to a peer while it is computed: nobody takes them (I3).
#[test]
fn a_held_prefill_is_never_preempted() {
    // Computed a token at a time, it still runs when the older one needs the last block.
    let mut rig = Rig::new(EngineConfig { chunk: 1, ..LIMITS }, 5);
    rig.submit(Start::Compute, 1, 16);
    let held = rig.submit(Start::ComputeAndHold, 12, 1);
    assert_eq!(rig.steps(10)[9], [(1, 1)], "the first waits for a block, the second goes on");
    rig.steps(2);
    assert_eq!((rig.engine.preemptions(), rig.engine.held(), rig.blocks().0), (0, 1, 5));
    rig.engine.release(held).unwrap();
    rig.steps(8);
    assert!(rig.engine.idle());
}

#[test]
#[cfg_attr(debug_assertions, should_panic(expected = "a step out of turn"))]
fn steps_are_applied_in_the_order_of_planning() {
    let mut rig = Rig::new(LIMITS, 15);
    rig.submit(Start::Compute, 4, 5);
    let (_first, second) = (rig.plan().unwrap(), rig.plan().unwrap());
    assert!(rig.plan().is_none(), "two are enough");
    rig.engine.apply(second, &mut vec![first(0)], &mut rig.events);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// First come, first served: a sequence ends within the steps that it and those before it would need one after the
    /// other, a token at a time, whatever comes after. So nobody starves, and no two sequences preempt each other for
    /// ever.
    #[test]
    fn nobody_waits_for_the_younger(
        shapes in prop::collection::vec((1u32..30, 1u32..12, 0u64..20), 2..20),
        chunk in 1u32..12,
        max_running in 1u32..6,
        spare in 0u32..6,
    ) {
        let blocks = shapes.iter().map(|(prompt, most, _)| (prompt + most).div_ceil(4)).max().unwrap_or(1) + spare;
        let config =
            EngineConfig { token_budget: max_running, chunk, max_running, max_waiting: 100, context_tokens: 100, ..LIMITS };
        let mut rig = Rig::new(config, blocks);
        let (mut arrivals, mut due, mut bound) = (shapes.clone(), Vec::new(), 0u64);
        arrivals.sort_by_key(|shape| shape.2);
        for (tick, _) in (0..2000).enumerate() {
            while due.len() < arrivals.len() && arrivals[due.len()].2 <= tick as u64 {
                let (prompt, most, arrival) = arrivals[due.len()];
                let seq = rig.submit(Start::Compute, prompt, most);
                bound = bound.max(arrival) + u64::from(prompt + 2 * most);
                due.push((seq, bound));
            }
            rig.step();
            for (seq, by) in &due {
                prop_assert!(rig.engine.tables(*seq).is_none() || tick as u64 <= *by, "{} not over by {}", seq, by);
            }
        }
        prop_assert!(rig.engine.idle());
    }
}
