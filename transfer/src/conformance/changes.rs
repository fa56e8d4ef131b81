//! A path that is left for another while handoffs overlap.

use super::*;

/// The session that carries handoffs ends with the last of them; who begins meanwhile takes the new path, and waits for that.
#[test]
fn handoffs_that_overlap_change_their_path() {
    let decode = Decode::new(large(), 1);
    let (wrap, is_reached, go) = held(3);
    let prefill = Prefill::faulty(large(), 2, TransportChoice::Auto, wrap);
    let mut first_one = prefill.sender.open(&decode.reserve(1, &first(2)), far()).unwrap();
    let pairs = [(BlockId(0), 0), (BlockId(1), 1)];
    (0..4).for_each(|layer| first_one.write(0, layer, &pairs).unwrap());
    is_reached.recv_timeout(PATIENCE).unwrap();
    prefill.sender.measured(WorkerId(1), TransportKind::Shm, 1);
    prefill.sender.measured(WorkerId(1), TransportKind::Tcp, 1 << 50);
    // One is still being written: what comes next goes with it.
    let second = prefill.send(&decode.reserve(2, &[vec![BlockId(2), BlockId(3)]]), 2);
    (4..8).for_each(|layer| first_one.write(0, layer, &pairs).unwrap());
    let (tell, told) = mpsc::channel();
    first_one.complete(vec![], Box::new(move |outcome| drop(tell.send(outcome))));
    // Nothing has arrived yet, but all is completed.
    let third = prefill.send(&decode.reserve(3, &[vec![BlockId(4), BlockId(5)]]), 4);
    let fourth = prefill.send(&decode.reserve(4, &[vec![BlockId(6), BlockId(7)]]), 6);
    go.send(()).unwrap();
    // The new session's transport is held as well.
    is_reached.recv_timeout(PATIENCE).unwrap();
    go.send(()).unwrap();
    let over = |outcome: Outcome| outcome.wait().unwrap().transport;
    let carried = [over(Outcome(told)), over(second), over(third), over(fourth)];
    assert_eq!(carried, [TransportKind::Shm, TransportKind::Shm, TransportKind::Tcp, TransportKind::Tcp]);
    let verified = |_| match decode.event() {
        ReceiverEvent::Verified { epoch, .. } => epoch.0,
        other => panic!("{other:?}"),
    };
    let mut verified = [(); 4].map(verified);
    verified.sort_unstable();
    assert_eq!(verified, [1, 2, 3, 4]);
}
