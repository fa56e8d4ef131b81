//! A sender leaves a path for another while handoffs overlap.

use super::*;

/// The session ends with the last handoff it carries. Handoffs begun meanwhile take the new path, and wait for that end.
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
    // One handoff is still being written, so the next one takes the same session.
    let second = prefill.send(&decode.reserve(2, &[vec![BlockId(2), BlockId(3)]]), 2);
    (4..8).for_each(|layer| first_one.write(0, layer, &pairs).unwrap());
    let (tell, told) = mpsc::channel();
    first_one.complete(vec![], Box::new(move |outcome| drop(tell.send(outcome))));
    // Nothing has arrived yet, but every handoff is completed.
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

/// A transport that takes batches, of which none ever arrives.
struct Swallowing(Box<dyn Transport>);

impl Transport for Swallowing {
    fn kind(&self) -> TransportKind {
        self.0.kind()
    }
    fn submit(&mut self, _: Load, _: &mut Links) -> Result<(), TransferError> {
        Ok(())
    }
    fn poll(&mut self, _: &mut Links) -> Result<Progress, TransferError> {
        Ok(Progress::Blocked)
    }
    fn cancel(&mut self, _: Epoch, _: &mut Links) -> Result<(), TransferError> {
        Ok(())
    }
}

/// I5: both ends hear each other all the while, so neither counts as silent.
#[test]
fn a_path_on_which_nothing_arrives_is_left() {
    let decode = Decode::limited(large(), 1, "127.0.0.1:0", alert());
    let wrap: Wrap = Arc::new(|inner| match inner.kind() {
        TransportKind::Shm => Box::new(Swallowing(inner)),
        _ => inner,
    });
    let prefill = Prefill::limited(large(), 2, TransportChoice::Auto, wrap, alert());
    let error = prefill.send(&decode.reserve(1, &first(2)), 0).wait().unwrap_err();
    assert!(matches!(&error, TransferError::PeerLost { cause, .. } if cause.contains("arrives no more")), "{error}");
    decode.expect_failed(1);
    decode.expect_fenced(1);
    let stats = prefill.send(&decode.reserve(2, &[vec![BlockId(2), BlockId(3)]]), 0).wait().unwrap();
    assert_eq!(stats.transport, TransportKind::Tcp);
    decode.expect_verified(2);
}
