//! Peers that stop or die: real processes, real signals.

use super::children::Process;
use super::*;
use crate::FenceState;
use crate::bench::hex;

for_each_transport![
    a_killed_prefill_worker_gives_the_blocks_back,
    a_stopped_prefill_worker_is_fenced_only_with_proof,
    a_killed_decode_worker_is_an_error,
    a_stopped_decode_worker_completes_nothing,
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
    // I3: it may go on copying at any moment, so other handoffs go by but these blocks stay aside.
    let prefill = Prefill::new(large(), 2, choice);
    prefill.send(&decode.reserve(2, &[vec![BlockId(40)]]), 0).wait().unwrap();
    decode.expect_verified(2);
    assert_eq!(decode.receiver.fence(Epoch(1)), FenceState::Pending);
    assert!(matches!(
        decode.receiver.reserve(Epoch(3), &blocks(1), 1, PATIENCE),
        Err(TransferError::Lent { epoch: Epoch(1), .. })
    ));
    child.thaw();
    child.say("go on");
    decode.expect_fenced(1);
    assert!(child.hear().contains("Fenced"));
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
    // It was let in; then the decode worker stops, and everything sent fits the socket's buffers.
    let outcome = prefill.send_until(&target, 0, Instant::now() + Duration::from_secs(2));
    is_reached.recv_timeout(PATIENCE).unwrap();
    child.freeze();
    go.send(()).unwrap();
    let error = outcome.wait().unwrap_err();
    assert!(matches!(error, TransferError::Deadline { .. }), "sent is not complete: {error}");
    child.thaw();
    // Its completion had been sent before the deadline, or its abort arrived; either way it goes on serving.
    let first = child.hear();
    assert!(first == "verified" || first.contains("aborted"), "{first}");
    child.say("1");
    let target = hex::decode(&child.hear()).unwrap();
    prefill.send(&target, 0).wait().unwrap();
    assert_eq!(child.hear(), "verified");
}

#[test]
fn nothing_is_left_behind() {
    assert_eq!(Process::start("leaks").hear(), "clean");
}
