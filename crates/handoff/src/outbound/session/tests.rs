use std::sync::{Arc, mpsc};
use std::time::Duration;

use baton_types::WorkerId;

use super::super::core::{Core, Known};
use super::*;
use crate::testing;

fn core(epoch: u64, now: Instant) -> Arc<Core> {
    testing::core(Epoch(epoch), now + Duration::from_secs(60))
}

/// A session with nothing under way.
fn session() -> (Outbound, Line) {
    let (geometry, limits) = (testing::geometry(), TransferLimits::default());
    let parties = Parties { me: WorkerId(2), peer: WorkerId(1) };
    (Outbound::new(parties, Pools::alike(geometry), &limits), Line::new(limits))
}

/// Takes up handoffs that begin; returns how often access was asked for.
fn begins(outbound: &mut Outbound, line: &mut Line, now: Instant) -> usize {
    outbound.expire(now, line);
    let begin = |effect: &Effect| matches!(effect, Effect::Send(Frame::Begin { .. }));
    outbound.take_effects().iter().filter(|effect| begin(effect)).count()
}

fn granted(epoch: u64) -> Frame {
    Frame::Granted { epoch: Epoch(epoch), blocks: vec![vec![BlockId(0)]] }
}

/// Reports outcomes as the real session does.
fn report(outbound: &mut Outbound) {
    for effect in outbound.take_effects() {
        if let Effect::Report(done, outcome) = effect {
            done.report(outcome);
        }
    }
}

/// Completes handoff 7, which has access; returns the channel that receives its outcome.
fn complete(
    outbound: &mut Outbound,
    line: &mut Line,
    now: Instant,
) -> mpsc::Receiver<Result<TransferStats, TransferError>> {
    let (tell, told) = mpsc::channel();
    let done = Done::new(Box::new(move |outcome| drop(tell.send(outcome))));
    assert!(line.complete(Epoch(7), Vec::new(), done).is_ok());
    assert!(outbound.next_op(now, line));
    told
}

#[test]
fn what_is_granted_to_a_handoff_that_was_given_up_is_not_anothers() {
    let (now, (mut outbound, mut line)) = (Instant::now(), session());
    line.begin(core(7, now)).unwrap();
    assert_eq!(begins(&mut outbound, &mut line, now), 1);
    outbound.abort(Epoch(7), Quiet(None), now, &mut line);

    // The peer may have freed the blocks by the time its grant arrives (I3).
    let second = core(7, now);
    line.begin(second.clone()).unwrap();
    assert_eq!(begins(&mut outbound, &mut line, now), 0);
    outbound.frame(granted(7), TransportKind::Shm, now, &mut line).unwrap();
    assert!(matches!(second.failure(), Some(TransferError::Refused { .. })));
    assert_eq!(second.transport(), None);
    outbound.abort(Epoch(7), Quiet(None), now, &mut line);

    // Every request for access is answered now.
    let third = core(7, now);
    line.begin(third.clone()).unwrap();
    assert_eq!(begins(&mut outbound, &mut line, now), 1);
    outbound.frame(granted(7), TransportKind::Shm, now, &mut line).unwrap();
    assert_eq!((third.failure(), third.transport()), (None, Some(TransportKind::Shm)));
}

#[test]
fn a_peer_owes_only_so_many_answers_before_no_more_is_asked() {
    // I5: the peer grants nothing, and handoffs are given up as fast as they begin.
    let (now, (mut outbound, mut line)) = (Instant::now(), session());
    let most = MOST_OWED as u64;
    for epoch in 0..most {
        line.begin(core(epoch, now)).unwrap();
        assert_eq!(begins(&mut outbound, &mut line, now), 1, "{epoch}");
        outbound.abort(Epoch(epoch), Quiet(None), now, &mut line);
    }
    let next = |epoch, outbound: &mut Outbound, line: &mut Line| {
        let core = core(epoch, now);
        line.begin(core.clone()).unwrap();
        (begins(outbound, line, now), matches!(core.failure(), Some(TransferError::Refused { .. })))
    };
    assert_eq!(next(most, &mut outbound, &mut line), (0, true));
    assert_eq!(outbound.owed.len(), MOST_OWED);
    outbound.frame(granted(3), TransportKind::Shm, now, &mut line).unwrap();
    assert_eq!(next(most + 1, &mut outbound, &mut line), (1, false), "one was answered");
}

#[test]
fn the_verification_of_a_handoff_that_was_given_up_says_nothing_of_the_next_under_its_epoch() {
    let (now, (mut outbound, mut line)) = (Instant::now(), session());
    let verified = || Frame::Verified { epoch: Epoch(7) };
    line.begin(core(7, now)).unwrap();
    begins(&mut outbound, &mut line, now);
    outbound.frame(granted(7), TransportKind::Shm, now, &mut line).unwrap();
    let told = complete(&mut outbound, &mut line, now);
    outbound.expire(now + Duration::from_secs(61), &mut line);
    report(&mut outbound);
    assert!(told.recv().unwrap().is_err(), "its time is over");

    // The late verification does not end the session when the next handoff is over already,
    let late = core(7, now - Duration::from_secs(61));
    line.begin(late.clone()).unwrap();
    outbound.expire(now, &mut line);
    assert!(late.failure().is_some());
    outbound.frame(verified(), TransportKind::Shm, now, &mut line).unwrap();
    outbound.abort(Epoch(7), Quiet(None), now, &mut line);
    outbound
        .frame(
            Frame::Failed { epoch: Epoch(7), refusal: Refusal::NoReservation("over".into()) },
            TransportKind::Shm,
            now,
            &mut line,
        )
        .unwrap();
    outbound.take_effects();

    // nor when the next one still waits for its own answers.
    let second = core(7, now);
    line.begin(second.clone()).unwrap();
    assert_eq!(begins(&mut outbound, &mut line, now), 1);
    outbound.frame(verified(), TransportKind::Shm, now, &mut line).unwrap();
    assert_eq!((second.failure(), second.transport()), (None, None));
    outbound.frame(granted(7), TransportKind::Shm, now, &mut line).unwrap();
    // A peer that keeps to the protocol does not verify a handoff before it is completed.
    assert!(outbound.frame(verified(), TransportKind::Shm, now, &mut line).is_err());
    let told = complete(&mut outbound, &mut line, now);
    outbound.frame(verified(), TransportKind::Shm, now, &mut line).unwrap();
    report(&mut outbound);
    assert!(told.recv().unwrap().is_ok());
}

#[test]
fn what_the_peer_takes_to_verify_is_counted_from_the_completion() {
    let (now, (mut outbound, mut line)) = (Instant::now(), session());
    line.begin(core(7, now)).unwrap();
    begins(&mut outbound, &mut line, now);
    outbound.frame(granted(7), TransportKind::Shm, now, &mut line).unwrap();
    let told = complete(&mut outbound, &mut line, now + Duration::from_secs(2));
    outbound
        .frame(Frame::Verified { epoch: Epoch(7) }, TransportKind::Shm, now + Duration::from_secs(3), &mut line)
        .unwrap();
    report(&mut outbound);
    let stats = told.recv().unwrap().unwrap();
    assert_eq!((stats.seconds, stats.verify_seconds), (3.0, 1.0));
}

/// I2: other bytes left than came here. The peer is told that it is over, and nothing that it could verify.
#[test]
fn what_has_changed_since_it_came_is_not_completed() {
    for (digest, fails) in [(0, false), (5, true)] {
        let (now, (mut outbound, mut line)) = (Instant::now(), session());
        let handoff = core(7, now);
        handoff.knows(vec![Known { group: 0, index: 0, block: BlockId(3), digest }]);
        line.begin(handoff).unwrap();
        begins(&mut outbound, &mut line, now);
        outbound.frame(granted(7), TransportKind::Shm, now, &mut line).unwrap();
        // Nothing was written, so that the digests add up to nothing.
        let told = complete(&mut outbound, &mut line, now);
        let effects = outbound.take_effects();
        let says = |said: fn(&Frame) -> bool| effects.iter().any(|e| matches!(e, Effect::Send(frame) if said(frame)));
        assert_eq!(says(|frame| matches!(frame, Frame::Complete { .. })), !fails);
        assert_eq!(says(|frame| matches!(frame, Frame::Abort { .. })), fails);
        for effect in effects {
            if let Effect::Report(done, outcome) = effect {
                done.report(outcome);
            }
        }
        let changed = TransferError::Changed { group: 0, block: BlockId(3), want: 5, got: 0 };
        assert_eq!(told.try_recv().ok(), fails.then_some(Err(changed)));
    }
}
