//! Handoffs and sessions that end before they are complete: aborted, fenced, late, crashed, refused.

use super::*;
use crate::FenceState;
use baton_handoff::{Frame, PREFIX};

for_each_transport![
    an_abort_gives_the_blocks_back,
    after_a_fence_not_a_byte_changes,
    a_handoff_without_end_misses_its_deadline,
    a_crashed_session_is_over_once_it_has_unmapped,
    a_session_the_receiver_ends_gives_back,
    a_frame_that_changed_on_its_way_ends_the_session,
    a_dropped_sender_reports_and_gives_back,
    an_idle_session_is_closed_and_the_next_handoff_begins_another,
];

fn write_all(prefill: &Prefill, target: &[u8]) -> crate::Handoff {
    let mut handoff = prefill.sender.open(target, far()).unwrap();
    let pairs: Vec<_> = (0..handoff.block_counts()[0]).map(|i| (BlockId(i), i)).collect();
    for layer in 0..8 {
        handoff.write(0, layer, &pairs).unwrap();
    }
    handoff
}

fn an_abort_gives_the_blocks_back(choice: TransportChoice) {
    let decode = Decode::new(large(), 1);
    let (wrap, is_reached, go) = held(3);
    let prefill = Prefill::faulty(large(), 2, choice, wrap);
    let handoff = write_all(&prefill, &decode.reserve(1, &first(32)));
    is_reached.recv_timeout(PATIENCE).unwrap();
    let (quiet, is_quiet) = mpsc::channel();
    handoff.abort(Box::new(move || quiet.send(()).unwrap()));
    assert!(is_quiet.try_recv().is_err(), "a batch is being copied");
    go.send(()).unwrap();
    is_quiet.recv_timeout(PATIENCE).unwrap();
    assert_eq!(decode.expect_failed(1), TransferError::Aborted { epoch: Epoch(1) });
    decode.expect_fenced(1);
    // The session goes on, with the same blocks on both sides.
    prefill.send(&decode.reserve(2, &first(32)), 0).wait().unwrap();
    decode.expect_verified(2);
}

fn after_a_fence_not_a_byte_changes(choice: TransportChoice) {
    // I3
    let decode = Decode::new(large(), 1);
    let (wrap, is_reached, go) = held(5);
    let prefill = Prefill::faulty(large(), 2, choice, wrap);
    let handoff = write_all(&prefill, &decode.reserve(1, &first(48)));
    is_reached.recv_timeout(PATIENCE).unwrap();
    assert_eq!(decode.receiver.fence(Epoch(1)), FenceState::Pending);
    match choice {
        // The receiver applies writes itself, so it does not need the peer's acknowledgement.
        TransportChoice::Tcp => decode.expect_fenced(1),
        _ => assert_eq!(decode.receiver.fence(Epoch(1)), FenceState::Pending, "asking again changes nothing"),
    }
    let now: Vec<_> = (0..48).map(|id| block(&decode.pool, &decode.geometry, 0, BlockId(id))).collect();
    go.send(()).unwrap();
    let fenced = if kind(choice).is_one_sided() {
        decode.expect_fenced(1);
        (0..48).map(|id| block(&decode.pool, &decode.geometry, 0, BlockId(id))).collect()
    } else {
        now
    };
    assert_eq!(decode.receiver.fence(Epoch(1)), FenceState::Clear);
    let (tell, told) = mpsc::channel();
    handoff.complete(vec![], Box::new(move |outcome| tell.send(outcome).unwrap()));
    let error = told.recv_timeout(PATIENCE).unwrap().unwrap_err();
    assert!(matches!(error, TransferError::Fenced { epoch: Epoch(1), .. }), "{error}");
    // Once a later handoff of the same session is verified, everything the peer still had to send has arrived.
    let later = vec![(48..56).map(BlockId).collect()];
    prefill.send(&decode.reserve(2, &later), 0).wait().unwrap();
    decode.expect_verified(2);
    for (id, bytes) in fenced.iter().enumerate() {
        assert!(block(&decode.pool, &decode.geometry, 0, BlockId(id as u32)) == *bytes, "block {id} changed");
    }
}

fn a_handoff_without_end_misses_its_deadline(choice: TransportChoice) {
    let decode = Decode::new(large(), 1);
    let prefill = Prefill::new(large(), 2, choice);
    // Makes sure that there is a session: while it is being set up, nobody can tell the decode side.
    prefill.send(&decode.reserve(1, &first(2)), 0).wait().unwrap();
    decode.expect_verified(1);
    decode.receiver.release(Epoch(1));
    let deadline = Instant::now() + Duration::from_millis(100);
    let mut handoff = prefill.sender.open(&decode.reserve(2, &first(2)), deadline).unwrap();
    let _ = handoff.write(0, 0, &[(BlockId(0), 0)]);
    // The handoff's owner does nothing more. The decode side is told at the deadline.
    assert_eq!(decode.expect_failed(2), TransferError::Aborted { epoch: Epoch(2) });
    decode.expect_fenced(2);
    let error = handoff.write(0, 1, &[(BlockId(0), 0)]).unwrap_err();
    assert!(matches!(error, TransferError::Deadline { epoch: Epoch(2), .. }), "{error}");
}

/// Delays, when dropped, the drop of what comes after it, until told to go on.
struct Held(Arc<std::sync::Mutex<mpsc::Receiver<()>>>);

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.0.lock().unwrap().recv_timeout(PATIENCE);
    }
}

fn a_crashed_session_is_over_once_it_has_unmapped(choice: TransportChoice) {
    let decode = Decode::new(large(), 1);
    let (go, may_go) = mpsc::channel();
    let may_go = Arc::new(std::sync::Mutex::new(may_go));
    let crash = before_each(move || {
        let unmapping = Held(may_go.clone());
        move |batch: usize, _: &mut WriteBatch, _: &mut Link| {
            let _ = &unmapping;
            assert_ne!(batch, 2, "a defect in a transport");
        }
    });
    let prefill = Prefill::faulty(large(), 2, choice, crash);
    let outcome = prefill.send(&decode.reserve(1, &first(8)), 0);
    assert!(matches!(decode.expect_failed(1), TransferError::PeerLost { .. }));
    if kind(choice).is_one_sided() {
        // I3: the connection is gone, but the mapping is not.
        assert_eq!(decode.receiver.fence(Epoch(1)), FenceState::Pending);
    }
    go.send(()).unwrap();
    // This needs no further handoff, and the process lives on.
    decode.expect_fenced(1);
    let error = outcome.wait().unwrap_err();
    assert!(matches!(error, TransferError::Closed | TransferError::Os { .. }), "{error}");
}

/// The receiver's error when a sender sends these bytes at its third batch.
fn babble(choice: TransportChoice, words: Vec<u8>) -> (TransferError, Decode) {
    let decode = Decode::new(large(), 1);
    let babble = before_each(move || {
        let words = words.clone();
        move |batch: usize, _: &mut WriteBatch, link: &mut Link| {
            if batch == 3 {
                link.push_bytes(words.clone());
            }
        }
    });
    let prefill = Prefill::faulty(large(), 2, choice, babble);
    let outcome = prefill.send(&decode.reserve(1, &first(8)), 0);
    let error = decode.expect_failed(1);
    // The sender's process lives on and has nothing more to send. Its blocks come back all the same.
    decode.expect_fenced(1);
    assert!(matches!(outcome.wait(), Err(TransferError::PeerLost { .. })));
    (error, decode)
}

fn a_session_the_receiver_ends_gives_back(choice: TransportChoice) {
    let (error, decode) = babble(choice, Frame::Welcome { blocks: vec![], ticket: None }.encode());
    assert!(matches!(error, TransferError::Protocol { .. }), "{error}");
    assert_eq!(decode.receiver.stats().verify_failures, 0);
}

fn a_frame_that_changed_on_its_way_ends_the_session(choice: TransportChoice) {
    // I2: the changed byte is in the length, the kind, the check or the body.
    for at in [0, 2, 4, 8, PREFIX] {
        let mut words = Frame::Abort { epoch: Epoch(7) }.encode();
        words[at] ^= 1;
        let (error, decode) = babble(choice, words);
        assert!(matches!(error, TransferError::Corrupt { .. }), "byte {at}: {error}");
        assert_eq!(decode.receiver.stats().verify_failures, 1);
    }
}

fn a_dropped_sender_reports_and_gives_back(choice: TransportChoice) {
    let decode = Decode::new(large(), 1);
    let (wrap, is_reached, go) = held(2);
    let prefill = Prefill::faulty(large(), 2, choice, wrap);
    let writing = write_all(&prefill, &decode.reserve(1, &first(32)));
    is_reached.recv_timeout(PATIENCE).unwrap();
    let waiting = prefill.sender.open(&decode.reserve(2, &[(32..34).map(BlockId).collect()]), far()).unwrap();
    let dropped = std::thread::spawn(move || drop(prefill));
    go.send(()).unwrap();
    dropped.join().unwrap();
    decode.expect_failed(1);
    decode.expect_fenced(1);
    let (tell, told) = mpsc::channel();
    writing.complete(vec![], Box::new(move |outcome| tell.send(outcome).unwrap()));
    assert_eq!(told.recv_timeout(PATIENCE).unwrap(), Err(TransferError::Closed));
    let (quiet, is_quiet) = mpsc::channel();
    waiting.abort(Box::new(move || quiet.send(()).unwrap()));
    is_quiet.recv_timeout(PATIENCE).unwrap();
}

/// Waits until a decode worker has so many sessions.
fn until_sessions(decode: &Decode, wanted: usize) {
    let late = Instant::now() + PATIENCE;
    while decode.receiver.stats().sessions != wanted {
        assert!(Instant::now() < late, "{} sessions, {wanted} expected", decode.receiver.stats().sessions);
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn an_idle_session_is_closed_and_the_next_handoff_begins_another(choice: TransportChoice) {
    let decode = Decode::new(large(), 1);
    let limits = TransferLimits { idle: Duration::from_millis(300), ..patient() };
    let prefill = Prefill::limited(large(), 2, choice, Arc::new(|inner| inner), limits);
    for epoch in 1..4 {
        prefill.send(&decode.reserve(epoch, &first(32)), 0).wait().unwrap();
        decode.expect_verified(epoch);
        decode.receiver.release(Epoch(epoch));
        assert_eq!(decode.receiver.stats().sessions, 1, "it is kept for a while");
        until_sessions(&decode, 0);
    }
    // The peer knows that nobody writes to it any more.
    decode.reserve(4, &first(32));
    assert_eq!(decode.receiver.fence(Epoch(4)), FenceState::Clear);
}

/// Names of this process's threads for a worker that KV is sent to.
#[cfg(test)]
fn threads_for(worker: WorkerId) -> Vec<String> {
    let names = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = names.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    // The system keeps 15 bytes of a name.
    let wanted = ["kv-out", "kv-dial"].map(|kind| format!("{kind}-{worker}").chars().take(15).collect::<String>());
    names.map(|name| name.trim().to_owned()).filter(|name| wanted.contains(name)).collect()
}

/// However many connections a session has, and however often one follows the other, a pair has one thread here while it is open, and at most
/// three between two sessions: the last one's, the next one's, and that which connects.
#[cfg(test)]
#[test]
fn threads_of_a_pair_are_few_however_often_its_session_ends() {
    let worker = WorkerId(0xabc);
    for (choice, connections) in [(TransportChoice::Shm, 1), (TransportChoice::Tcp, 8)] {
        with_connections(connections, || {
            let decode = Decode::new(large(), worker.0);
            let limits = TransferLimits { idle: Duration::from_millis(20), ..patient() };
            let prefill = Prefill::limited(large(), 2, choice, Arc::new(|inner| inner), limits);
            for epoch in 1..30 {
                let handoff = prefill.send(&decode.reserve(epoch, &first(32)), 0);
                assert!(threads_for(worker).len() <= 3, "{:?}", threads_for(worker));
                handoff.wait().unwrap();
                decode.expect_verified(epoch);
                decode.receiver.release(Epoch(epoch));
                let open = threads_for(worker);
                assert!(open.len() <= 1, "{open:?}");
                if epoch % 3 == 0 {
                    until_sessions(&decode, 0);
                }
            }
            drop(prefill);
            assert_eq!(threads_for(worker), [""; 0]);
        });
    }
}

#[cfg(test)]
#[test]
fn the_last_place_for_a_session_costs_the_one_used_least_recently() {
    let limits = TransferLimits { connections: 3, ..patient() };
    let prefill = Prefill::limited(large(), 9, TransportChoice::Tcp, Arc::new(|inner| inner), limits);
    let decodes: Vec<Decode> = (1..6).map(|worker| Decode::new(large(), worker)).collect();
    let mut epoch = 0;
    let mut send = |decode: &Decode| {
        epoch += 1;
        prefill.send(&decode.reserve(epoch, &first(8)), 0).wait().unwrap();
        decode.expect_verified(epoch);
        decode.receiver.release(Epoch(epoch));
    };
    let sessions = || decodes.iter().map(|decode| decode.receiver.stats().sessions).collect::<Vec<_>>();
    send(&decodes[0]);
    send(&decodes[1]);
    send(&decodes[0]);
    send(&decodes[2]);
    until_sessions(&decodes[1], 0);
    assert_eq!(sessions(), [1, 0, 1, 0, 0]);
    for (next, leaves) in [(3, 0), (4, 2), (1, 3), (0, 4)] {
        send(&decodes[next]);
        until_sessions(&decodes[leaves], 0);
        assert_eq!(sessions().iter().sum::<usize>(), 2);
    }
    // Sessions in use are not closed, and beyond the limit a handoff fails.
    let open = |decode: &Decode, epoch: u64| prefill.sender.open(&decode.reserve(epoch, &first(8)), far());
    let held: Vec<_> = [(0, 100), (1, 101), (2, 102)].map(|(at, epoch)| open(&decodes[at], epoch)).into();
    assert!(
        held.iter().all(Result::is_ok),
        "{:?}",
        held.iter().filter_map(|held| held.as_ref().err()).collect::<Vec<_>>()
    );
    assert!(matches!(open(&decodes[3], 103), Err(TransferError::Limit { limit: 3, .. })));
}
