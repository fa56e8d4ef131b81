use std::sync::Arc;
use std::time::Duration;

use baton_types::{BlockId, KvDtype, KvGroup, KvLayout, digest_block};

use super::*;
use crate::heads::HeadSlice;
use crate::receiver::FenceState;
use crate::segment::Segment;

const EPOCH: Epoch = Epoch(1);

/// A session over shared memory whose peer has written all of a handoff, and the frame by which it says so.
fn written(now: Instant) -> (Inbound, Ledger, Frame) {
    let group = KvGroup { layers: vec![0], planes: 2, kv_heads: 1, head_dim: 4, window: None, sinks: 0 };
    let layout = KvLayout { version: 1, model: 1, dtype: KvDtype::F16, block_size: 2, groups: vec![group] };
    let geometry = PoolGeometry::uniform(layout.clone(), 4);
    let pool = Arc::new(Segment::create("test", geometry.bytes()).unwrap());
    let limits = Limits::default();
    let mut ledger = Ledger::new(&geometry, limits.clone());
    let blocks = [vec![BlockId(1), BlockId(2)]];
    ledger.reserve(EPOCH, 7, &blocks, &[HeadSlice::all(1)], now + Duration::from_secs(60)).unwrap();
    let mut session = Inbound::new(1, WorkerId(5), TransportKind::Shm, geometry, &limits);
    let write = WriteHead { epoch: EPOCH, group: 0, layer: 0, payload: 0, indexes: vec![0, 1] };
    for frame in [Frame::Begin { epoch: EPOCH, key: 7 }, Frame::Write(write)] {
        session.frame(frame, now, &mut ledger).unwrap();
    }
    // SAFETY: nobody else has the pool.
    unsafe { session.landed(&mut Reach::Host(pool)) }.unwrap();
    assert!(matches!(session.next_answer(), Some(Frame::Granted { .. })));
    let digest = digest_block(&vec![0; layout.block_bytes(0)], layout.first_lane(0, 0));
    (session, ledger, Frame::Complete { epoch: EPOCH, writes: 2, digests: vec![vec![digest; 2]], tail: vec![] })
}

#[test]
fn a_handoff_that_is_whole_is_announced_on_both_sides() {
    let now = Instant::now();
    let (mut session, mut ledger, complete) = written(now);
    session.frame(complete, now, &mut ledger).unwrap();
    assert!(matches!(ledger.next_event(), Some(ReceiverEvent::Verified { epoch: EPOCH, .. })));
    assert_eq!(session.next_answer(), Some(Frame::Verified { epoch: EPOCH }));
}

#[test]
fn a_handoff_that_was_taken_back_is_not_announced() {
    // I3: its completion is read before the session hears of the fence.
    let now = Instant::now();
    let (mut session, mut ledger, complete) = written(now);
    assert_eq!(ledger.fence(EPOCH), FenceState::Pending);
    session.frame(complete, now, &mut ledger).unwrap();
    assert_eq!((ledger.next_event(), session.next_answer()), (None, None));
    session.fence(EPOCH, &mut ledger);
    assert_eq!(session.next_answer(), Some(Frame::Fence { epoch: EPOCH }));
    session.frame(Frame::FenceAck { epoch: EPOCH }, now, &mut ledger).unwrap();
    assert_eq!(ledger.next_event(), Some(ReceiverEvent::Fenced { epoch: EPOCH }));
}
