//! Peers that stop or die, as real processes with real signals.

use baton_types::hex;

use super::children::Process;
use super::*;
use crate::FenceState;

for_each_transport![
    a_killed_prefill_worker_gives_the_blocks_back,
    a_stopped_prefill_worker_is_fenced_only_with_proof,
    a_killed_decode_worker_is_an_error,
    a_silent_prefill_worker_is_noticed,
    a_silent_decode_worker_is_noticed,
    an_idle_writer_is_not_silent,
    a_stopped_decode_worker_completes_nothing,
    a_stopped_decode_worker_learns_late_that_it_is_let_go_of,
    a_decode_worker_that_never_grants_is_given_up,
    a_writer_does_not_wait_for_a_stopped_decode_worker,
];

fn prefill_child(choice: TransportChoice) -> Process {
    Process::start(&format!("prefill {}", kind(choice).as_str()))
}

fn blocks(count: u32) -> Vec<Vec<BlockId>> {
    vec![(0..count).map(BlockId).collect()]
}

fn a_killed_prefill_worker_gives_the_blocks_back(choice: TransportChoice) {
    let decode = Decode::new(large(), 1);
    let mut child = prefill_child(choice);
    child.say(&hex::encode(&decode.reserve(1, &blocks(32))));
    assert_eq!(child.hear(), "writing");
    child.kill();
    let error = decode.expect_failed(1);
    assert!(matches!(error, TransferError::PeerLost { .. }), "{error}");
    decode.expect_fenced(1);
    // The same blocks serve the next attempt.
    let prefill = Prefill::new(large(), 2, choice);
    prefill.send(&decode.reserve(2, &blocks(32)), 0).wait().unwrap();
    decode.expect_verified(2);
}

fn a_stopped_prefill_worker_is_fenced_only_with_proof(choice: TransportChoice) {
    let decode = Decode::new(large(), 1);
    let mut child = prefill_child(choice);
    child.say(&hex::encode(&decode.reserve(1, &blocks(32))));
    assert_eq!(child.hear(), "writing");
    child.freeze();
    assert_eq!(decode.receiver.fence(Epoch(1)), FenceState::Pending);
    if choice == TransportChoice::Tcp {
        decode.expect_fenced(1);
        return;
    }
    // I3: it may go on copying at any moment. So other handoffs go by, but these blocks stay aside.
    let prefill = Prefill::new(large(), 2, choice);
    prefill.send(&decode.reserve(2, &[vec![BlockId(40)]]), 0).wait().unwrap();
    decode.expect_verified(2);
    assert_eq!(decode.receiver.fence(Epoch(1)), FenceState::Pending);
    assert!(matches!(decode.try_reserve(3, &blocks(1), PATIENCE), Err(TransferError::Lent { epoch: Epoch(1), .. })));
    child.thaw();
    child.say("go on");
    decode.expect_fenced(1);
    assert!(child.hear().contains("Fenced"));
}

/// A child that has written all layers but the last, and is alive.
fn idle_child(decode: &Decode, choice: TransportChoice, epoch: u64) -> Process {
    let mut child = Process::start(&format!("idle {}", kind(choice).as_str()));
    child.say(&hex::encode(&decode.reserve(epoch, &blocks(4))));
    assert_eq!(child.hear(), "written");
    child
}

fn a_silent_prefill_worker_is_noticed(choice: TransportChoice) {
    // I5: noticed long before its lease ends.
    let decode = Decode::limited(large(), 1, "127.0.0.1:0", alert());
    let child = idle_child(&decode, choice, 1);
    child.freeze();
    let error = decode.expect_failed(1);
    assert!(matches!(error, TransferError::Stalled { .. }), "{error}");
    if choice != TransportChoice::Tcp {
        // I3: it may wake up and go on copying. So its blocks stay aside until it has said that it stopped.
        assert_eq!(decode.receiver.fence(Epoch(1)), FenceState::Pending);
        assert!(matches!(decode.try_reserve(2, &blocks(1), PATIENCE), Err(TransferError::Lent { .. })));
        child.thaw();
    }
    decode.expect_fenced(1);
    decode.reserve(3, &blocks(4));
}

fn a_silent_decode_worker_is_noticed(choice: TransportChoice) {
    let mut child = Process::start("alert decode");
    let (reached, is_reached) = mpsc::channel();
    let wrap = watched(move |_| reached.send(()).unwrap_or_default());
    let prefill = Prefill::limited(large(), 2, choice, wrap, alert());
    child.say("4");
    let mut handoff = prefill.sender.open(&hex::decode(&child.hear()).unwrap(), far()).unwrap();
    handoff.write(0, 0, &[(BlockId(0), 0)]).unwrap();
    is_reached.recv_timeout(PATIENCE).unwrap();
    child.freeze();
    let (tell, told) = mpsc::channel();
    while handoff.failure().is_none() {
        std::thread::yield_now();
    }
    handoff.complete(vec![], Box::new(move |outcome| tell.send(outcome).unwrap()));
    let error = told.recv_timeout(PATIENCE).unwrap().unwrap_err();
    assert!(matches!(error, TransferError::Stalled { .. }), "{error}");
    child.thaw();
    // It hears that the handoff was aborted, or has noticed the silence itself. Either way its blocks are back.
    let told = child.hear();
    assert!(told.starts_with("failed"), "{told}");
    child.say("1");
    prefill.send(&hex::decode(&child.hear()).unwrap(), 0).wait().unwrap();
    assert_eq!(child.hear(), "verified");
}

fn an_idle_writer_is_not_silent(choice: TransportChoice) {
    let decode = Decode::limited(large(), 1, "127.0.0.1:0", alert());
    let mut child = idle_child(&decode, choice, 1);
    // Its engine computes for longer than silence may last.
    assert!(decode.events.recv_timeout(alert().silence * 3 / 2).is_err(), "nothing happens to it");
    child.say("go on");
    assert!(child.hear().starts_with("Ok"));
    decode.expect_verified(1);
}

fn a_killed_decode_worker_is_an_error(choice: TransportChoice) {
    let mut child = Process::start("decode");
    let (wrap, is_reached, go) = held(3);
    let prefill = Prefill::faulty(large(), 2, choice, wrap);
    child.say("32");
    let outcome = prefill.send(&hex::decode(&child.hear()).unwrap(), 0);
    is_reached.recv_timeout(PATIENCE).unwrap();
    child.kill();
    go.send(()).unwrap();
    let error = outcome.wait().unwrap_err();
    assert!(matches!(error, TransferError::PeerLost { .. }), "{error}");
}

fn a_stopped_decode_worker_completes_nothing(choice: TransportChoice) {
    let mut child = Process::start("decode");
    let (wrap, is_reached, go) = held(1);
    let prefill = Prefill::faulty(large(), 2, choice, wrap);
    child.say("1");
    let target = hex::decode(&child.hear()).unwrap();
    // It is let in. Then the decode worker stops, and everything sent fits the socket's buffers.
    let outcome = prefill.send_until(&target, 0, Instant::now() + Duration::from_secs(2));
    is_reached.recv_timeout(PATIENCE).unwrap();
    child.freeze();
    go.send(()).unwrap();
    let error = outcome.wait().unwrap_err();
    assert!(matches!(error, TransferError::Deadline { .. }), "sent is not complete: {error}");
    child.thaw();
    // Either its completion was sent before the deadline, or its abort arrives. In both cases the worker goes on serving.
    // Over UCX, puts cannot be taken back, so the session ends and the receiver cuts it off.
    let first = child.hear();
    let lost = choice == TransportChoice::Ucx && first.contains("lost w2");
    assert!(first == "verified" || first.contains("aborted") || lost, "{first}");
    child.say("1");
    let target = hex::decode(&child.hear()).unwrap();
    if lost {
        // The next session's first batch is held too.
        go.send(()).unwrap();
    }
    // A handoff begun while the session is ending ends with it.
    while let Err(error) = prefill.send(&target, 0).wait() {
        assert!(lost && matches!(error, TransferError::PeerLost { .. }), "{error}");
    }
    assert_eq!(child.hear(), "verified");
}

fn a_stopped_decode_worker_learns_late_that_it_is_let_go_of(choice: TransportChoice) {
    let mut child = Process::start("decode");
    let (reached, is_reached) = mpsc::channel();
    let (go, may_go) = mpsc::channel();
    let may_go = Arc::new(std::sync::Mutex::new(may_go));
    let crash = watched(move |batch| {
        if batch == 2 {
            reached.send(()).unwrap();
            may_go.lock().unwrap().recv_timeout(PATIENCE).unwrap();
            panic!("a defect in a transport");
        }
    });
    let prefill = Prefill::faulty(large(), 2, choice, crash);
    child.say("8");
    let outcome = prefill.send(&hex::decode(&child.hear()).unwrap(), 0);
    is_reached.recv_timeout(PATIENCE).unwrap();
    child.freeze();
    go.send(()).unwrap();
    // Told at once: nobody waits for the decode worker.
    assert!(matches!(outcome.wait(), Err(TransferError::Os { .. })));
    child.thaw();
    assert!(child.hear().starts_with("failed"));
    // I6: it has its blocks back, although no new session has come.
    child.say("8");
    assert!(!child.hear().is_empty());
}

/// A sender with a queue of a few blocks and a short wait for room.
fn impatient(choice: TransportChoice, wrap: Wrap) -> Prefill {
    let limits = TransferLimits { queued_blocks: 8, room: Duration::from_millis(50), ..TransferLimits::default() };
    Prefill::limited(large(), 2, choice, wrap, limits)
}

/// Writes all layers but the last, 8 blocks at a time, until a write is refused.
fn write_until_refused(handoff: &mut crate::Handoff) -> TransferError {
    let indexes: Vec<u32> = (0..handoff.block_counts()[0]).collect();
    let parts = (0..7).flat_map(|layer| indexes.chunks(8).map(move |part| (layer, part)));
    let refused = parts.map(|(layer, part)| {
        let pairs: Vec<_> = part.iter().map(|&i| (BlockId(i), i)).collect();
        handoff.write(0, layer, &pairs)
    });
    refused.filter_map(Result::err).next().expect("a refused write")
}

#[track_caller]
fn give_up(handoff: crate::Handoff) {
    let (quiet, is_quiet) = mpsc::channel();
    handoff.abort(Box::new(move || quiet.send(()).unwrap()));
    is_quiet.recv_timeout(PATIENCE).unwrap();
}

/// A stopped decode worker. Before, it has served one handoff and was asked for `count` blocks.
fn stands_still(prefill: &Prefill, count: u32) -> (Process, Vec<u8>) {
    let mut child = Process::start("decode");
    child.say("1");
    prefill.send(&hex::decode(&child.hear()).unwrap(), 0).wait().unwrap();
    assert_eq!(child.hear(), "verified");
    child.say(&count.to_string());
    let target = hex::decode(&child.hear()).unwrap();
    child.freeze();
    (child, target)
}

/// Lets it go on. It learns of the abort, has its blocks back, and goes on serving.
fn moves_again(prefill: &Prefill, mut child: Process) {
    child.thaw();
    let told = child.hear();
    assert!(told.contains("aborted"), "{told}");
    child.say("1");
    prefill.send(&hex::decode(&child.hear()).unwrap(), 0).wait().unwrap();
    assert_eq!(child.hear(), "verified");
}

fn a_decode_worker_that_never_grants_is_given_up(choice: TransportChoice) {
    // I5: given up long before the handoff's deadline.
    let prefill = Prefill::new(large(), 2, choice);
    let (child, target) = stands_still(&prefill, 1);
    let error = prefill.send(&target, 0).wait().unwrap_err();
    assert!(matches!(error, TransferError::Stalled { .. }), "{error}");
    moves_again(&prefill, child);
}

fn a_writer_does_not_wait_for_a_stopped_decode_worker(choice: TransportChoice) {
    let prefill = impatient(choice, Arc::new(|transport| transport));
    let (child, target) = stands_still(&prefill, 32);
    let mut handoff = prefill.sender.open(&target, far()).unwrap();
    let error = write_until_refused(&mut handoff);
    assert!(matches!(error, TransferError::Stalled { .. }), "{error}");
    give_up(handoff);
    moves_again(&prefill, child);
}

/// Only over TCP: over shared memory a decode worker holds nobody up once it has let them in.
#[test]
fn a_writer_does_not_wait_for_a_decode_worker_that_stops_reading() {
    let mut child = Process::start("decode");
    let (wrap, is_reached, go) = held(2);
    let prefill = impatient(TransportChoice::Tcp, wrap);
    child.say("60");
    let mut handoff = prefill.sender.open(&hex::decode(&child.hear()).unwrap(), far()).unwrap();
    handoff.write(0, 7, &(0..8).map(|i| (BlockId(i), i)).collect::<Vec<_>>()).unwrap();
    is_reached.recv_timeout(PATIENCE).unwrap();
    child.freeze();
    go.send(()).unwrap();
    let error = write_until_refused(&mut handoff);
    assert!(matches!(error, TransferError::Stalled { .. }), "{error}");
    give_up(handoff);
    moves_again(&prefill, child);
}

#[test]
fn nothing_is_left_behind() {
    assert_eq!(Process::start("leaks").hear(), "clean");
}
