//! The engine's contract, one rule at a time. Random combinations of all of them are in `schedules.rs`.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use baton_engine::fake::{self, FakeModel};
use baton_engine::{
    Aborted, BlockCounts, Engine, EngineConfig, EngineError, Event, ModelRunner, NewSequence, RunError, SequenceError,
    Start, Step, Time, completed_blocks,
};
use baton_types::{BatonError, ErrorKind, FinishReason, PoolGeometry, RequestId, SamplingParams, SeqId, TokenOut};
use proptest::prelude::*;

const VOCAB: u32 = 500;
const LIMITS: EngineConfig =
    EngineConfig { token_budget: 64, chunk: 32, max_running: 8, max_waiting: 8, context_tokens: 1000 };

/// An engine over a fake model with blocks of 4 tokens, and the events so far.
struct Bench {
    engine: Engine,
    model: FakeModel,
    events: Vec<Event>,
    now: Time,
}

impl Bench {
    fn new(config: EngineConfig, blocks: u32) -> Bench {
        let geometry = PoolGeometry::uniform(fake::tiny_layout(4), blocks);
        let engine = Engine::new(config, &geometry).unwrap();
        Bench { engine, model: FakeModel::new(geometry, VOCAB), events: Vec::new(), now: Time(0) }
    }

    fn submit(&mut self, start: Start, prompt: u32, max_tokens: u32) -> SeqId {
        self.engine.submit(request(start, prompt, max_tokens)).unwrap()
    }

    fn plan(&mut self) -> Option<Step> {
        self.engine.plan(self.now, &mut self.events)
    }

    fn compute(&mut self, step: &Step) -> Vec<TokenOut> {
        let (model, mut out) = (&mut self.model, Vec::new());
        self.engine.with_batch(step, |batch| model.run(batch, &mut |_| {}, &mut out)).unwrap();
        out
    }

    /// One step; the sequences and lengths of its rows.
    fn step(&mut self) -> Vec<(u64, u32)> {
        let Some(step) = self.plan() else { return Vec::new() };
        let rows = step.rows().iter().map(|row| (row.seq.0, row.len)).collect();
        let mut out = self.compute(&step);
        self.engine.apply(step, &mut out, &mut self.events);
        assert!(out.is_empty(), "the tokens were taken");
        rows
    }

    fn steps(&mut self, n: usize) -> Vec<Vec<(u64, u32)>> {
        (0..n).map(|_| self.step()).collect()
    }

    fn tokens_of(&self, seq: SeqId) -> Vec<u32> {
        let token = |event: &Event| match event {
            Event::Token { seq: of, token, .. } if *of == seq => Some(token.id),
            _ => None,
        };
        self.events.iter().filter_map(token).collect()
    }

    /// Used, lent and quarantined blocks of one layer group.
    fn blocks(&self) -> (u32, u32, u32) {
        let BlockCounts { used, lent, quarantined, .. } = self.engine.counts();
        (used / 2, lent / 2, quarantined / 2)
    }
}

fn request(start: Start, prompt: u32, max_tokens: u32) -> NewSequence {
    NewSequence {
        request: RequestId("r".into()),
        tokens: (0..prompt).collect(),
        prompt_tokens: prompt,
        params: SamplingParams { max_tokens, temperature: 0.0, ..SamplingParams::default() },
        start,
        deadline: None,
    }
}

fn first(index: u32) -> TokenOut {
    TokenOut { index, id: 3, ..TokenOut::default() }
}

#[test]
fn limits_that_cannot_work_are_named() {
    let cases = [
        ("chunk", EngineConfig { chunk: 0, ..LIMITS }),
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
    let mut bench = Bench::new(EngineConfig { context_tokens: 100, ..LIMITS }, 10);
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
        let error = bench.engine.submit(new).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }
    assert!(bench.engine.idle());
    bench.submit(Start::Compute, 36, 5);
    bench.submit(Start::ComputeAndHold, 40, 60);
}

/// I5: the queue is bounded; a place that frees makes room again.
#[test]
fn a_full_queue_refuses() {
    let mut bench = Bench::new(EngineConfig { max_running: 2, max_waiting: 3, ..LIMITS }, 100);
    let seqs: Vec<SeqId> = (0..5).map(|_| bench.submit(Start::Compute, 4, 50)).collect();
    for _ in 0..2 {
        let error = bench.engine.submit(request(Start::Compute, 4, 4)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ResourceExhausted);
        bench.step();
    }
    assert_eq!((bench.engine.running(), bench.engine.waiting()), (2, 3));
    assert_eq!(bench.engine.abort(seqs[3], false), Ok(Aborted::Freed));
    bench.submit(Start::Compute, 4, 50);
}

#[test]
fn decodes_go_first_then_chunks_in_order_within_the_budget() {
    let config = EngineConfig { token_budget: 10, chunk: 6, max_running: 4, ..LIMITS };
    let mut bench = Bench::new(config, 100);
    for prompt in [3, 20, 7, 2, 4] {
        bench.submit(Start::Compute, prompt, 5);
    }
    let rows = bench.steps(4);
    assert_eq!(rows[0], [(0, 3), (1, 6), (2, 1)]);
    assert_eq!(rows[1], [(0, 1), (1, 6), (2, 3)]);
    assert_eq!(rows[2], [(0, 1), (1, 6), (2, 3)]);
    // 2 is done with its prompt; a place for 4 comes only when one of the four ends.
    assert_eq!(rows[3], [(0, 1), (2, 1), (1, 2), (3, 2)]);
    assert_eq!((bench.engine.running(), bench.engine.waiting()), (4, 1));
}

#[test]
fn an_answer_ends_with_max_tokens_or_a_stop_token_which_is_told() {
    let alone = fake::answer(&fake::tiny_layout(4), VOCAB, &[0, 1, 2], &request(Start::Compute, 3, 6).params).unwrap();
    let ids: Vec<u32> = alone.iter().map(|token| token.id).collect();
    let mut bench = Bench::new(LIMITS, 100);
    let whole = bench.submit(Start::Compute, 3, 6);
    let mut stopping = request(Start::Compute, 3, 6);
    stopping.params.stop_token_ids = vec![ids[2]];
    let stopped = bench.engine.submit(stopping).unwrap();
    bench.steps(6);
    assert_eq!((bench.tokens_of(whole), bench.tokens_of(stopped)), (ids.clone(), ids[..3].to_vec()));
    let end = |seq, reason| Event::Finished { seq, request: RequestId("r".into()), reason };
    assert!(bench.events.contains(&end(whole, FinishReason::Length)));
    assert!(bench.events.contains(&end(stopped, FinishReason::Stop)));
    assert!(bench.engine.idle() && bench.plan().is_none());
}

/// The last token of an answer needs no KV: an answer that exactly fills the pool ends.
#[test]
fn an_answer_may_fill_the_pool_to_the_last_slot() {
    let mut bench = Bench::new(LIMITS, 10);
    let seq = bench.submit(Start::Compute, 20, 21);
    bench.steps(21);
    assert_eq!(bench.tokens_of(seq).len(), 21);
    assert!(bench.engine.idle());
}

/// I1: the youngest gives its blocks, waits in its old place, and goes on with the same tokens.
#[test]
fn the_youngest_is_preempted_and_loses_nothing() {
    let mut bench = Bench::new(LIMITS, 10);
    let seqs = [16, 12, 4].map(|prompt| bench.submit(Start::Compute, prompt, 12));
    let late = bench.submit(Start::Compute, 5, 12);
    let mut order = Vec::new();
    while !bench.engine.idle() {
        let before = bench.engine.preemptions();
        let rows = bench.step();
        if bench.engine.preemptions() > before {
            order.push((bench.engine.running(), rows.iter().map(|row| row.0).max().unwrap()));
        }
    }
    assert!(!order.is_empty() && order.iter().all(|(running, _)| *running >= 1));
    for (seq, prompt) in seqs.into_iter().chain([late]).zip([16u32, 12, 4, 5]) {
        let new = request(Start::Compute, prompt, 12);
        let alone = fake::answer(&fake::tiny_layout(4), VOCAB, &new.tokens, &new.params).unwrap();
        assert_eq!(bench.tokens_of(seq), alone.iter().map(|token| token.id).collect::<Vec<_>>());
    }
    let ends: Vec<SeqId> =
        bench.events.iter().filter(|e| matches!(e, Event::Finished { .. })).map(|e| e.seq()).collect();
    assert!(ends.is_sorted(), "equal answers end in the order of submission: {ends:?}");
}

#[test]
fn a_newcomer_leaves_each_running_sequence_its_next_block() {
    let mut bench = Bench::new(LIMITS, 6);
    bench.submit(Start::Compute, 8, 8);
    bench.submit(Start::Compute, 8, 8);
    bench.step();
    assert_eq!((bench.engine.running(), bench.blocks().0), (2, 4));
    // Two blocks are free, and two sequences run.
    bench.submit(Start::Compute, 4, 2);
    bench.submit(Start::Receive, 4, 2);
    bench.step();
    assert_eq!((bench.engine.running(), bench.engine.waiting(), bench.engine.receiving()), (2, 2, 0));
    assert_eq!(bench.engine.preemptions(), 0);
}

/// Lent blocks cannot be taken; the sequence that needs one waits, keeps what it has, and goes on when there is one.
#[test]
fn growth_waits_for_lent_blocks_without_losing_work() {
    let mut bench = Bench::new(LIMITS, 5);
    let grower = bench.submit(Start::Compute, 8, 12);
    bench.step();
    let lent = bench.submit(Start::Receive, 4, 2);
    let computed: u32 = bench.steps(20).iter().flatten().map(|row| row.1).sum();
    assert_eq!((computed, bench.blocks()), (8, (4, 1, 0)), "4 blocks are full, the fifth is lent");
    assert_eq!((bench.engine.running(), bench.engine.preemptions()), (1, 0));
    assert_eq!(bench.engine.abort(lent, true), Ok(Aborted::Quarantined));
    assert_eq!((bench.step(), bench.blocks()), (vec![], (4, 0, 1)), "I3: not before the fence");
    bench.engine.clear_quarantine(lent).unwrap();
    bench.steps(3);
    assert_eq!(bench.tokens_of(grower).len(), 12);
    assert!(bench.engine.idle() && bench.engine.preemptions() == 0);
}

#[test]
fn a_reservation_waits_its_turn_and_runs_when_its_kv_is_here() {
    let mut bench = Bench::new(LIMITS, 8);
    let big = bench.submit(Start::Compute, 24, 2);
    let waits = bench.submit(Start::Receive, 16, 4);
    let behind = bench.submit(Start::Receive, 4, 4);
    bench.step();
    assert_eq!((bench.engine.waiting(), bench.engine.tables(waits).unwrap().len()), (2, 0), "no bypass");
    assert!(matches!(
        bench.engine.kv_arrived(waits, &first(0), &mut Vec::new()),
        Err(EngineError::WrongState { state: "waiting", .. })
    ));
    bench.step();
    assert!(bench.engine.tables(big).is_none(), "it has ended");
    assert_eq!(bench.step(), [], "nothing to compute, but blocks are lent");
    let reserved = |seq| Event::Reserved { seq, request: RequestId("r".into()) };
    assert_eq!(bench.events[bench.events.len() - 2..], [reserved(waits), reserved(behind)]);
    assert_eq!((bench.blocks(), bench.engine.receiving()), ((0, 5, 0), 2));
    assert_eq!(bench.engine.tables(waits).unwrap()[1].blocks().len(), 4);
    let before = bench.events.len();
    bench.engine.kv_arrived(behind, &first(0), &mut bench.events).unwrap();
    assert_eq!(bench.events.len(), before, "I4: the client has token 0 from the prefill side");
    assert_eq!(bench.blocks(), (1, 4, 0));
    assert_eq!(bench.step(), [(behind.0, 1)]);
    assert!(matches!(bench.events.last(), Some(Event::Token { token: TokenOut { index: 1, .. }, .. })));
}

#[test]
fn a_first_token_that_ends_the_answer_ends_the_sequence() {
    let mut bench = Bench::new(LIMITS, 8);
    let seq = bench.submit(Start::Receive, 4, 1);
    bench.step();
    let gap = bench.engine.kv_arrived(seq, &first(1), &mut bench.events).unwrap_err();
    assert_eq!(gap, EngineError::FirstToken { seq, index: 1, expected: 0 });
    assert_eq!((bench.engine.receiving(), bench.blocks()), (1, (0, 1, 0)), "an error changes nothing");
    bench.engine.kv_arrived(seq, &first(0), &mut bench.events).unwrap();
    assert!(matches!(bench.events.last(), Some(Event::Finished { reason: FinishReason::Length, .. })));
    assert!(bench.engine.idle());
}

#[test]
fn a_prefill_is_held_until_released() {
    let mut bench = Bench::new(EngineConfig { chunk: 5, ..LIMITS }, 8);
    let seq = bench.submit(Start::ComputeAndHold, 8, 100);
    assert_eq!(bench.step(), [(0, 5)]);
    let early = bench.engine.release(seq);
    assert_eq!(early, Err(EngineError::WrongState { seq, operation: "release", state: "running" }));
    bench.step();
    assert!(matches!(bench.events[..], [Event::Prefilled { finish: None, token: TokenOut { index: 0, .. }, .. }]));
    assert_eq!((bench.engine.held(), bench.engine.running(), bench.blocks().0), (1, 0, 2));
    assert!(bench.plan().is_none());
    bench.engine.release(seq).unwrap();
    assert_eq!(bench.engine.release(seq), Err(EngineError::UnknownSequence(seq)));
    assert!(bench.engine.idle());
    bench.submit(Start::ComputeAndHold, 4, 1);
    bench.step();
    assert!(matches!(bench.events.last(), Some(Event::Prefilled { finish: Some(FinishReason::Length), .. })));
}

/// One sequence in each state an abort or a deadline can find it in, and whether it needs a fence there.
fn in_each_state(deadline: Option<Time>) -> (Bench, [(SeqId, &'static str, bool); 5]) {
    let mut bench = Bench::new(EngineConfig { chunk: 4, ..LIMITS }, 15);
    let mut submit =
        |start, prompt| bench.engine.submit(NewSequence { deadline, ..request(start, prompt, 20) }).unwrap();
    let held = submit(Start::ComputeAndHold, 4);
    let prefilling = submit(Start::ComputeAndHold, 16);
    let running = submit(Start::Compute, 4);
    let lent = submit(Start::Receive, 8);
    let waiting = submit(Start::Compute, 32);
    bench.step();
    let states = [
        (held, "held for a transfer", true),
        (prefilling, "running", true),
        (running, "running", false),
        (lent, "waiting for KV", true),
        (waiting, "waiting", false),
    ];
    (bench, states)
}

/// I3, I6: an abort in any state frees everything, at once or after the fence.
#[test]
fn an_abort_in_any_state_leaks_nothing() {
    for fenced in [false, true] {
        let (mut bench, states) = in_each_state(None);
        for (seq, state, exposed) in states {
            let quarantined = bench.blocks().2;
            let owned = bench.engine.tables(seq).unwrap().first().map_or(0, |table| table.blocks().len() as u32);
            let aborted = bench.engine.abort(seq, fenced).unwrap();
            let fence = fenced && exposed;
            assert_eq!(aborted == Aborted::Quarantined, fence, "{state}");
            assert_eq!(bench.blocks().2 - quarantined, if fence { owned } else { 0 }, "{state}");
            assert_eq!(bench.engine.abort(seq, fenced), Err(EngineError::UnknownSequence(seq)));
            bench.engine.check().unwrap();
        }
        for (seq, _, exposed) in states {
            assert_eq!(bench.engine.clear_quarantine(seq).is_ok(), fenced && exposed);
        }
        assert!(bench.engine.idle());
    }
}

/// A step in progress still reads and writes its blocks: nobody gets them before it ends.
#[test]
fn an_abort_during_a_step_waits_for_the_step() {
    for (fenced, cleared_first) in [(false, false), (true, false), (true, true)] {
        let mut bench = Bench::new(LIMITS, 15);
        let seqs = [Start::Compute, Start::ComputeAndHold].map(|start| bench.submit(start, 8, 5));
        let step = bench.plan().unwrap();
        assert_eq!(bench.engine.abort(seqs[0], fenced), Ok(Aborted::Freed));
        let second = bench.engine.abort(seqs[1], fenced).unwrap();
        assert_eq!(second == Aborted::Quarantined, fenced);
        assert_eq!(bench.engine.abort(seqs[0], fenced), Err(EngineError::UnknownSequence(seqs[0])));
        assert_eq!(bench.blocks(), (4, 0, 0));
        if cleared_first {
            bench.engine.clear_quarantine(seqs[1]).unwrap();
        }
        let mut out = bench.compute(&step);
        bench.engine.apply(step, &mut out, &mut bench.events);
        assert_eq!(bench.events, [], "nobody is there to be told");
        assert_eq!(bench.blocks(), (0, 0, if fenced && !cleared_first { 2 } else { 0 }));
        assert_eq!(bench.engine.clear_quarantine(seqs[1]).is_ok(), fenced && !cleared_first);
        assert!(bench.engine.idle());
    }
}

/// I5: a deadline ends a sequence in any state, and what others may reach is fenced first (I3).
#[test]
fn a_deadline_ends_a_sequence_in_any_state() {
    let (mut bench, states) = in_each_state(Some(Time(0).after_ms(5)));
    bench.now = Time(4_999_999);
    bench.step();
    assert!(!bench.events.iter().any(|e| matches!(e, Event::Failed { .. })));
    bench.now = Time(5_000_000);
    bench.events.clear();
    assert!(bench.plan().is_none());
    for (event, (seq, state, exposed)) in bench.events.iter().zip(states) {
        let error = SequenceError::Deadline { state };
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
        let request = RequestId("r".into());
        assert_eq!(*event, Event::Failed { seq, request, error, quarantined: exposed });
    }
    assert_eq!(bench.events.len(), 5);
    states.iter().filter(|s| s.2).for_each(|s| bench.engine.clear_quarantine(s.0).unwrap());
    assert!(bench.engine.idle());
}

#[test]
fn a_later_deadline_is_not_forgotten_when_an_earlier_one_passes() {
    let mut bench = Bench::new(LIMITS, 15);
    for at in [30, 10, 20] {
        let deadline = Some(Time(at));
        bench.engine.submit(NewSequence { deadline, ..request(Start::Compute, 4, 40) }).unwrap();
    }
    for (now, left) in [(9, 3), (10, 2), (20, 1), (29, 1), (30, 0)] {
        bench.now = Time(now);
        bench.step();
        assert_eq!(bench.engine.running(), left, "at {now}");
    }
}

/// A failed or broken step fails its sequences, each once, and no other.
#[test]
fn a_failed_step_fails_its_sequences_only() {
    type Break = fn(&mut Vec<TokenOut>);
    let breaks: [Option<Break>; 4] =
        [None, Some(|out| out.truncate(1)), Some(|out| out.push(first(0))), Some(|out| out[1].index += 1)];
    for broken in breaks {
        let mut bench = Bench::new(LIMITS, 15);
        let plain = bench.submit(Start::Compute, 4, 5);
        let held = bench.submit(Start::ComputeAndHold, 4, 5);
        let step = bench.plan().unwrap();
        let bystander = bench.submit(Start::Compute, 4, 5);
        let mut out = bench.compute(&step);
        match broken {
            None => bench.engine.fail(step, RunError("no".into()), &mut bench.events),
            Some(damage) => {
                damage(&mut out);
                bench.engine.apply(step, &mut out, &mut bench.events);
                assert!(out.is_empty());
            }
        }
        let failed = |event: &Event| match event {
            Event::Failed { seq, error, quarantined, .. } => Some((*seq, error.kind(), *quarantined)),
            _ => None,
        };
        let kinds: Vec<_> = bench.events.iter().map(failed).collect();
        assert_eq!(kinds, [Some((plain, ErrorKind::Internal, false)), Some((held, ErrorKind::Internal, true))]);
        bench.engine.clear_quarantine(held).unwrap();
        bench.steps(5);
        assert_eq!(bench.tokens_of(bystander).len(), 5);
        assert!(bench.engine.idle());
    }
}

#[test]
#[cfg_attr(debug_assertions, should_panic(expected = "neither applied nor failed"))]
fn there_is_one_step_at_a_time() {
    let mut bench = Bench::new(LIMITS, 15);
    bench.submit(Start::Compute, 4, 5);
    let _step = bench.plan().unwrap();
    assert!(bench.plan().is_none());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Each block is told once, after its last slot is written, however the tokens are cut.
    #[test]
    fn each_block_completes_once(block_size in 1u32..20, cuts in prop::collection::vec(1u32..40, 1..12)) {
        let (mut start, mut told) = (0, Vec::new());
        for (at, len) in cuts.iter().enumerate() {
            let last = at + 1 == cuts.len();
            for block in completed_blocks(start, *len, block_size, last) {
                prop_assert!(last || (block as u32 + 1) * block_size <= start + len, "told before it was full");
                told.push(block as u32);
            }
            start += len;
        }
        prop_assert!(told.into_iter().eq(0..start.div_ceil(block_size)));
    }

    /// First come, first served: whatever comes after, a sequence ends within the steps that it and those before it would
    /// need one after the other, a token at a time. So nobody starves, and no two sequences preempt each other for ever.
    #[test]
    fn nobody_waits_for_the_younger(
        shapes in prop::collection::vec((1u32..30, 1u32..12, 0u64..20), 2..20),
        chunk in 1u32..12,
        max_running in 1u32..6,
        spare in 0u32..6,
    ) {
        let blocks = shapes.iter().map(|(prompt, most, _)| (prompt + most).div_ceil(4)).max().unwrap_or(1) + spare;
        let config = EngineConfig { token_budget: max_running, chunk, max_running, max_waiting: 100, context_tokens: 100 };
        let mut bench = Bench::new(config, blocks);
        let (mut arrivals, mut due, mut bound) = (shapes.clone(), Vec::new(), 0u64);
        arrivals.sort_by_key(|shape| shape.2);
        for (tick, _) in (0..2000).enumerate() {
            while due.len() < arrivals.len() && arrivals[due.len()].2 <= tick as u64 {
                let (prompt, most, arrival) = arrivals[due.len()];
                let seq = bench.submit(Start::Compute, prompt, most);
                bound = bound.max(arrival) + u64::from(prompt + 2 * most);
                due.push((seq, bound));
            }
            bench.step();
            for (seq, by) in &due {
                prop_assert!(bench.engine.tables(*seq).is_none() || tick as u64 <= *by, "{} not over by {}", seq, by);
            }
        }
        prop_assert!(bench.engine.idle());
    }
}
