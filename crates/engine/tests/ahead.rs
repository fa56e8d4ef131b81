//! Steps planned behind one that is in flight: what goes into them, what waits, and what happens to rows computed in
//! vain.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod rig;

use baton_engine::fake::FakeModel;
use baton_engine::{
    Aborted, EngineConfig, Event, ModelRunner, NewSequence, Prefix, RunError, SequenceError, Start, Step, Time, fake,
};
use baton_types::{BlockId, FinishReason, PoolGeometry, SamplingParams, SeqId};
use rig::{LIMITS, Rig, VOCAB, layout, request};

/// Of each row: sequence, start, tokens, index, follows.
fn rows(step: &Step) -> Vec<(u64, u32, u32, u32, Option<u32>)> {
    step.rows().iter().map(|row| (row.seq.0, row.start, row.len, row.index, row.follows)).collect()
}

fn ends(rig: &Rig) -> Vec<(u64, FinishReason)> {
    let end = |event: &Event| match event {
        Event::Finished { seq, reason, .. } => Some((seq.0, *reason)),
        _ => None,
    };
    rig.events.iter().filter_map(end).collect()
}

fn alone(new: &NewSequence) -> Vec<u32> {
    let answer = fake::answer(&layout(), VOCAB, &new.tokens, &new.params).unwrap();
    answer.into_iter().map(|token| token.id).collect()
}

#[test]
fn answers_and_prompts_go_on_behind_the_step_in_flight() {
    let mut rig = Rig::new(EngineConfig { chunk: 5, ..LIMITS }, 20);
    let (short, long) = (rig.submit(Start::Compute, 3, 3), rig.submit(Start::Compute, 12, 2));
    let first = rig.launch().unwrap();
    assert_eq!(rows(&first), [(0, 0, 3, 0, None), (1, 0, 5, 0, None)]);
    let second = rig.launch().unwrap();
    assert_eq!(rows(&second), [(0, 3, 1, 1, Some(0)), (1, 5, 5, 0, None)]);
    assert!(rig.launch().is_none(), "two are enough");
    rig.collect(first);
    let third = rig.launch().unwrap();
    assert_eq!(rows(&third), [(0, 4, 1, 2, Some(0)), (1, 10, 2, 0, None)]);
    rig.collect(second);
    // The third step samples the first answer's last token.
    let fourth = rig.launch().unwrap();
    assert_eq!(rows(&fourth), [(1, 12, 1, 1, Some(1))]);
    rig.collect(third);
    assert!(rig.launch().is_none(), "and so is the second");
    rig.collect(fourth);
    assert!(rig.engine.idle());
    assert_eq!((rig.engine.decoded_tokens(), rig.engine.decoded_wasted()), (3, 0));
    assert_eq!(ends(&rig), [(0, FinishReason::Length), (1, FinishReason::Length)]);
    // I1
    assert_eq!(rig.tokens_of(short), alone(&request(Start::Compute, 3, 3)));
    assert_eq!(rig.tokens_of(long), alone(&request(Start::Compute, 12, 2)));
}

/// I3, I6: the step behind still writes to the ended answer's blocks, so nobody gets them yet.
#[test]
fn an_answer_that_ended_has_a_row_in_vain_and_keeps_its_blocks_for_it() {
    let mut new = request(Start::Compute, 4, 5);
    let answer = alone(&new);
    new.params.stop_token_ids = vec![answer[0]];
    let mut rig = Rig::new(LIMITS, 2);
    let seq = rig.engine.submit(new).unwrap();
    let (first, second) = (rig.launch().unwrap(), rig.launch().unwrap());
    rig.collect(first);
    assert_eq!((ends(&rig), rig.blocks().0), (vec![(0, FinishReason::Stop)], 2), "told at once");
    assert!(rig.engine.abort(seq, true).is_err(), "it has ended");
    rig.submit(Start::Compute, 8, 1);
    assert!(rig.launch().is_none(), "no room yet");
    let events = rig.events.len();
    assert_eq!((rig.engine.decoded_tokens(), rig.engine.decoded_wasted()), (0, 0), "a prompt's is not decoded");
    rig.collect(second);
    assert_eq!((rig.events.len(), rig.blocks().0), (events, 0), "nobody hears of its token");
    assert_eq!((rig.engine.decoded_tokens(), rig.engine.decoded_wasted()), (0, 1));
    assert_eq!(rig.step(), [(1, 8)]);
}

#[test]
fn what_looks_at_the_token_in_flight_waits_and_everybody_with_it() {
    let mut rig = Rig::new(LIMITS, 20);
    rig.submit(Start::Compute, 3, 9);
    let mut penalised = request(Start::Compute, 3, 2);
    penalised.params.presence_penalty = 0.5;
    rig.engine.submit(penalised).unwrap();
    let first = rig.launch().unwrap();
    assert!(rig.launch().is_none());
    rig.collect(first);
    let second = rig.launch().unwrap();
    assert_eq!(second.rows().len(), 2);
    // The second answer ends with the second step.
    let third = rig.launch().unwrap();
    assert_eq!(rows(&third), [(0, 4, 1, 2, Some(0))]);
    rig.collect(second);
    rig.collect(third);
}

#[test]
fn nothing_is_taken_from_anybody_behind_a_step() {
    let mut rig = Rig::new(LIMITS, 5);
    rig.submit(Start::Compute, 7, 9);
    rig.submit(Start::Compute, 7, 9);
    let (first, second) = (rig.launch().unwrap(), rig.launch().unwrap());
    rig.collect(first);
    assert!(rig.launch().is_none(), "each needs a third block, there is one");
    assert_eq!(rig.engine.preemptions(), 0);
    rig.collect(second);
    let third = rig.launch().unwrap();
    assert_eq!((rig.engine.preemptions(), third.rows().len()), (1, 1));
    rig.collect(third);
}

#[test]
fn one_that_is_aborted_or_late_ends_with_the_last_step_it_is_in() {
    let mut rig = Rig::new(LIMITS, 20);
    let gone = rig.submit(Start::Compute, 4, 9);
    let late = rig.engine.submit(NewSequence { deadline: Some(Time(5)), ..request(Start::Compute, 4, 9) }).unwrap();
    let (first, second) = (rig.launch().unwrap(), rig.launch().unwrap());
    assert_eq!(rig.engine.abort(gone, true), Ok(Aborted::Freed));
    rig.now = Time(5);
    rig.collect(first);
    assert!(rig.launch().is_none(), "neither goes on");
    let failed = |event: &Event| match event {
        Event::Failed { seq, error: SequenceError::Deadline { .. }, quarantined: false, .. } => Some(*seq),
        _ => None,
    };
    assert_eq!(rig.events.iter().filter_map(failed).collect::<Vec<SeqId>>(), [late]);
    assert_eq!(rig.blocks().0, 4);
    let events = rig.events.len();
    rig.collect(second);
    assert!(rig.engine.idle());
    assert_eq!(rig.events.len(), events);
}

#[test]
fn a_step_that_fails_takes_its_sequences_out_of_the_one_behind_it() {
    let mut rig = Rig::new(EngineConfig { max_running: 2, ..LIMITS }, 20);
    let fails = rig.submit(Start::Compute, 4, 9);
    let first = rig.launch().unwrap();
    let joins = rig.submit(Start::Compute, 4, 1);
    let second = rig.launch().unwrap();
    assert_eq!(rows(&second), [(0, 4, 1, 1, Some(0)), (1, 0, 4, 0, None)]);
    rig.engine.fail(first, RunError("planted".into()), &mut rig.events);
    let failed = |event: &Event| matches!(event, Event::Failed { seq, .. } if *seq == fails);
    assert!(rig.events.iter().any(failed));
    let (model, mut out) = (&mut rig.model, Vec::new());
    // The runner must collect the failed step too.
    rig.engine.with_batch(&second, |batch| model.collect(batch, &mut Vec::new())).unwrap();
    rig.engine.with_batch(&second, |batch| model.collect(batch, &mut out)).unwrap();
    rig.engine.apply(second, &mut out, &mut rig.events);
    assert_eq!(rig.tokens_of(joins), alone(&request(Start::Compute, 4, 1)));
    assert!(rig.tokens_of(fails).is_empty() && rig.engine.idle());
}

/// I3: two sequences with the same tokens keep one block of them. The second gives its own back, but not while a step
/// in flight reads it: a peer that got the block would write to it at once.
#[test]
fn a_block_that_is_kept_twice_is_not_given_back_under_a_step_that_reads_it() {
    let mut rig = Rig::new(LIMITS, 6);
    // Computes a step when it is collected, in the blocks its rows had when it was launched.
    rig.model = FakeModel::new(PoolGeometry::uniform(layout(), 6), VOCAB).late();
    // The last token of a prompt is always computed, so neither waits for the other.
    let twin = NewSequence { prefix: Some(Prefix::default()), ..request(Start::Compute, 1, 7) };
    let twins = [(); 2].map(|()| rig.engine.submit(twin.clone()).unwrap());
    let (mut full, mut behind) = (rig.launch().unwrap(), rig.launch().unwrap());
    while full.rows()[0].start < 3 {
        rig.collect(full);
        (full, behind) = (behind, rig.launch().unwrap());
    }
    assert_eq!(rows(&behind), [(0, 4, 1, 4, Some(0)), (1, 4, 1, 4, Some(1))]);
    let tables = |rig: &Rig| -> Vec<Vec<BlockId>> {
        twins.iter().flat_map(|seq| rig.engine.tables(*seq).unwrap()).map(|table| table.blocks().to_vec()).collect()
    };
    let (read, used) = (tables(&rig), rig.blocks().0);
    // Their first block is full now, and the first twin's block is indexed.
    rig.collect(full);
    assert_eq!((tables(&rig), rig.blocks().0), (read, used), "as the step behind has them");
    // One more free block would make room for the peer, beside a spare one for each running sequence.
    let peer = rig.submit(Start::Receive, 4, 1);
    let last = rig.launch().unwrap();
    for (group, table) in rig.engine.tables(peer).unwrap().iter().enumerate() {
        let geometry = PoolGeometry::uniform(layout(), 6);
        let layers = 0..geometry.layout.groups[group].layers.len();
        let lent = table.blocks().iter().flat_map(|block| layers.clone().map(|layer| (layer, *block)));
        lent.for_each(|(layer, block)| rig.model.memory_mut()[geometry.block_range(group, layer, block)].fill(7));
    }
    rig.collect(behind);
    rig.collect(last);
    while let Some(step) = rig.launch() {
        rig.collect(step);
    }
    // I1
    twins.iter().for_each(|seq| assert_eq!(rig.tokens_of(*seq), alone(&twin)));
    assert!(rig.events.iter().any(|event| matches!(event, Event::Reserved { seq, .. } if *seq == peer)));
    let (used, lent, _) = rig.blocks();
    assert_eq!((used, lent), (0, 1), "what was kept twice is kept once, and nobody's");
}

/// A sequence's copies are made before its first row, and never again over what that row has written.
#[test]
fn copies_are_made_once() {
    let mut rig = Rig::new(EngineConfig { chunk: 3, ..LIMITS }, 20);
    let shared = |prompt: u32| NewSequence { prefix: Some(Prefix::default()), ..request(Start::Compute, prompt, 1) };
    rig.engine.submit(shared(6)).unwrap();
    while !rig.engine.idle() {
        rig.step();
    }
    let mut other = shared(14);
    other.params = SamplingParams { max_tokens: 2, ..other.params };
    rig.engine.submit(other).unwrap();
    let copies = |rig: &mut Rig, step: &Step| rig.engine.with_batch(step, |batch| batch.copies.len());
    let (first, second) = (rig.launch().unwrap(), rig.launch().unwrap());
    assert_eq!((copies(&mut rig, &first), copies(&mut rig, &second)), (2, 0), "one in each layer group");
    rig.collect(first);
    rig.collect(second);
}
