//! Prefixes that move from one worker's prefix cache to another's.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod rig;

use baton_engine::{
    CacheConfig, EngineConfig, EngineError, Event, Eviction, Exchange, HOLE, NewSequence, Order, Prefix, RunError,
    SequenceError, Start, Time,
};
use baton_types::{PoolGeometry, RequestId, SeqId};
use rig::{LIMITS, Rig, layout, request};

fn prefix() -> Prefix {
    Prefix { seed: 7, ..Prefix::default() }
}

fn sharing(start: Start, prompt: u32, max_tokens: u32) -> NewSequence {
    NewSequence { prefix: Some(prefix()), ..request(start, prompt, max_tokens) }
}

/// Of a prompt of this many tokens.
fn exchange(prompt: u32) -> Exchange {
    let request_id = RequestId("r".into());
    Exchange { request_id, tokens: (0..prompt).collect(), prefix: prefix(), deadline: Time(0).after_ms(100) }
}

/// A worker whose prefix cache has this prompt's blocks.
fn holder(prompt: u32) -> Rig {
    let mut rig = Rig::new(LIMITS, 60);
    let seq = rig.engine.submit(sharing(Start::ComputeAndHold, prompt, 1)).unwrap();
    while rig.engine.held() == 0 {
        rig.step();
    }
    rig.engine.release(seq).unwrap();
    rig
}

fn fetch(rig: &mut Rig, prompt: u32) -> Result<SeqId, EngineError> {
    rig.engine.fetch(exchange(prompt), &mut rig.events)
}

/// What the transfer does: writes the blocks that one worker serves into those that the other lends.
fn write(from: &Rig, serves: SeqId, to: &mut Rig, fetches: SeqId) {
    let first = to.engine.lent_from(fetches).unwrap() as usize;
    write_from(first, from, serves, to, fetches);
}

/// The same from this block on, into the blocks of any sequence.
fn write_from(first: usize, from: &Rig, serves: SeqId, to: &mut Rig, fetches: SeqId) {
    let [theirs, ours] = [from, &*to].map(|rig| PoolGeometry::uniform(layout(), rig.engine.counts().total / 2));
    for group in 0..theirs.layout.groups.len() {
        let sources = from.engine.tables(serves).unwrap()[group].blocks();
        let targets = to.engine.tables(fetches).unwrap()[group].blocks();
        for (source, target) in sources.iter().zip(targets).skip(first).filter(|(_, target)| **target != HOLE) {
            for layer in 0..theirs.layout.groups[group].layers.len() {
                let bytes = from.model.memory()[theirs.block_range(group, layer, *source)].to_vec();
                to.model.memory_mut()[ours.block_range(group, layer, *target)].copy_from_slice(&bytes);
            }
        }
    }
}

/// I1: the prompt waits for the fetch, computes what is left, and is answered as if it had computed all.
#[test]
fn a_prompt_waits_for_its_fetched_prefix_and_computes_the_rest() {
    let mut from = holder(30);
    let mut to = Rig::new(LIMITS, 60);
    let alone = {
        let mut rig = Rig::new(LIMITS, 60);
        let seq = rig.engine.submit(sharing(Start::Compute, 40, 5)).unwrap();
        rig.steps(10);
        rig.tokens_of(seq)
    };
    let fetches = fetch(&mut to, 30).unwrap();
    let prompt = to.engine.submit(sharing(Start::Compute, 40, 5)).unwrap();
    assert_eq!(
        (to.step(), to.engine.waiting(), to.blocks()),
        (vec![], 1, (0, 7, 0)),
        "28 of 30 tokens are whole blocks"
    );
    assert_eq!(to.engine.arriving().count(), 0, "no answer follows from a fetch");
    let serves = from.engine.serve(exchange(30)).unwrap();
    assert_eq!((from.engine.held(), from.blocks()), (1, (7, 0, 0)));
    write(&from, serves, &mut to, fetches);
    from.engine.release(serves).unwrap();
    assert_eq!(to.engine.fetched(fetches, &[]), Ok(28));
    assert_eq!(to.step(), [(prompt.0, 12)]);
    to.steps(5);
    assert_eq!(to.tokens_of(prompt), alone);
    assert!(to.engine.idle() && from.engine.idle(), "I6");
}

/// The answer to a prompt of 40 tokens, computed alone.
fn alone_40(max_tokens: u32) -> Vec<u32> {
    let mut rig = Rig::new(LIMITS, 60);
    let seq = rig.engine.submit(sharing(Start::Compute, 40, max_tokens)).unwrap();
    rig.steps(10);
    rig.tokens_of(seq)
}

/// A worker with prompts of 40 tokens that wait for a fetch of 28, which streams.
fn streaming(prompts: u32) -> (Rig, SeqId, Vec<SeqId>) {
    let mut rig = Rig::new(LIMITS, 60);
    let fetches = fetch(&mut rig, 30).unwrap();
    let prompts = (0..prompts).map(|_| rig.engine.submit(sharing(Start::Compute, 40, 5)).unwrap()).collect();
    assert!(rig.plan().is_none(), "they wait");
    rig.engine.streams(fetches);
    (rig, fetches, prompts)
}

/// I1: it is computed with what is written meanwhile, and answered as if it had computed all. Who shares its prefix waits for it.
#[test]
fn a_prompt_is_computed_behind_a_fetch_that_streams() {
    let mut from = holder(30);
    let serves = from.engine.serve(exchange(30)).unwrap();
    let (mut to, fetches, prompts) = streaming(2);
    let step = to.plan().unwrap();
    assert_eq!((step.behind(), step.rows().len(), step.rows()[0].seq), (Some(fetches), 1, prompts[0]));
    let row = step.rows()[0];
    assert_eq!((row.start, row.len, row.since), (28, 12, 0), "a peer gets the prefix with the rest");
    assert!(to.plan().is_none(), "nothing is launched behind it");
    assert_eq!(
        to.engine.fetched(fetches, &[]),
        Err(EngineError::UnknownSequence(fetches)),
        "the prompt has its blocks"
    );
    assert_eq!((to.blocks(), to.engine.here(&prefix(), &(0..40).collect::<Vec<_>>())), ((10, 0, 0), 0), "I2");
    write_from(0, &from, serves, &mut to, prompts[0]);
    let mut out = to.compute(&step);
    to.engine.apply(step, &mut out, &mut to.events);
    let next = to.plan().unwrap();
    let rows: Vec<_> = next.rows().iter().map(|row| (row.seq, row.len)).collect();
    assert_eq!((next.behind(), rows), (None, vec![(prompts[0], 1), (prompts[1], 1)]), "39 tokens are found");
    let mut out = to.compute(&next);
    to.engine.apply(next, &mut out, &mut to.events);
    to.steps(5);
    prompts.iter().for_each(|prompt| assert_eq!(to.tokens_of(*prompt), alone_40(5)));
    let cached = |event: &Event| match event {
        Event::Finished { seq, cached_tokens, .. } => Some((*seq, *cached_tokens)),
        _ => None,
    };
    let cached: Vec<_> = to.events.iter().filter_map(cached).collect();
    assert_eq!(cached, [(prompts[0], 28), (prompts[1], 39)]);
    assert!(to.engine.idle(), "I6");
}

/// I2, I3: what was written is found by nobody, and its blocks are used by nobody before the step is over.
#[test]
fn a_step_behind_a_fetch_can_fail_and_its_sequence_can_be_aborted() {
    let (mut to, _, prompts) = streaming(1);
    let step = to.plan().unwrap();
    to.engine.fail(step, RunError("damaged".into()), &mut to.events);
    let failed = |event: &Event| matches!(event, Event::Failed { seq, quarantined: false, .. } if *seq == prompts[0]);
    assert!(to.events.iter().any(failed), "{:?}", to.events);
    assert_eq!(to.engine.here(&prefix(), &(0..40).collect::<Vec<_>>()), 0);
    assert!(to.engine.idle());

    let (mut to, _, prompts) = streaming(1);
    let step = to.plan().unwrap();
    to.engine.abort(prompts[0], false).unwrap();
    assert_eq!(to.blocks(), (10, 0, 0));
    to.engine.fail(step, RunError("damaged".into()), &mut to.events);
    assert!(to.engine.idle());
    assert_eq!(to.engine.here(&prefix(), &(0..40).collect::<Vec<_>>()), 0);
}

/// What was written and verified is found, also if the request is gone.
#[test]
fn a_prefix_is_found_though_the_prompt_behind_it_was_aborted() {
    let mut from = holder(30);
    let serves = from.engine.serve(exchange(30)).unwrap();
    let (mut to, _, prompts) = streaming(1);
    let step = to.plan().unwrap();
    write_from(0, &from, serves, &mut to, prompts[0]);
    to.engine.abort(prompts[0], false).unwrap();
    let mut out = to.compute(&step);
    to.engine.apply(step, &mut out, &mut to.events);
    assert_eq!(to.engine.here(&prefix(), &(0..40).collect::<Vec<_>>()), 28);
    assert!(to.engine.idle(), "I6");
}

/// Also if it takes the blocks over from a fetch for others, who did not ask for that, or did.
#[test]
fn what_a_prompt_asks_to_be_kept_is_kept() {
    for (asks, fetch_asks) in [(1, 0), (0, 1)] {
        let cache = CacheConfig { eviction: Eviction::Priority, ..LIMITS.cache };
        let mut to = Rig::new(EngineConfig { cache, ..LIMITS }, 60);
        let [keep, fetched] = [asks, fetch_asks].map(|keep| Prefix { keep, ..prefix() });
        let fetches = to.engine.fetch(Exchange { prefix: fetched, ..exchange(30) }, &mut to.events).unwrap();
        to.engine.submit(NewSequence { prefix: Some(keep), ..sharing(Start::Compute, 40, 5) }).unwrap();
        assert!(to.plan().is_none());
        to.engine.streams(fetches);
        assert_eq!(to.step().len(), 1);
        assert_eq!(to.engine.kept_blocks() >= 7, asks == 1, "{}", to.engine.kept_blocks());
    }
}

/// Also what was in the prefix cache before, which the fetch did not bring.
#[test]
fn what_a_prompt_asks_to_be_kept_is_kept_from_its_beginning() {
    let cache = CacheConfig { eviction: Eviction::Priority, ..LIMITS.cache };
    let mut to = Rig::new(EngineConfig { cache, ..LIMITS }, 60);
    to.engine.submit(sharing(Start::Compute, 13, 1)).unwrap();
    assert_eq!(to.step().len(), 1);
    let fetches = fetch(&mut to, 30).unwrap();
    assert_eq!((to.engine.lent_from(fetches), to.engine.kept_blocks()), (Some(3), 0));
    let keep = Some(Prefix { keep: 1, ..prefix() });
    to.engine.submit(NewSequence { prefix: keep, ..sharing(Start::Compute, 40, 5) }).unwrap();
    assert!(to.plan().is_none());
    to.engine.streams(fetches);
    let step = to.plan().unwrap();
    assert_eq!((step.behind(), to.engine.kept_blocks()), (Some(fetches), 3));
    to.engine.fail(step, RunError("over".into()), &mut to.events);
    assert_eq!(to.engine.here(&prefix(), &(0..40).collect::<Vec<_>>()), 12, "what was verified stays");
}

/// Who comes first and finds no room is not overtaken.
#[test]
fn a_prompt_behind_one_without_room_waits_with_it() {
    let mut to = Rig::new(EngineConfig { order: Order::Priority, overtakes: 64, ..LIMITS }, 16);
    let fetches = fetch(&mut to, 30).unwrap();
    let prompt = to.engine.submit(sharing(Start::Compute, 36, 1)).unwrap();
    assert!(to.plan().is_none(), "it has found its leader");
    let large = to.engine.submit(NewSequence { priority: -1, ..request(Start::Compute, 44, 1) }).unwrap();
    to.engine.streams(fetches);
    assert!(to.plan().is_none(), "11 blocks are not free");
    to.engine.abort(large, false).unwrap();
    let step = to.plan().unwrap();
    assert_eq!((step.behind(), step.rows()[0].seq), (Some(fetches), prompt));
    to.engine.fail(step, RunError("over".into()), &mut to.events);

    let (mut to, fetches, _) = streaming(1);
    to.engine.streams_no_more(SeqId(77));
    to.engine.streams_no_more(fetches);
    assert!(to.plan().is_none(), "it is waited for after all");
}

/// Others never wait for what is being written; a prompt that has nothing to gain, or finds no room, waits for all of it.
#[test]
fn a_prompt_that_cannot_be_computed_behind_a_fetch_waits_for_it() {
    let (mut to, ..) = streaming(1);
    let other = to.submit(Start::Compute, 3, 9);
    let step = to.plan().unwrap();
    assert_eq!((step.behind(), step.rows()[0].seq), (None, other), "who can run runs");

    let (mut to, fetches) = (Rig::new(LIMITS, 60), SeqId(0));
    assert_eq!(fetch(&mut to, 30), Ok(fetches));
    to.engine.submit(sharing(Start::Compute, 29, 5)).unwrap();
    to.engine.submit(sharing(Start::Receive, 40, 5)).unwrap();
    let parked = NewSequence { parked: true, ..sharing(Start::Compute, 40, 5) };
    to.engine.submit(parked).unwrap();
    assert!(to.plan().is_none());
    to.engine.streams(fetches);
    assert!(to.plan().is_none(), "a single token, a peer's, one that must not start");

    // Blocks for 28 tokens and two more: the prompt needs three.
    let mut to = Rig::new(LIMITS, 9);
    let fetches = fetch(&mut to, 30).unwrap();
    let held = to.engine.submit(sharing(Start::Compute, 36, 1)).unwrap();
    assert!(to.plan().is_none());
    let blocks = to.engine.fetch(Exchange { tokens: (90..99).collect(), ..exchange(9) }, &mut to.events).unwrap();
    to.engine.streams(fetches);
    assert!(to.plan().is_none(), "no room");
    to.engine.abort(blocks, false).unwrap();
    assert_eq!(to.plan().map(|step| (step.behind(), step.rows()[0].seq)), Some((Some(fetches), held)));
}

/// A KV store has no prompts: what it fetched is what it has for the tiers below its pool.
#[test]
fn a_fetched_prefix_is_noted_where_no_prompt_follows() {
    let noted = |notes: bool| {
        let (mut from, mut to) = (holder(30), Rig::new(LIMITS, 60));
        to.engine.note_ended();
        if notes {
            to.engine.note_fetched();
        }
        let (fetches, serves) = (fetch(&mut to, 30).unwrap(), from.engine.serve(exchange(30)).unwrap());
        write(&from, serves, &mut to, fetches);
        assert!(to.engine.take_ended().is_empty(), "it is not here yet");
        assert_eq!(to.engine.fetched(fetches, &[]), Ok(28));
        to.engine.take_ended().into_iter().map(|left| (left.prefix, left.tokens)).collect::<Vec<_>>()
    };
    assert_eq!(noted(true), [(prefix(), (0..29).collect())], "its blocks, and a token after them");
    assert_eq!(noted(false), [], "the prompt after it will be noted");
}

/// I3, I5: a fetch that fails costs no more than its time, and its blocks go to nobody before they are fenced.
#[test]
fn a_prompt_whose_fetch_fails_is_computed() {
    let mut to = Rig::new(LIMITS, 60);
    let fetches = fetch(&mut to, 30).unwrap();
    let prompt = to.engine.submit(sharing(Start::Compute, 30, 1)).unwrap();
    assert_eq!(to.step(), []);
    to.now = Time(0).after_ms(100);
    assert_eq!(to.step(), [(prompt.0, 30)]);
    let failed = |event: &Event| {
        let Event::Failed { seq, error: SequenceError::Deadline { .. }, quarantined, .. } = event else { return false };
        *seq == fetches && *quarantined
    };
    assert!(to.events.iter().any(failed), "{:?}", to.events);
    assert_eq!(to.blocks(), (0, 0, 7));
    to.engine.clear_quarantine(fetches).unwrap();
    assert!(to.engine.idle());
}

/// A sequence that was preempted, of two that a pool has no room for, once the other one has ended and nothing of it is cached any more. Returns
/// it, what it left, and what it asks for.
fn preempted(rig: &mut Rig) -> (SeqId, Exchange, Exchange) {
    rig.engine.note_ended();
    let seqs = [100, 200].map(|first| {
        let mut new = sharing(Start::Compute, 16, 14);
        new.tokens.iter_mut().for_each(|token| *token += first);
        rig.engine.submit(new).unwrap()
    });
    while rig.engine.preemptions() == 0 {
        rig.step();
    }
    let [left] = &rig.engine.take_ended()[..] else { panic!("one was preempted") };
    let left = left.clone();
    while rig.tokens_of(seqs[0]).len() < 14 {
        assert!(rig.engine.take_returning().is_empty(), "there is no room for it");
        rig.step();
    }
    rig.engine.clear_cache().unwrap();
    assert_eq!(rig.step(), [], "it asks first");
    let [wanted] = &rig.engine.take_returning()[..] else { panic!("it lacks what it had") };
    (seqs[1], left, wanted.clone())
}

fn alone(first: u32) -> Vec<u32> {
    let mut rig = Rig::new(LIMITS, 60);
    let mut new = sharing(Start::Compute, 16, 14);
    new.tokens.iter_mut().for_each(|token| *token += first);
    let seq = rig.engine.submit(new).unwrap();
    rig.steps(14);
    rig.tokens_of(seq)
}

/// I1: what a preempted sequence left may be kept elsewhere; it asks for that before it is computed again, and goes on where it was.
#[test]
fn what_a_preempted_sequence_left_comes_back() {
    let mut rig = Rig::new(LIMITS, 10);
    let (seq, left, wanted) = preempted(&mut rig);
    let had = rig.tokens_of(seq);
    assert_eq!(wanted.tokens, [(200..216).collect(), had].concat(), "its prompt and its answer so far");
    assert!(wanted.tokens.starts_with(&left.tokens));
    // Two ran, and each may have taken a block before this one was kept.
    assert_eq!((wanted.tokens.len(), left.tokens.len(), left.moves(4)), (21, 13, 12));
    let kept = Exchange { tokens: left.tokens.clone(), deadline: Time(0).after_ms(100), ..wanted };
    let fetches = rig.engine.fetch(kept.clone(), &mut rig.events).unwrap();
    assert_eq!(rig.step(), [], "it waits for what it asked for");
    let mut from = Rig::new(LIMITS, 60);
    let computes =
        NewSequence { tokens: left.tokens.clone(), ..sharing(Start::ComputeAndHold, left.tokens.len() as u32, 1) };
    let computes = from.engine.submit(computes).unwrap();
    from.step();
    from.engine.release(computes).unwrap();
    let serves = from.engine.serve(kept).unwrap();
    write(&from, serves, &mut rig, fetches);
    assert_eq!(rig.engine.fetched(fetches, &[]), Ok(12));
    assert_eq!(rig.step(), [(seq.0, 21 - 12)]);
    rig.steps(14);
    assert_eq!(rig.tokens_of(seq), alone(200));
    assert!(rig.engine.take_returning().is_empty() && rig.engine.idle());
}

/// I5: it asks once, and waits for nothing if nobody has it.
#[test]
fn a_preempted_sequence_of_which_nobody_keeps_anything_is_computed() {
    let mut rig = Rig::new(LIMITS, 10);
    let (seq, ..) = preempted(&mut rig);
    assert_eq!(rig.step(), [(seq.0, 21)]);
    rig.steps(14);
    assert_eq!(rig.tokens_of(seq), alone(200));
    assert!(rig.engine.take_returning().is_empty() && rig.engine.idle());
}

/// A prefix that has no room when its prompt comes is fetched when there is, and not computed.
#[test]
fn a_prompt_whose_prefix_had_no_room_asks_for_it_when_there_is() {
    for kept in [true, false] {
        let mut rig = Rig::new(LIMITS, 10);
        let mut first = sharing(Start::Compute, 16, 14);
        first.tokens.iter_mut().for_each(|token| *token += 100);
        let first = rig.engine.submit(first).unwrap();
        rig.step();
        let new = NewSequence { request_id: RequestId("second".into()), ..sharing(Start::Compute, 30, 2) };
        let prefix = Exchange {
            request_id: new.request_id.clone(),
            tokens: new.tokens[..29].to_vec(),
            prefix: new.prefix.unwrap(),
            deadline: Time(0).after_ms(100),
        };
        let refused = rig.engine.fetch(prefix.clone(), &mut rig.events);
        assert!(matches!(refused, Err(EngineError::NoRoom { .. })), "{refused:?}");
        rig.engine.asks_later(new.request_id.clone());
        let second = rig.engine.submit(new).unwrap();
        while rig.tokens_of(first).len() < 14 {
            assert!(rig.engine.take_returning().is_empty(), "there is no room for it");
            rig.step();
        }
        assert_eq!(rig.step(), [], "it asks first");
        let [wanted] = &rig.engine.take_returning()[..] else { panic!("it lacks its prefix") };
        assert!(wanted.request_id == prefix.request_id && wanted.tokens.starts_with(&prefix.tokens));
        assert!(rig.engine.fits_behind_queue(&prefix), "the room is its own");
        if kept {
            let fetches = rig.engine.fetch(prefix.clone(), &mut rig.events).unwrap();
            assert_eq!(rig.step(), [], "it waits for what it asked for");
            let mut from = Rig::new(LIMITS, 60);
            let computes = NewSequence { tokens: prefix.tokens.clone(), ..sharing(Start::ComputeAndHold, 29, 1) };
            let computes = from.engine.submit(computes).unwrap();
            from.step();
            from.step();
            from.engine.release(computes).unwrap();
            let serves = from.engine.serve(prefix).unwrap();
            write(&from, serves, &mut rig, fetches);
            assert_eq!(rig.engine.fetched(fetches, &[]), Ok(28));
            assert_eq!(rig.step(), [(second.0, 2)], "only the rest is computed");
        }
        while rig.tokens_of(second).len() < 2 {
            rig.step();
        }
        assert!(rig.engine.take_returning().is_empty() && rig.engine.idle());
    }
}

/// I5: however many prefixes that begin alike are fetched after it came, and all in vain.
#[test]
fn a_prompt_waits_for_no_fetch_that_begins_later() {
    let mut to = Rig::new(EngineConfig { order: Order::Priority, overtakes: 3, ..LIMITS }, 60);
    fetch(&mut to, 30).unwrap();
    let prompt = to.engine.submit(sharing(Start::Compute, 30, 1)).unwrap();
    assert_eq!(to.step(), []);
    let tokens = (0..28).chain([90, 91, 92, 93, 94]).collect();
    let longer = Exchange { tokens, deadline: Time(0).after_ms(200), ..exchange(0) };
    to.engine.fetch(longer, &mut to.events).unwrap();
    assert_eq!(to.step(), [], "both are on their way");
    to.now = Time(0).after_ms(100);
    assert_eq!(to.step(), [(prompt.0, 30)]);
}

#[test]
fn only_what_is_missing_is_lent() {
    let mut to = holder(13);
    let fetches = fetch(&mut to, 30).unwrap();
    assert_eq!((to.engine.lent_from(fetches), to.blocks()), (Some(3), (3, 4, 0)));
    let Some(Event::Reserved { cached_tokens: 12, .. }) = to.events.last() else { panic!("{:?}", to.events) };
    to.engine.abort(fetches, false).unwrap();
    assert_eq!(to.engine.serve(exchange(30)), Err(EngineError::NotHere { tokens: 28, here: 12 }));
}

/// Another request with the same prefix waits for the fetch that is under way.
#[test]
fn nothing_is_fetched_twice_at_a_time() {
    let mut to = Rig::new(LIMITS, 60);
    fetch(&mut to, 30).unwrap();
    assert_eq!(fetch(&mut to, 30), Err(EngineError::Here { tokens: 28 }));
    assert_eq!(fetch(&mut to, 14), Err(EngineError::Here { tokens: 12 }));
    assert!(fetch(&mut to, 50).is_ok(), "more than comes");
    let other = Exchange { prefix: Prefix { seed: 8, ..Prefix::default() }, ..exchange(30) };
    assert!(to.engine.fetch(other, &mut to.events).is_ok(), "of another tenant");
}

#[test]
fn nothing_is_fetched_that_is_here_or_has_no_room() {
    let mut to = holder(30);
    assert_eq!(fetch(&mut to, 30), Err(EngineError::Here { tokens: 28 }));
    assert_eq!(fetch(&mut to, 4), Err(EngineError::Here { tokens: 0 }), "a block, but no token after it");
    assert_eq!(to.engine.serve(exchange(4)), Err(EngineError::NotHere { tokens: 0, here: 0 }));
    let mut full = Rig::new(LIMITS, 10);
    full.submit(Start::Compute, 16, 20);
    full.step();
    assert_eq!(fetch(&mut full, 30), Err(EngineError::NoRoom { tokens: 28 }), "one block is spared for what runs");
    assert!(full.engine.fits_behind_queue(&exchange(21)) && !full.engine.fits_behind_queue(&exchange(25)));
    assert!(fetch(&mut full, 21).is_ok());
    let mut busy = Rig::new(EngineConfig { max_running: 1, ..LIMITS }, 60);
    busy.submit(Start::Compute, 16, 20);
    busy.step();
    assert_eq!(fetch(&mut busy, 30), Err(EngineError::NoRoom { tokens: 28 }));
}

/// Prompts that wait find in the prefix cache what was there when they came, and what was fetched for them.
#[test]
fn a_fetch_leaves_room_for_the_queue() {
    let mut rig = Rig::new(LIMITS, 16);
    let other = |at: u32| Exchange {
        request_id: RequestId(format!("fetched {at}")),
        tokens: (100 * at..100 * at + 29).collect(),
        ..exchange(0)
    };
    let prompt = |of: Exchange| NewSequence {
        request_id: of.request_id,
        tokens: of.tokens.into_iter().chain([1, 2]).collect(),
        ..sharing(Start::Compute, 31, 2)
    };
    assert!(rig.engine.fits_behind_queue(&other(1)), "nothing waits");
    rig.engine.fetch(other(1), &mut rig.events).unwrap();
    rig.engine.submit(prompt(other(1))).unwrap();
    assert!(rig.engine.fits_behind_queue(&other(2)), "it takes one block more than is lent");
    rig.engine.submit(prompt(exchange(29))).unwrap();
    assert!(!rig.engine.fits_behind_queue(&other(2)), "8 blocks are for what waits");
    assert!(!rig.engine.fits_behind_queue(&exchange(29)), "also of what another waits for");
    // Prompts that begin alike take that once.
    let mut larger = Rig::new(LIMITS, 24);
    for last in 50..54 {
        let same = NewSequence { tokens: (0..30).chain([last]).collect(), ..prompt(exchange(29)) };
        larger.engine.submit(same).unwrap();
    }
    assert!(larger.engine.fits_behind_queue(&other(2)));
}

/// I2: fetched KV is of no use for an answer, and a handoff's none for the cache, whatever the caller mistakes.
#[test]
fn a_fetch_and_a_handoff_are_not_confused() {
    let mut to = Rig::new(LIMITS, 60);
    let fetches = fetch(&mut to, 30).unwrap();
    let refused = to.engine.kv_arrived(fetches, &rig::first(0), &mut to.events);
    assert!(matches!(refused, Err(EngineError::WrongState { .. })), "{refused:?}");
    let receives = to.engine.submit(request(Start::Receive, 8, 2)).unwrap();
    to.step();
    assert!(matches!(to.engine.fetched(receives, &[]), Err(EngineError::WrongState { .. })));
    assert_eq!(to.blocks().1, 7 + 2, "both go on");
}
