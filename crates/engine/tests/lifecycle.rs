//! How sequences change hands and end: reservations, arrivals, holds, aborts, deadlines, failures; one rule at a time.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod rig;

use std::ops::Range;

use baton_engine::{
    Aborted, EngineConfig, EngineError, Event, NewSequence, RunError, SequenceError, Start, Time, completed_blocks,
};
use baton_types::{BatonError, ErrorKind, FinishReason, RequestId, SeqId, TokenOut};
use proptest::prelude::*;
use rig::{LIMITS, Rig, first, request};

#[test]
fn a_reservation_waits_its_turn_and_runs_when_its_kv_is_here() {
    let mut rig = Rig::new(LIMITS, 8);
    let big = rig.submit(Start::Compute, 24, 2);
    let waits = rig.submit(Start::Receive, 16, 4);
    let behind = rig.submit(Start::Receive, 4, 4);
    rig.step();
    assert_eq!((rig.engine.waiting(), rig.engine.tables(waits).unwrap().len()), (2, 0), "no bypass");
    assert!(matches!(
        rig.engine.kv_arrived(waits, &first(0), &mut Vec::new()),
        Err(EngineError::WrongState { state: "waiting", .. })
    ));
    rig.step();
    assert!(rig.engine.tables(big).is_none(), "it has ended");
    assert_eq!(rig.step(), [], "nothing to compute, but blocks are lent");
    let reserved = |seq| Event::Reserved { seq, request_id: RequestId("r".into()), cached_tokens: 0 };
    assert_eq!(rig.events[rig.events.len() - 2..], [reserved(waits), reserved(behind)]);
    assert_eq!((rig.blocks(), rig.engine.receiving()), ((0, 5, 0), 2));
    assert_eq!(rig.engine.tables(waits).unwrap()[1].blocks().len(), 4);
    let before = rig.events.len();
    rig.engine.kv_arrived(behind, &first(0), &mut rig.events).unwrap();
    assert_eq!(rig.events.len(), before, "I4: the client has token 0 from the prefill side");
    assert_eq!(rig.blocks(), (1, 4, 0));
    assert_eq!(rig.step(), [(behind.0, 1)]);
    assert!(matches!(rig.events.last(), Some(Event::Token { token: TokenOut { index: 1, .. }, .. })));
}

#[test]
fn a_first_token_that_ends_the_answer_ends_the_sequence() {
    let mut rig = Rig::new(LIMITS, 8);
    let seq = rig.submit(Start::Receive, 4, 1);
    rig.step();
    let gap = rig.engine.kv_arrived(seq, &first(1), &mut rig.events).unwrap_err();
    assert_eq!(gap, EngineError::FirstToken { seq, index: 1, expected: 0 });
    assert_eq!((rig.engine.receiving(), rig.blocks()), (1, (0, 1, 0)), "an error changes nothing");
    rig.engine.kv_arrived(seq, &first(0), &mut rig.events).unwrap();
    assert!(matches!(rig.events.last(), Some(Event::Finished { reason: FinishReason::Length, .. })));
    assert!(rig.engine.idle());
}

#[test]
fn a_prefill_is_held_until_released() {
    let mut rig = Rig::new(EngineConfig { chunk: 5, ..LIMITS }, 8);
    let seq = rig.submit(Start::ComputeAndHold, 8, 100);
    assert_eq!(rig.step(), [(0, 5)]);
    let early = rig.engine.release(seq);
    assert_eq!(early, Err(EngineError::WrongState { seq, operation: "release", state: "running" }));
    rig.step();
    assert!(matches!(rig.events[..], [Event::Prefilled { finish: None, token: TokenOut { index: 0, .. }, .. }]));
    assert_eq!((rig.engine.held(), rig.engine.running(), rig.blocks().0), (1, 0, 2));
    assert!(rig.plan().is_none());
    rig.engine.release(seq).unwrap();
    assert_eq!(rig.engine.release(seq), Err(EngineError::UnknownSequence(seq)));
    assert!(rig.engine.idle());
    rig.submit(Start::ComputeAndHold, 4, 1);
    rig.step();
    assert!(matches!(rig.events.last(), Some(Event::Prefilled { finish: Some(FinishReason::Length), .. })));
}

/// One sequence in each state in which an abort or a deadline can find it, and whether it needs a fence in that state.
fn in_each_state(deadline: Option<Time>) -> (Rig, [(SeqId, &'static str, bool); 5]) {
    let mut rig = Rig::new(EngineConfig { chunk: 4, ..LIMITS }, 15);
    let mut submit = |start, prompt| rig.engine.submit(NewSequence { deadline, ..request(start, prompt, 20) }).unwrap();
    let held = submit(Start::ComputeAndHold, 4);
    let prefilling = submit(Start::ComputeAndHold, 16);
    let running = submit(Start::Compute, 4);
    let lent = submit(Start::Receive, 8);
    let waiting = submit(Start::Compute, 32);
    rig.step();
    let states = [
        (held, "held for a transfer", true),
        (prefilling, "running", true),
        (running, "running", false),
        (lent, "waiting for KV", true),
        (waiting, "waiting", false),
    ];
    (rig, states)
}

/// I3, I6: an abort in any state frees everything, at once or after the fence.
#[test]
fn an_abort_in_any_state_leaks_nothing() {
    for fenced in [false, true] {
        let (mut rig, states) = in_each_state(None);
        for (seq, state, exposed) in states {
            let quarantined = rig.blocks().2;
            let owned = rig.engine.tables(seq).unwrap().first().map_or(0, |table| table.blocks().len() as u32);
            let aborted = rig.engine.abort(seq, fenced).unwrap();
            let fence = fenced && exposed;
            assert_eq!(aborted == Aborted::Quarantined, fence, "{state}");
            assert_eq!(rig.blocks().2 - quarantined, if fence { owned } else { 0 }, "{state}");
            assert_eq!(rig.engine.abort(seq, fenced), Err(EngineError::UnknownSequence(seq)));
            rig.engine.check().unwrap();
        }
        for (seq, _, exposed) in states {
            assert_eq!(rig.engine.clear_quarantine(seq).is_ok(), fenced && exposed);
        }
        assert!(rig.engine.idle());
    }
}

/// A step in progress still reads and writes its blocks: nobody gets them before it ends, with success or not.
#[test]
fn an_abort_during_a_step_waits_for_the_step() {
    let cases = [(false, false), (true, false), (true, true)];
    for ((fenced, cleared_first), fails) in cases.into_iter().flat_map(|case| [(case, false), (case, true)]) {
        let mut rig = Rig::new(LIMITS, 15);
        let seqs = [Start::Compute, Start::ComputeAndHold].map(|start| rig.submit(start, 8, 5));
        let step = rig.plan().unwrap();
        assert_eq!(rig.engine.abort(seqs[0], fenced), Ok(Aborted::Freed));
        let second = rig.engine.abort(seqs[1], fenced).unwrap();
        assert_eq!(second == Aborted::Quarantined, fenced);
        assert_eq!(rig.engine.abort(seqs[0], fenced), Err(EngineError::UnknownSequence(seqs[0])));
        assert_eq!(rig.blocks(), (4, 0, 0));
        if cleared_first {
            rig.engine.clear_quarantine(seqs[1]).unwrap();
        }
        let mut out = rig.compute(&step);
        if fails {
            rig.engine.fail(step, RunError("no".into()), &mut rig.events);
        } else {
            rig.engine.apply(step, &mut out, &mut rig.events);
        }
        assert_eq!(rig.events, [], "nobody is there to be told");
        let quarantined = fenced && !cleared_first;
        assert_eq!(rig.blocks(), (0, 0, if quarantined { 2 } else { 0 }));
        assert_eq!(rig.engine.clear_quarantine(seqs[1]).is_ok(), quarantined);
        assert!(rig.engine.idle());
    }
}

/// I5: a deadline ends a sequence in any state, and what others may reach is fenced first (I3).
#[test]
fn a_deadline_ends_a_sequence_in_any_state() {
    let (mut rig, states) = in_each_state(Some(Time(0).after_ms(5)));
    rig.now = Time(4_999_999);
    rig.step();
    assert!(!rig.events.iter().any(|e| matches!(e, Event::Failed { .. })));
    rig.now = Time(5_000_000);
    rig.events.clear();
    assert!(rig.plan().is_none());
    for (event, (seq, state, exposed)) in rig.events.iter().zip(states) {
        let error = SequenceError::Deadline { state };
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
        let request_id = RequestId("r".into());
        assert_eq!(*event, Event::Failed { seq, request_id, error, quarantined: exposed });
    }
    assert_eq!(rig.events.len(), 5);
    states.iter().filter(|s| s.2).for_each(|s| rig.engine.clear_quarantine(s.0).unwrap());
    assert!(rig.engine.idle());
}

#[test]
fn a_later_deadline_is_not_forgotten_when_an_earlier_one_passes() {
    let mut rig = Rig::new(LIMITS, 15);
    for at in [30, 10, 20] {
        let deadline = Some(Time(at));
        rig.engine.submit(NewSequence { deadline, ..request(Start::Compute, 4, 40) }).unwrap();
    }
    for (now, left) in [(9, 3), (10, 2), (20, 1), (29, 1), (30, 0)] {
        rig.now = Time(now);
        rig.step();
        assert_eq!(rig.engine.running(), left, "at {now}");
    }
}

/// A failed or broken step fails its sequences, each once, and no other.
#[test]
fn a_failed_step_fails_its_sequences_only() {
    type Break = fn(&mut Vec<TokenOut>);
    let breaks: [Option<Break>; 4] =
        [None, Some(|out| out.truncate(1)), Some(|out| out.push(first(0))), Some(|out| out[1].index += 1)];
    for broken in breaks {
        let mut rig = Rig::new(LIMITS, 15);
        let plain = rig.submit(Start::Compute, 4, 5);
        let held = rig.submit(Start::ComputeAndHold, 4, 5);
        let step = rig.plan().unwrap();
        let bystander = rig.submit(Start::Compute, 4, 5);
        let mut out = rig.compute(&step);
        match broken {
            None => rig.engine.fail(step, RunError("no".into()), &mut rig.events),
            Some(damage) => {
                damage(&mut out);
                rig.engine.apply(step, &mut out, &mut rig.events);
                assert!(out.is_empty());
            }
        }
        let failed = |event: &Event| match event {
            Event::Failed { seq, error, quarantined, .. } => Some((*seq, error.kind(), *quarantined)),
            _ => None,
        };
        let kinds: Vec<_> = rig.events.iter().map(failed).collect();
        assert_eq!(kinds, [Some((plain, ErrorKind::Internal, false)), Some((held, ErrorKind::Internal, true))]);
        rig.engine.clear_quarantine(held).unwrap();
        rig.steps(5);
        assert_eq!(rig.tokens_of(bystander).len(), 5);
        assert!(rig.engine.idle());
    }
}

/// A row for which the model has no token fails its own sequence; the others of the step go on.
#[test]
fn a_row_without_a_token_fails_alone() {
    for (start, quarantined) in [(Start::Compute, false), (Start::ComputeAndHold, true)] {
        let mut rig = Rig::new(LIMITS, 15);
        let stuck = rig.submit(start, 4, 5);
        let other = rig.submit(Start::Compute, 4, 5);
        let step = rig.plan().unwrap();
        let mut out = rig.compute(&step);
        out[0].failed = Some("nothing can follow".into());
        rig.engine.apply(step, &mut out, &mut rig.events);
        let error = SequenceError::NoToken("nothing can follow".into());
        assert!(matches!(&rig.events[0], Event::Failed { seq, error: e, quarantined: q, .. }
            if (*seq, e, *q) == (stuck, &error, quarantined)));
        if quarantined {
            rig.engine.clear_quarantine(stuck).unwrap();
        }
        rig.steps(5);
        assert_eq!((rig.tokens_of(stuck).len(), rig.tokens_of(other).len()), (0, 5));
        assert!(rig.engine.idle());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Each block is reported once, after its last slot is written, however the tokens are cut.
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
}

#[test]
fn queued_tokens_are_those_that_are_to_be_computed_here() {
    let mut rig = Rig::new(EngineConfig { chunk: 8, ..LIMITS }, 24);
    assert_eq!(rig.engine.queued_tokens(), 0);
    rig.submit(Start::Compute, 20, 4);
    let held = rig.submit(Start::ComputeAndHold, 5, 4);
    let arriving = rig.submit(Start::Receive, 16, 4);
    assert_eq!(rig.engine.queued_tokens(), 25, "a peer computes the rest");
    rig.step();
    assert_eq!(rig.engine.queued_tokens(), 12, "a chunk of one, all of the other");
    let step = rig.launch().unwrap();
    assert_eq!(rig.engine.queued_tokens(), 4, "what is being computed waits no more");
    rig.collect(step);
    rig.step();
    assert_eq!(rig.engine.queued_tokens(), 0, "a sequence that decodes waits for nothing");
    rig.engine.release(held).unwrap();
    rig.engine.kv_arrived(arriving, &first(0), &mut rig.events).unwrap();
    assert_eq!(rig.engine.queued_tokens(), 0);
}

#[test]
fn prompts_and_answers_say_what_is_to_be_done_and_room_what_is_left() {
    let mut rig = Rig::new(EngineConfig { chunk: 8, ..LIMITS }, 24);
    let prompts = |from: u32| vec![Range { start: from, end: 20 }];
    let of = |rig: &Rig| {
        let engine = &rig.engine;
        let (prompts, answers, arriving) = (engine.prompts(), engine.answers(), engine.arriving());
        let tokens = |(_, tokens)| tokens;
        (prompts.map(|(_, range)| range).collect(), answers.map(tokens).collect(), arriving.map(tokens).collect())
    };
    let none: (Vec<Range<u32>>, Vec<u32>, Vec<u32>) = Default::default();
    assert_eq!(of(&rig), none);
    let empty = rig.engine.room();
    rig.submit(Start::Compute, 20, 4);
    rig.submit(Start::ComputeAndHold, 5, 4);
    let arriving = rig.submit(Start::Receive, 16, 4);
    let wanted = i64::from(20u32.div_ceil(4) + 5u32.div_ceil(4) + 16u32.div_ceil(4));
    assert_eq!((of(&rig), rig.engine.room()), ((vec![0..20, 0..5], vec![], vec![16]), empty - wanted));
    rig.step();
    assert_eq!(of(&rig), (prompts(8), vec![], vec![16]), "what is being computed gives no tokens yet");
    let step = rig.launch().unwrap();
    assert_eq!(of(&rig).0, prompts(8), "what is being computed is not over");
    rig.collect(step);
    rig.step();
    assert_eq!(of(&rig), (vec![], vec![21], vec![16]));
    rig.engine.kv_arrived(arriving, &first(0), &mut rig.events).unwrap();
    assert_eq!(of(&rig), (vec![], vec![21, 17], vec![]));
    assert!(rig.engine.room() < empty);
}
