//! Batch sequences are served with what interactive ones leave, and give way to them.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod rig;

use baton_engine::{EngineConfig, NewSequence, Order, Prefix, Share, Start};
use baton_types::{Class, ErrorKind, SeqId};
use rig::{LIMITS, Rig, first, request};

const BATCH: Class = Class::Batch;

fn submit(rig: &mut Rig, class: Class, start: Start, prompt: u32, max_tokens: u32) -> SeqId {
    let priority = class.at_workers(0);
    rig.engine.submit(NewSequence { priority, ..request(start, prompt, max_tokens) }).unwrap()
}

fn interactive(rig: &mut Rig, prompt: u32, max_tokens: u32) -> SeqId {
    submit(rig, Class::Interactive, Start::Compute, prompt, max_tokens)
}

fn batch(rig: &mut Rig, prompt: u32, max_tokens: u32) -> SeqId {
    submit(rig, BATCH, Start::Compute, prompt, max_tokens)
}

/// Whatever the order, and however often it was overtaken.
#[test]
fn batch_waits_for_all_interactive_work() {
    for order in [Order::Fcfs, Order::ShortestFirst, Order::Priority] {
        let mut rig = Rig::new(EngineConfig { order, overtakes: 2, max_running: 1, token_budget: 64, ..LIMITS }, 100);
        let first = batch(&mut rig, 3, 1);
        let mut others: Vec<u64> = (0..6).map(|_| interactive(&mut rig, 20, 1).0).collect();
        let second = batch(&mut rig, 3, 1);
        let rows: Vec<u64> = rig.steps(8).into_iter().flatten().map(|(seq, _)| seq).collect();
        others.extend([first.0, second.0]);
        assert_eq!(rows, others, "{order}");
    }
}

/// Batch sequences age among themselves: the long one is overtaken twice, no more.
#[test]
fn batch_ages_within_its_class() {
    let config = EngineConfig { order: Order::ShortestFirst, overtakes: 2, max_running: 1, ..LIMITS };
    let mut rig = Rig::new(config, 100);
    let long = batch(&mut rig, 20, 1).0;
    // Those that come later and are interactive go before it anyway.
    for _ in 0..3 {
        interactive(&mut rig, 30, 1);
    }
    rig.steps(3);
    let short: Vec<u64> = (0..4).map(|_| batch(&mut rig, 3, 1).0).collect();
    let rows = |rig: &mut Rig, n| rig.steps(n).into_iter().flatten().map(|(seq, _)| seq).collect::<Vec<u64>>();
    assert_eq!(rows(&mut rig, 2), short[..2]);
    let late = interactive(&mut rig, 30, 1).0;
    assert_eq!(rows(&mut rig, 3), [late, long, short[2]], "it still goes after interactive ones");
}

/// Of a full batch the last in turn gives up its place, and gets it back.
#[test]
fn an_interactive_sequence_takes_the_place_of_a_batch_one() {
    let mut rig = Rig::new(EngineConfig { max_running: 2, ..LIMITS }, 100);
    let (one, two) = (batch(&mut rig, 4, 9), batch(&mut rig, 5, 9));
    rig.steps(2);
    let interactive = interactive(&mut rig, 6, 2);
    assert_eq!(rig.step(), [(one.0, 1), (interactive.0, 6)]);
    assert_eq!((rig.engine.preemptions(), rig.engine.waiting()), (1, 1));
    rig.steps(20);
    assert_eq!((rig.tokens_of(one).len(), rig.tokens_of(two).len()), (9, 9), "all of them are served");
    assert!(rig.engine.idle());
}

/// One that may not start yet takes nothing.
#[test]
fn nobody_gives_way_to_a_parked_sequence() {
    let mut rig = Rig::new(EngineConfig { max_running: 1, ..LIMITS }, 100);
    let one = batch(&mut rig, 4, 9);
    rig.step();
    let parked = NewSequence { parked: true, ..request(Start::Compute, 6, 2) };
    let parked = rig.engine.submit(parked).unwrap();
    assert_eq!((rig.step(), rig.engine.preemptions()), (vec![(one.0, 1)], 0));
    rig.engine.unpark(parked).unwrap();
    assert_eq!((rig.step(), rig.engine.preemptions()), (vec![(parked.0, 6)], 1));
}

#[test]
fn several_interactive_sequences_take_as_many_places_at_once() {
    let mut rig = Rig::new(EngineConfig { max_running: 2, ..LIMITS }, 100);
    for _ in 0..2 {
        batch(&mut rig, 4, 9);
    }
    rig.step();
    let (one, two) = (interactive(&mut rig, 6, 2), interactive(&mut rig, 7, 2));
    assert_eq!(rig.step(), [(one.0, 6), (two.0, 7)]);
}

/// Blocks too; and several are preempted for one, or one for several.
#[test]
fn interactive_sequences_take_the_blocks_of_batch_ones() {
    let mut rig = Rig::new(LIMITS, 24);
    for _ in 0..4 {
        batch(&mut rig, 20, 4);
    }
    rig.step();
    assert_eq!((rig.engine.running(), rig.blocks().0), (4, 20), "blocks of 24");
    let wants = [interactive(&mut rig, 30, 2), interactive(&mut rig, 20, 2)];
    let rows = rig.step();
    assert!(wants.iter().all(|seq| rows.iter().any(|(row, _)| *row == seq.0)), "both start at once: {rows:?}");
    assert_eq!(rig.engine.preemptions(), 3, "no more than needed");
    rig.steps(20);
    assert!(rig.engine.idle());
}

/// It loses its blocks in the same plan, so what may be kept of it is told of before: its prompt, once that is computed.
#[test]
fn what_batch_work_computed_is_kept_before_it_gives_way() {
    let mut rig = Rig::new(LIMITS, 24);
    rig.engine.note_ended();
    let prefix = Some(Prefix { seed: 7, ..Prefix::default() });
    let new = NewSequence { prefix, priority: BATCH.at_workers(0), ..request(Start::Compute, 50, 9) };
    let batch = rig.engine.submit(new).unwrap();
    assert_eq!((rig.step(), rig.engine.take_ended().len()), (vec![(batch.0, 32)], 0), "a chunk of it");
    rig.step();
    let [left] = &rig.engine.take_ended()[..] else { panic!("its prompt is computed") };
    assert_eq!((left.tokens.len(), left.moves(4)), (51, 48));
    rig.step();
    assert!(rig.engine.take_ended().is_empty(), "once");
    let other = interactive(&mut rig, 90, 2);
    assert_eq!(rig.step(), [(other.0, 32)]);
    rig.steps(4);
    assert!(rig.engine.take_returning().iter().any(|wanted| wanted.tokens.starts_with(&left.tokens)));
}

/// Also where a peer computed it.
#[test]
fn what_batch_work_received_is_kept_before_it_gives_way() {
    let mut rig = Rig::new(LIMITS, 24);
    rig.engine.note_ended();
    let prefix = Some(Prefix { seed: 7, ..Prefix::default() });
    let new = NewSequence { prefix, priority: BATCH.at_workers(0), ..request(Start::Receive, 50, 9) };
    let batch = rig.engine.submit(new).unwrap();
    assert_eq!((rig.step(), rig.engine.take_ended().len()), (vec![], 0), "its blocks are lent");
    rig.engine.kv_arrived(batch, &first(0), &mut rig.events).unwrap();
    let [left] = &rig.engine.take_ended()[..] else { panic!("its prompt is here") };
    assert_eq!((left.tokens.len(), left.moves(4)), (51, 48));
}

/// Rows of a step in flight are not taken back: the next step waits for it.
#[test]
fn nobody_is_preempted_while_a_step_is_in_flight() {
    let mut rig = Rig::new(EngineConfig { max_running: 1, ..LIMITS }, 100);
    let other = batch(&mut rig, 4, 9);
    rig.step();
    let step = rig.launch().unwrap();
    let interactive = interactive(&mut rig, 6, 2);
    assert!(rig.plan().is_none());
    rig.collect(step);
    assert_eq!(rig.step(), [(interactive.0, 6)]);
    rig.steps(20);
    assert_eq!(rig.tokens_of(other).len(), 9);
}

/// What a transfer reads, or a peer writes, cannot be taken back at once.
#[test]
fn what_cannot_be_preempted_is_not() {
    let mut rig = Rig::new(EngineConfig { max_running: 1, ..LIMITS }, 100);
    let lent = submit(&mut rig, BATCH, Start::Receive, 8, 3);
    rig.step();
    let waits = interactive(&mut rig, 6, 2);
    assert_eq!(rig.step(), []);
    rig.engine.kv_arrived(lent, &first(0), &mut rig.events).unwrap();
    assert_eq!(rig.step(), [(waits.0, 6)]);
    rig.steps(20);
    assert!(rig.engine.idle());
}

/// I5: each class has its queue.
#[test]
fn batch_does_not_fill_the_queue_for_others() {
    let mut rig = Rig::new(EngineConfig { max_running: 1, max_waiting: 3, ..LIMITS }, 100);
    for _ in 0..4 {
        batch(&mut rig, 4, 50);
    }
    let mut refused = |class: Class| {
        let new = NewSequence { priority: class.at_workers(0), ..request(Start::Compute, 4, 4) };
        rig.engine.submit(new).err().map(|error| baton_types::BatonError::kind(&error))
    };
    assert_eq!(refused(BATCH), Some(ErrorKind::ResourceExhausted));
    for _ in 0..4 {
        assert_eq!(refused(Class::Interactive), None);
    }
    assert_eq!(refused(Class::Interactive), Some(ErrorKind::ResourceExhausted));
    assert_eq!(refused(BATCH), Some(ErrorKind::ResourceExhausted));
}

/// The end of a short batch prompt is no reason to keep a long interactive one waiting.
#[test]
fn batch_prompts_get_what_interactive_ones_leave_of_a_step() {
    let config = EngineConfig { token_budget: 20, chunk: 10, pack_tokens: 20, order: Order::Priority, ..LIMITS };
    let mut rig = Rig::new(EngineConfig { overtakes: 9, ..config }, 100);
    let short = batch(&mut rig, 4, 2).0;
    let (one, two) = (interactive(&mut rig, 30, 2).0, interactive(&mut rig, 30, 2).0);
    assert_eq!(rig.step(), [(one, 10), (two, 10)]);
    rig.steps(2);
    assert_eq!(rig.step(), [(one, 1), (two, 1), (short, 4)]);
}

/// What a tenant has waiting of batch work is not held against its interactive requests.
#[test]
fn batch_counts_for_no_share_of_interactive_work() {
    let config = EngineConfig { order: Order::Priority, overtakes: 64, max_running: 1, ..LIMITS };
    let mut rig = Rig::new(config, 200);
    let mut of = |tenant, class: Class| {
        let new = request(Start::Compute, 30, 1);
        let (priority, share) = (class.at_workers(0), Share { tenant, weight: 1 });
        rig.engine.submit(NewSequence { priority, share, ..new }).unwrap().0
    };
    let first = of(3, Class::Interactive);
    for _ in 0..4 {
        of(1, BATCH);
    }
    let order = [first, of(1, Class::Interactive), of(2, Class::Interactive), of(2, Class::Interactive)];
    let rows: Vec<u64> = rig.steps(4).into_iter().flatten().map(|(seq, _)| seq).collect();
    assert_eq!(rows, order);
}

/// However long batch work waits, who comes late has saved nothing up.
#[test]
fn waiting_batch_work_does_not_hold_up_the_shares() {
    let config = EngineConfig { order: Order::Priority, overtakes: 64, max_running: 1, ..LIMITS };
    let mut rig = Rig::new(config, 200);
    let submit = |rig: &mut Rig, tenant, class: Class| {
        let (priority, share) = (class.at_workers(0), Share { tenant, weight: 1 });
        rig.engine.submit(NewSequence { priority, share, ..request(Start::Compute, 30, 1) }).unwrap().0
    };
    submit(&mut rig, 1, Class::Interactive);
    submit(&mut rig, 3, BATCH);
    for _ in 0..4 {
        submit(&mut rig, 1, Class::Interactive);
        rig.step();
    }
    // One of the first tenant is left, and it came before.
    let order = [5, submit(&mut rig, 2, Class::Interactive)];
    let rows: Vec<u64> = rig.steps(2).into_iter().flatten().map(|(seq, _)| seq).collect();
    assert_eq!(rows, order);
}

#[test]
fn an_engine_says_how_much_is_batch_work() {
    let mut rig = Rig::new(LIMITS, 100);
    let empty = rig.engine.room();
    batch(&mut rig, 20, 4);
    interactive(&mut rig, 7, 4);
    let classes = |rig: &Rig| rig.engine.prompts().map(|(class, range)| (class, range.len())).collect::<Vec<_>>();
    assert_eq!(classes(&rig), [(Class::Interactive, 7), (BATCH, 20)]);
    let wanted = i64::from(20u32.div_ceil(4));
    assert_eq!(rig.engine.batch_blocks(), wanted);
    rig.step();
    assert_eq!(rig.engine.answers().map(|(class, _)| class).collect::<Vec<_>>(), [Class::Interactive, BATCH]);
    let (room, batch) = (rig.engine.room(), rig.engine.batch_blocks());
    // Two layer groups, each with blocks of both.
    assert_eq!((batch, empty - room - batch), (2 * wanted, 2 * i64::from(7u32.div_ceil(4))));
}
