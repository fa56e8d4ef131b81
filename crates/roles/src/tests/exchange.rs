//! Prefixes that move between workers: what each end does at every input, and that no block is lost or reused too early.

use baton_engine::{Exchange as Prefix, NewSequence, Start, Time};
use baton_handoff::{FenceState, Known, ReceiverEvent, TransferError, TransferStats, TransportKind};
use baton_types::{Epoch, ErrorKind, RequestId, SeqId, WorkerId};

use super::rig::{BLOCK, LEASE, Rig, VOCAB, request};
use crate::exchange::{Answer, Command, Effect, MOST_EXCHANGES};
use crate::prefill::Target;
use crate::{Decode, Input, Loan, Refused, Ticket, decode};

fn rig() -> Rig<Decode> {
    Rig::caching(100, |_| Decode::new(LEASE, VOCAB))
}

/// What a prompt of 9 tokens begins with: two blocks.
fn prefix() -> Box<Prefix> {
    let (request_id, deadline) = (RequestId("r".into()), Time(0).after_ms(500));
    Box::new(Prefix { request_id, tokens: (0..2 * BLOCK + 1).collect(), prefix: Default::default(), deadline })
}

/// A worker that has the prefix.
fn holder() -> Rig<Decode> {
    let mut rig = rig();
    let new = NewSequence { prefix: Some(Default::default()), ..*request(Start::Compute, 2 * BLOCK + 1) };
    rig.input(Input::Command(decode::Command::Generate { ticket: Ticket(1), new: Box::new(new) }));
    while !rig.core.engine().idle() {
        rig.input(Input::Turn);
    }
    rig
}

/// Gives a command and returns what it leads to.
fn give(rig: &mut Rig<Decode>, command: Command) -> Vec<Effect> {
    rig.input(Input::Exchange(command));
    std::mem::take(&mut rig.exchanged)
}

fn fetch(rig: &mut Rig<Decode>) -> Vec<Effect> {
    give(rig, Command::Fetch { ticket: Ticket(7), prefix: prefix() })
}

/// Begins a fetch and returns its loan.
fn lent(rig: &mut Rig<Decode>) -> Loan {
    let effects = fetch(rig);
    let [Effect::Accepted { ticket: Ticket(7), outcome: Ok(seq) }, Effect::Lend(loan)] = &effects[..] else {
        panic!("{effects:?}")
    };
    assert_eq!(loan.seq, *seq);
    loan.clone()
}

fn serve(rig: &mut Rig<Decode>, target: Target) -> Vec<Effect> {
    give(rig, Command::Serve { ticket: Ticket(8), prefix: prefix(), target })
}

fn wanted() -> Target {
    Target { tokens: 2 * BLOCK, first: vec![0, 0] }
}

/// Begins to serve and returns the sequence.
fn served(rig: &mut Rig<Decode>) -> SeqId {
    let effects = serve(rig, wanted());
    let [Effect::Accepted { outcome: Ok(seq), .. }, Effect::Send { seq: sent, pairs, .. }] = &effects[..] else {
        panic!("{effects:?}")
    };
    assert_eq!(seq, sent);
    // The second layer group sees a window of four tokens before the next one: one block.
    let places = |group: usize| pairs[group].iter().map(|(_, place)| *place).collect::<Vec<u32>>();
    assert_eq!((places(0), places(1)), (vec![0, 1], vec![0]));
    *seq
}

fn stats() -> TransferStats {
    TransferStats { bytes: 9, seconds: 0.1, verify_seconds: 0.01, transport: TransportKind::Shm, writes: 4, slices: 2 }
}

fn lost() -> TransferError {
    TransferError::PeerLost { peer: WorkerId(9), cause: "gone".into() }
}

fn verified(epoch: Epoch) -> Command {
    let (tail, transport) = (Vec::new(), TransportKind::Tcp);
    Command::Received(ReceiverEvent::Verified { epoch, tail, bytes: 9, seconds: 0.1, transport, digests: vec![] })
}

#[test]
fn a_fetched_prefix_is_in_the_cache_and_owned_by_nobody() {
    let mut rig = rig();
    let Loan { seq, epoch, tokens, first, blocks, lease } = lent(&mut rig);
    let counts: Vec<usize> = blocks.iter().map(Vec::len).collect();
    assert_eq!((tokens, first, counts, lease), (2 * BLOCK, vec![0, 0], vec![2, 1], LEASE));
    let target = give(&mut rig, Command::Lent { epoch, outcome: Ok(vec![1]) });
    assert_eq!(target, [Effect::Say(seq, Answer::Reserved(vec![1]))]);
    assert!(rig.core.exchange().knows(epoch));
    let done = give(&mut rig, verified(epoch));
    let fetched = Effect::Fetched { transport: TransportKind::Tcp, bytes: 9, tokens: 2 * BLOCK, seconds: 0.1 };
    assert_eq!(done, [Effect::Release(epoch), fetched, Effect::Say(seq, Answer::Fetched(2 * BLOCK))]);
    assert_eq!((rig.blocks().as_str(), rig.core.exchange().streams()), ("0 used 0 lent 0 aside", 0));
    let again = fetch(&mut rig);
    assert!(matches!(&again[..], [Effect::Accepted { outcome: Err(Refused::Engine(_)), .. }]), "{again:?}");
    serve(&mut rig, wanted());
    assert_eq!(rig.blocks(), "3 used 0 lent 0 aside", "it can be served on");
}

/// I3: nobody gets the blocks before the fence is over.
#[test]
fn a_fetch_that_ends_early_is_fenced() {
    for (how, first) in [("cancelled", true), ("expired", true), ("failed", false)] {
        let mut rig = rig();
        let Loan { seq, epoch, .. } = lent(&mut rig);
        give(&mut rig, Command::Lent { epoch, outcome: Ok(vec![1]) });
        let effects = match how {
            "cancelled" => give(&mut rig, Command::Cancel(seq)),
            "expired" => {
                rig.now = Time(0).after_ms(500);
                rig.input(Input::Turn);
                std::mem::take(&mut rig.exchanged)
            }
            _ => {
                let event = ReceiverEvent::Failed { epoch, error: lost(), transport: None };
                give(&mut rig, Command::Received(event))
            }
        };
        assert_eq!(effects.contains(&Effect::Fence(epoch)), first, "{how}: {effects:?}");
        let says = |kind| matches!(&effects[0], Effect::Say(_, Answer::Failed(told, _)) if *told == kind);
        match how {
            "cancelled" => assert_eq!(effects.len(), 1),
            "expired" => assert!(says(ErrorKind::DeadlineExceeded), "{effects:?}"),
            _ => assert!(says(ErrorKind::PathLost), "{effects:?}"),
        }
        assert_eq!(rig.blocks(), "0 used 0 lent 3 aside", "{how}");
        if first {
            give(&mut rig, Command::FenceBegun { epoch, state: FenceState::Pending });
            assert_eq!(rig.blocks(), "0 used 0 lent 3 aside", "{how}: a peer may still write");
            assert_eq!(give(&mut rig, verified(epoch)), [], "{how}: too late");
        }
        assert!(rig.core.exchange().knows(epoch), "{how}");
        give(&mut rig, Command::Received(ReceiverEvent::Fenced { epoch }));
        assert!(!rig.core.exchange().knows(epoch) && rig.core.engine().idle(), "{how}");
    }
}

#[test]
fn what_cannot_be_lent_is_free_at_once() {
    let mut rig = rig();
    let Loan { epoch, .. } = lent(&mut rig);
    let effects = give(&mut rig, Command::Lent { epoch, outcome: Err(TransferError::Closed) });
    assert!(matches!(&effects[..], [Effect::Say(_, Answer::Failed(..))]), "{effects:?}");
    assert!(rig.core.engine().idle());
}

#[test]
fn served_blocks_are_held_until_the_transfer_has_ended() {
    for outcome in [Ok(stats()), Err(lost())] {
        let mut rig = holder();
        let seq = served(&mut rig);
        assert_eq!(rig.blocks(), "3 used 0 lent 0 aside");
        let effects = give(&mut rig, Command::Ended { seq, outcome: outcome.clone(), transport: None });
        match &outcome {
            Ok(stats) => {
                assert_eq!(effects, [Effect::Served(*stats), Effect::Say(seq, Answer::Served(*stats))]);
            }
            Err(error) => {
                assert_eq!(effects[0], Effect::Failed { fetched: false, transport: None, error: error.clone() });
                assert!(matches!(&effects[1..], [Effect::Say(_, Answer::Failed(ErrorKind::PathLost, _))]));
            }
        }
        assert!(rig.core.engine().idle());
    }
}

/// I3: a transfer may read the blocks until it says that it has ended.
#[test]
fn serving_that_ends_early_waits_for_the_transfer() {
    for expires in [false, true] {
        let mut rig = holder();
        let seq = served(&mut rig);
        let effects = match expires {
            false => give(&mut rig, Command::Cancel(seq)),
            true => {
                rig.now = Time(0).after_ms(500);
                rig.input(Input::Turn);
                std::mem::take(&mut rig.exchanged)
            }
        };
        assert_eq!(effects.last(), Some(&Effect::Abort(seq)), "{effects:?}");
        assert!(!rig.core.engine().idle());
        give(&mut rig, Command::Ended { seq, outcome: Err(TransferError::Closed), transport: None });
        assert!(rig.core.engine().idle());
    }
}

#[test]
fn only_what_the_other_worker_lacks_is_sent() {
    let mut rig = holder();
    let effects = serve(&mut rig, Target { tokens: 2 * BLOCK, first: vec![1, 1] });
    let [_, Effect::Send { pairs, .. }] = &effects[..] else { panic!("{effects:?}") };
    let places = |group: usize| pairs[group].iter().map(|(_, place)| *place).collect::<Vec<u32>>();
    assert_eq!((places(0), places(1)), (vec![0], vec![0]));
}

/// I5
#[test]
fn a_worker_takes_part_in_few_exchanges_and_in_none_while_it_drains() {
    let mut rig = holder();
    for _ in 0..MOST_EXCHANGES {
        served(&mut rig);
    }
    let refused = serve(&mut rig, wanted());
    let too_many = Err(Refused::Exchanges { begun: MOST_EXCHANGES });
    assert_eq!(refused, [Effect::Accepted { ticket: Ticket(8), outcome: too_many }]);
    rig.input(Input::Drain);
    for refused in [serve(&mut rig, wanted()), fetch(&mut rig)] {
        assert!(matches!(&refused[..], [Effect::Accepted { outcome: Err(Refused::Draining), .. }]), "{refused:?}");
    }
}

/// I2: what came here is given away with the digests that it came with. If it has changed meanwhile, nobody finds it any more.
#[test]
fn what_came_is_served_by_the_digests_it_came_with() {
    let mut rig = rig();
    let Loan { epoch, blocks, .. } = lent(&mut rig);
    let Command::Received(ReceiverEvent::Verified { epoch, tail, bytes, seconds, transport, .. }) = verified(epoch)
    else {
        panic!("verified")
    };
    let digests = vec![vec![11, 12], vec![21]];
    give(&mut rig, Command::Received(ReceiverEvent::Verified { epoch, tail, bytes, seconds, transport, digests }));
    let effects = serve(&mut rig, Target { tokens: 2 * BLOCK, first: vec![1, 1] });
    let [_, Effect::Send { seq, known, .. }] = &effects[..] else { panic!("{effects:?}") };
    let place = |group: u32, index, block, digest| Known { group, index, block, digest };
    assert_eq!(*known, [place(0, 0, blocks[0][1], 12), place(1, 0, blocks[1][0], 21)]);
    let error = TransferError::Changed { group: 0, block: blocks[0][1], want: 12, got: 13 };
    give(&mut rig, Command::Ended { seq: *seq, outcome: Err(error), transport: None });
    assert!(rig.core.engine().idle());
    let again = serve(&mut rig, wanted());
    assert!(matches!(&again[..], [Effect::Accepted { outcome: Err(Refused::Engine(_)), .. }]), "{again:?}");
    lent(&mut rig);
    // What was computed here has none.
    let mut rig = holder();
    let effects = serve(&mut rig, wanted());
    assert!(matches!(&effects[..], [_, Effect::Send { known, .. }] if known.is_empty()), "{effects:?}");
}
