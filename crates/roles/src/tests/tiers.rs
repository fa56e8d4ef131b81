//! Blocks that move between the pool and the store: what is asked of the store's threads, and that no block is lost or reused too early.

use baton_engine::{Digest, Exchange as Prefix, NewSequence, RunError, Start, Time};
use baton_types::{RequestId, SamplingParams};

use super::rig::{BLOCK, LEASE, Rig, VOCAB, engine, geometry, request};
use crate::exchange::{self, MOST_EXCHANGES};
use crate::prefill::Target;
use crate::tiers::{Command, Effect, MOST, Move, Tiers, is_hole};
use crate::{Decode, Desk, Input, Ticket, decode};

fn rig() -> Rig<Decode> {
    Rig::caching(100, |_| Decode::new(LEASE, VOCAB))
}

fn prefix() -> Box<Prefix> {
    let (request_id, deadline) = (RequestId("r".into()), Time(0).after_ms(500));
    Box::new(Prefix { request_id, tokens: (0..2 * BLOCK + 1).collect(), prefix: Default::default(), deadline })
}

/// Submits the prompt that begins with the prefix.
fn prompt(rig: &mut Rig<Decode>) {
    let new = NewSequence { prefix: Some(Default::default()), ..*request(Start::Compute, 2 * BLOCK + 1) };
    rig.input(Input::Command(decode::Command::Generate { ticket: Ticket(1), new: Box::new(new) }));
}

/// Computes until nothing is left; returns how many steps that took.
fn finish(rig: &mut Rig<Decode>) -> u64 {
    let before = rig.core.engine().steps();
    while rig.core.engine().running() + rig.core.engine().waiting() > 0 {
        rig.input(Input::Turn);
    }
    rig.core.engine().steps() - before
}

fn give(rig: &mut Rig<Decode>, command: Command) -> Vec<Effect> {
    rig.input(Input::Tiers(command));
    std::mem::take(&mut rig.tiered)
}

fn load(rig: &mut Rig<Decode>) -> Option<Move> {
    let mut effects = give(rig, Command::Load { prefix: prefix(), seconds: 0.1 });
    match effects.pop() {
        Some(Effect::Load(what)) => Some(*what),
        None => None,
        other => panic!("{other:?}"),
    }
}

/// The tokens of a prompt's beginning that were not computed.
fn cached(rig: &Rig<Decode>) -> Option<u32> {
    rig.said.iter().find_map(|effect| match effect {
        decode::Effect::Say(_, decode::Answer::Started(cached)) => Some(*cached),
        _ => None,
    })
}

#[test]
fn a_prompt_waits_for_what_is_loaded() {
    let mut rig = rig();
    let what = load(&mut rig).unwrap();
    let counts: Vec<usize> = what.blocks.iter().map(Vec::len).collect();
    assert_eq!((what.first, counts, rig.blocks().as_str()), (0, vec![2, 2], "0 used 3 lent 0 aside"));
    prompt(&mut rig);
    rig.input(Input::Turn);
    assert_eq!(rig.core.engine().steps(), 0);
    assert_eq!(load(&mut rig), None, "it is on its way");
    assert_eq!(
        give(&mut rig, Command::Loaded(what.seq, Some(vec![]))),
        [Effect::Loaded { tokens: 2 * BLOCK, streamed: false }]
    );
    finish(&mut rig);
    assert_eq!(cached(&rig), Some(2 * BLOCK));
    assert!(rig.core.engine().idle());
}

/// The prompt takes the loaded blocks over, and is computed while they are written.
#[test]
fn a_prompt_does_not_wait_for_a_load_that_streams() {
    let mut rig = rig();
    let what = load(&mut rig).unwrap();
    let new = NewSequence { prefix: Some(Default::default()), ..*request(Start::Compute, 2 * BLOCK + 3) };
    rig.input(Input::Command(decode::Command::Generate { ticket: Ticket(1), new: Box::new(new) }));
    rig.input(Input::Turn);
    assert_eq!(give(&mut rig, Command::Streams(what.seq)), []);
    rig.input(Input::Turn);
    assert_eq!((rig.behind.as_slice(), rig.core.engine().steps()), (&[what.seq][..], 1));
    assert_eq!(
        (cached(&rig), rig.core.stores(what.seq)),
        (Some(2 * BLOCK), true),
        "the store's thread has not said that it is done"
    );
    assert_eq!(
        give(&mut rig, Command::Loaded(what.seq, Some(vec![]))),
        [Effect::Loaded { tokens: 2 * BLOCK, streamed: true }]
    );
    finish(&mut rig);
    assert!(rig.core.engine().idle() && !rig.core.stores(what.seq));
    assert_eq!(rig.behind.len(), 1);
    // How long it took says nothing of what such a step costs.
    let told: Vec<_> = rig.stepped.iter().map(|done| (done.prefilled, done.sampled)).collect();
    assert_eq!((told[0], told[1]), ((3, 0), (0, 1)));
    assert_eq!(rig.stepped[0].work, Default::default());
}

/// I2: what was computed with damaged blocks is not used, and nobody finds them.
#[test]
fn a_step_that_did_not_wait_for_a_damaged_load_fails() {
    let mut rig = rig();
    let what = load(&mut rig).unwrap();
    let new = NewSequence { prefix: Some(Default::default()), ..*request(Start::Compute, 2 * BLOCK + 3) };
    rig.input(Input::Command(decode::Command::Generate { ticket: Ticket(1), new: Box::new(new) }));
    rig.input(Input::Turn);
    give(&mut rig, Command::Streams(what.seq));
    rig.damaged = Some(RunError("damaged".into()));
    rig.input(Input::Turn);
    let failed = |effect: &decode::Effect| matches!(effect, decode::Effect::Say(_, decode::Answer::Failed(..)));
    assert!(rig.said.iter().any(failed), "{:?}", rig.said);
    let left = std::mem::take(&mut rig.tiered);
    assert!(left.iter().all(|effect| matches!(effect, Effect::Offer(left) if left.moves(BLOCK) == 0)), "{left:?}");
    assert_eq!(give(&mut rig, Command::Loaded(what.seq, None)), []);
    assert!(rig.core.engine().idle());
    let (before, said) = (rig.core.engine().steps(), rig.said.len());
    prompt(&mut rig);
    finish(&mut rig);
    rig.said.drain(..said);
    assert_eq!((cached(&rig), rig.core.engine().steps() > before), (Some(0), true), "nothing of it is found");
}

/// A prefix that another worker is to be served must be found when its load has ended.
#[test]
fn a_load_that_is_served_next_is_waited_for() {
    for served_first in [true, false] {
        let mut rig = rig();
        let what = load(&mut rig).unwrap();
        let new = NewSequence { prefix: Some(Default::default()), ..*request(Start::Compute, 2 * BLOCK + 3) };
        rig.input(Input::Command(decode::Command::Generate { ticket: Ticket(1), new: Box::new(new) }));
        let serve = |rig: &mut Rig<Decode>| {
            let target = Target { tokens: 2 * BLOCK, first: vec![0, 0] };
            rig.input(Input::Exchange(exchange::Command::Serve { ticket: Ticket(8), prefix: prefix(), target }));
        };
        if served_first {
            serve(&mut rig);
        }
        give(&mut rig, Command::Streams(what.seq));
        if !served_first {
            serve(&mut rig);
        }
        rig.input(Input::Turn);
        assert!(rig.behind.is_empty());
        give(&mut rig, Command::Loaded(what.seq, Some(vec![])));
        assert!(!rig.exchanged.is_empty(), "it is served");
    }
}

/// I2: what the store does not have after all is computed, and its blocks are free.
#[test]
fn a_prompt_whose_load_fails_is_computed() {
    let mut rig = rig();
    let what = load(&mut rig).unwrap();
    prompt(&mut rig);
    assert_eq!(give(&mut rig, Command::Loaded(what.seq, None)), []);
    finish(&mut rig);
    assert_eq!(cached(&rig), Some(0));
    assert!(rig.core.engine().idle());
}

/// I3, I5: a load that takes too long holds nobody up, and its blocks go to nobody while the store may write to them.
#[test]
fn a_load_that_takes_too_long_is_waited_for_no_more() {
    let mut rig = rig();
    let what = load(&mut rig).unwrap();
    prompt(&mut rig);
    rig.now = Time(0).after_ms(500);
    finish(&mut rig);
    assert_eq!((cached(&rig), rig.blocks().as_str()), (Some(0), "0 used 0 lent 3 aside"));
    assert!(rig.tiered.contains(&Effect::Abort(what.seq)));
    give(&mut rig, Command::Loaded(what.seq, Some(vec![])));
    assert!(rig.core.engine().idle(), "too late: what was written is of no use");
}

#[test]
fn what_an_answer_leaves_is_offered_and_held_while_it_is_saved() {
    let mut rig = rig();
    prompt(&mut rig);
    finish(&mut rig);
    let offers = std::mem::take(&mut rig.tiered);
    let [Effect::Offer(left)] = &offers[..] else { panic!("{offers:?}") };
    // Nine tokens and three of the answer, of which the last one is not computed: two blocks are whole.
    assert_eq!((left.tokens.len(), left.moves(BLOCK)), (12, 2 * BLOCK));
    let saves = give(&mut rig, Command::Save(left.clone(), 1));
    let [Effect::Save(what)] = &saves[..] else { panic!("{saves:?}") };
    assert_eq!((what.first, what.blocks[0].len()), (1, 1), "the store has the first block");
    assert!(!rig.core.engine().idle());
    assert_eq!(give(&mut rig, Command::Saved(what.seq, None)), [], "what was saved is not offered again");
    assert!(rig.core.engine().idle());
}

/// Of two answers that the pool has no room for, one is preempted: what it leaves is offered, and asked for when there is room for it again.
#[test]
fn what_a_preempted_answer_leaves_is_offered_and_asked_for() {
    let mut rig = rig();
    for (ticket, first) in [(1, 0), (2, 20)] {
        let params = SamplingParams { max_tokens: 20, ..SamplingParams::default() };
        let tokens = (first..first + 16).collect();
        let new = NewSequence { prefix: Some(Default::default()), params, tokens, ..*request(Start::Compute, 16) };
        rig.input(Input::Command(decode::Command::Generate { ticket: Ticket(ticket), new: Box::new(new) }));
    }
    while rig.core.engine().preemptions() == 0 {
        rig.input(Input::Turn);
    }
    let [Effect::Offer(left)] = &std::mem::take(&mut rig.tiered)[..] else { panic!() };
    assert_eq!((left.tokens[0], left.moves(BLOCK)), (20, 12), "two blocks less than it had");
    let saves = give(&mut rig, Command::Save(left.clone(), 0));
    let [Effect::Save(what)] = &saves[..] else { panic!("{saves:?}") };
    assert_eq!(what.blocks[0].len(), 3);
    give(&mut rig, Command::Saved(what.seq, None));
    let mut wanted = None;
    while wanted.is_none() {
        rig.input(Input::Turn);
        assert!(!rig.core.waits(), "it goes on when it has asked");
        wanted = std::mem::take(&mut rig.tiered).into_iter().find_map(|effect| match effect {
            Effect::Returns(wanted) => Some(wanted),
            _ => None,
        });
    }
    let mut kept = *wanted.unwrap();
    assert!(kept.tokens.starts_with(&left.tokens));
    kept.deadline = rig.now.after_ms(500);
    let loads = give(&mut rig, Command::Load { prefix: Box::new(kept), seconds: 0.0 });
    let [Effect::Load(what)] = &loads[..] else { panic!("{loads:?}") };
    rig.input(Input::Turn);
    assert_eq!((rig.core.engine().running(), rig.core.engine().waiting()), (0, 1), "it waits for its load");
    // The store says that it lost it: it is computed.
    give(&mut rig, Command::Loaded(what.seq, None));
    finish(&mut rig);
    let tokens =
        rig.said.iter().filter(|said| matches!(said, decode::Effect::Say(_, decode::Answer::Token(_)))).count();
    assert_eq!(tokens, 40);
    assert!(rig.core.engine().idle());
}

/// Of a prompt that ended before it was computed, what is computed is offered, and no more.
#[test]
fn no_more_is_offered_than_was_computed() {
    let mut rig = rig();
    let new = NewSequence { prefix: Some(Default::default()), ..*request(Start::Compute, 30) };
    rig.input(Input::Command(decode::Command::Generate { ticket: Ticket(1), new: Box::new(new) }));
    rig.input(Input::Turn);
    let seq = rig.said.iter().find_map(|effect| match effect {
        decode::Effect::Accepted { outcome: Ok(seq), .. } => Some(*seq),
        _ => None,
    });
    rig.input(Input::Command(decode::Command::Cancel(seq.unwrap())));
    let [Effect::Offer(left)] = &std::mem::take(&mut rig.tiered)[..] else { panic!() };
    assert_eq!((left.tokens.len(), left.moves(BLOCK)), (17, 16), "a chunk of sixteen tokens");
}

/// I5
#[test]
fn few_are_saved_at_a_time() {
    let mut rig = rig();
    prompt(&mut rig);
    finish(&mut rig);
    let [Effect::Offer(left)] = &std::mem::take(&mut rig.tiered)[..] else { panic!() };
    let saves = (0..40).filter(|_| !give(&mut rig, Command::Save(left.clone(), 0)).is_empty()).count();
    assert_eq!(saves, MOST);
}

#[test]
fn what_is_sooner_computed_is_not_loaded() {
    for (computes, seconds, loads) in [(0.0, 1.0, true), (0.2, 0.1, true), (0.1, 0.2, false)] {
        let (mut engine, mut events) = (engine(100, &geometry()), Vec::new());
        let desk = Desk { engine: &mut engine, events: &mut events, draining: false };
        let mut tiers = Tiers::default();
        let command = Command::Load { prefix: prefix(), seconds };
        tiers.command(
            desk,
            command,
            |from, to| if (from, to) == (0, 8) { computes } else { 9.0 },
            Time(0),
            &mut Vec::new(),
        );
        assert_eq!(!events.is_empty(), loads, "{computes} s to compute, {seconds} s to load");
    }
}

/// A prefix that there is no room for is brought nearer, and its prompt asks for it again before it is computed.
#[test]
fn what_has_no_room_is_warmed_and_asked_for_again() {
    let mut rig = rig();
    let mut loads = Vec::new();
    // As many as may run.
    for at in 0..2 {
        let tokens = (100 * at + 100..100 * at + 101 + BLOCK).collect();
        let prefix = Box::new(Prefix { request_id: RequestId(format!("other {at}")), tokens, ..*prefix() });
        let effects = give(&mut rig, Command::Load { prefix, seconds: 0.0 });
        let [Effect::Load(what)] = &effects[..] else { panic!("{effects:?}") };
        loads.push(what.seq);
    }
    assert_eq!(give(&mut rig, Command::Load { prefix: prefix(), seconds: 0.1 }), [Effect::Warm(prefix(), 0)]);
    prompt(&mut rig);
    // One of the others has ended meanwhile.
    give(&mut rig, Command::Loaded(loads[0], None));
    rig.input(Input::Turn);
    let effects = std::mem::take(&mut rig.tiered);
    let [Effect::Returns(wanted)] = &effects[..] else { panic!("{effects:?}") };
    assert_eq!((&wanted.request_id, &wanted.tokens), (&prefix().request_id, &prefix().tokens));
    let what = load(&mut rig).unwrap();
    rig.input(Input::Turn);
    assert_eq!(rig.core.engine().steps(), 0, "it waits for it");
    give(&mut rig, Command::Loaded(what.seq, Some(vec![])));
    finish(&mut rig);
    assert_eq!(cached(&rig), Some(2 * BLOCK));
}

/// What a prompt in the queue finds in the pool stays there.
#[test]
fn a_load_evicts_nothing_that_a_prompt_before_it_needs() {
    let mut rig = rig();
    prompt(&mut rig);
    finish(&mut rig);
    rig.said.clear();
    rig.tiered.clear();
    prompt(&mut rig);
    let tokens = (100..101 + 10 * BLOCK).collect();
    let large = Box::new(Prefix { request_id: RequestId("large".into()), tokens, ..*prefix() });
    let load = Command::Load { prefix: large.clone(), seconds: 0.0 };
    assert_eq!(give(&mut rig, load.clone()), [Effect::Warm(large, 0)]);
    finish(&mut rig);
    assert_eq!(cached(&rig), Some(2 * BLOCK));
    rig.tiered.clear();
    assert!(matches!(give(&mut rig, load)[..], [Effect::Load(_)]), "nothing waits any more");
}

/// What is in the pool when its prompt comes may be evicted before the prompt starts.
#[test]
fn what_was_evicted_from_the_pool_meanwhile_is_asked_for() {
    let mut rig = rig();
    prompt(&mut rig);
    finish(&mut rig);
    rig.tiered.clear();
    // They take all blocks, and come first.
    for first in [50, 100] {
        let large = NewSequence { prefix: Some(Default::default()), ..*request(Start::Compute, 21) };
        let large = NewSequence { tokens: (first..first + 21).collect(), ..large };
        rig.input(Input::Command(decode::Command::Generate { ticket: Ticket(2), new: Box::new(large) }));
    }
    assert_eq!(load(&mut rig), None, "it is in the pool");
    prompt(&mut rig);
    let asks = |effect: &Effect| matches!(effect, Effect::Returns(wanted) if wanted.tokens == prefix().tokens);
    let asked = (0..20).find(|_| {
        rig.input(Input::Turn);
        rig.tiered.iter().any(asks)
    });
    assert!(asked.is_some(), "{:?}", rig.tiered);
    assert!(load(&mut rig).is_some(), "and there is room");
}

/// I3: its blocks stay aside until the store's thread has read them.
#[test]
fn a_save_that_takes_too_long_keeps_its_blocks_aside() {
    let mut rig = rig();
    prompt(&mut rig);
    finish(&mut rig);
    let [Effect::Offer(left)] = &std::mem::take(&mut rig.tiered)[..] else { panic!() };
    let saves = give(&mut rig, Command::Save(left.clone(), 0));
    let [Effect::Save(what)] = &saves[..] else { panic!("{saves:?}") };
    rig.now = Time(0).after_ms(20_000);
    rig.input(Input::Turn);
    assert!(!rig.core.engine().idle());
    give(&mut rig, Command::Saved(what.seq, None));
    assert!(rig.core.engine().idle());
}

#[test]
fn nothing_is_saved_while_the_worker_drains() {
    let mut rig = rig();
    prompt(&mut rig);
    finish(&mut rig);
    let [Effect::Offer(left)] = &std::mem::take(&mut rig.tiered)[..] else { panic!() };
    rig.input(Input::Drain);
    assert_eq!(give(&mut rig, Command::Save(left.clone(), 0)), []);
}

#[test]
fn nothing_is_loaded_while_the_worker_drains() {
    let mut rig = rig();
    rig.input(Input::Drain);
    assert_eq!(load(&mut rig), None);
}

/// Another worker that is to be served a prefix waits for it, too, and is told if it does not come.
#[test]
fn a_prefix_is_served_once_it_is_loaded() {
    let serve = |rig: &mut Rig<Decode>| {
        let target = Target { tokens: 2 * BLOCK, first: vec![0, 0] };
        rig.input(Input::Exchange(exchange::Command::Serve { ticket: Ticket(8), prefix: prefix(), target }));
        std::mem::take(&mut rig.exchanged)
    };
    let outcome = |effects: &[exchange::Effect]| match &effects[0] {
        exchange::Effect::Accepted { outcome, .. } => outcome.is_ok(),
        other => panic!("{other:?}"),
    };
    for whole in [true, false] {
        let mut rig = rig();
        let what = load(&mut rig).unwrap();
        assert_eq!(serve(&mut rig), [], "it waits");
        give(&mut rig, Command::Loaded(what.seq, whole.then(Vec::new)));
        let said = std::mem::take(&mut rig.exchanged);
        assert_eq!((outcome(&said), said.len()), (whole, 1 + usize::from(whole)), "{said:?}");
    }
    // A load that takes too long is waited for no more.
    let mut rig = rig();
    load(&mut rig).unwrap();
    assert_eq!(serve(&mut rig), []);
    rig.now = Time(0).after_ms(500);
    rig.input(Input::Turn);
    assert!(!outcome(&std::mem::take(&mut rig.exchanged)));
    // I5: as many wait as may be served, and more are told at once.
    let mut rig = self::rig();
    load(&mut rig).unwrap();
    let waiting = (0..2 * MOST_EXCHANGES).filter(|_| serve(&mut rig).is_empty()).count();
    assert_eq!(waiting, MOST_EXCHANGES);
}

/// I2: what was loaded is saved by the digests it was verified with. If it has changed meanwhile, nobody finds it any more.
#[test]
fn what_was_loaded_is_saved_by_the_digests_it_came_with() {
    let mut rig = rig();
    let what = load(&mut rig).unwrap();
    let each = what.blocks.iter().enumerate().flat_map(|(group, list)| list.iter().map(move |block| (group, *block)));
    let each = each.filter(|(_, block)| !is_hole(*block));
    let digests: Vec<_> = (11..).zip(each).map(|(of, (group, block))| Digest { group, block, of }).collect();
    give(&mut rig, Command::Loaded(what.seq, Some(digests.clone())));
    let effects = give(&mut rig, Command::Save(prefix(), 0));
    let [Effect::Save(save)] = &effects[..] else { panic!("{effects:?}") };
    assert_eq!(save.known, digests);
    give(&mut rig, Command::Saved(save.seq, Some((0, digests[0].block))));
    assert_eq!(give(&mut rig, Command::Save(prefix(), 0)), [], "it is not there any more");
    assert!(rig.core.engine().idle());
    assert!(load(&mut rig).is_some(), "it can be loaded again");
}
