use std::sync::{Arc, OnceLock};

use baton_types::{KvDtype, KvGroup, KvLayout, PoolGeometry, WorkerId};

use super::super::line::Core;
use super::*;
use crate::heads::HeadSlice;

fn core(now: Instant) -> Arc<Core> {
    Arc::new(Core {
        epoch: Epoch(7),
        key: 1,
        peer: WorkerId(1),
        deadline: now + Duration::from_secs(60),
        counts: vec![1],
        layers: 1,
        heads: vec![HeadSlice::all(1)],
        transport: OnceLock::new(),
        failure: OnceLock::new(),
    })
}

/// Takes up what begins; answers how often access is asked for.
fn begins(outbound: &mut Outbound, line: &mut Line, now: Instant) -> usize {
    outbound.expire(now, line);
    let begin = |effect: &Effect| matches!(effect, Effect::Send(Frame::Begin { .. }));
    outbound.take_effects().iter().filter(|effect| begin(effect)).count()
}

#[test]
fn what_is_granted_to_a_handoff_that_was_given_up_is_not_anothers() {
    let group = KvGroup { layers: vec![0], planes: 2, kv_heads: 1, head_dim: 8, window: None, sinks: 0 };
    let layout = KvLayout { version: 1, model: 1, dtype: KvDtype::F32, block_size: 4, groups: vec![group] };
    let (geometry, limits, now) = (PoolGeometry::uniform(layout, 4), Limits::default(), Instant::now());
    let parties = Parties { me: WorkerId(2), peer: WorkerId(1) };
    let mut outbound = Outbound::new(parties, Pools::alike(geometry), &limits);
    let mut line = Line::new(limits);
    line.begin(core(now)).unwrap();
    assert_eq!(begins(&mut outbound, &mut line, now), 1);
    outbound.abort(Epoch(7), Quiet(None), now, &mut line);

    // The peer may have freed the blocks by the time at which the word of its grant arrives (I3).
    let second = core(now);
    line.begin(second.clone()).unwrap();
    assert_eq!(begins(&mut outbound, &mut line, now), 0);
    let granted = Frame::Granted { epoch: Epoch(7), blocks: vec![vec![BlockId(0)]] };
    outbound.frame(granted.clone(), TransportKind::Shm, now, &mut line).unwrap();
    assert!(matches!(second.failure(), Some(TransferError::Refused { .. })));
    assert_eq!(second.transport(), None);
    outbound.abort(Epoch(7), Quiet(None), now, &mut line);

    // All that was asked is answered.
    let third = core(now);
    line.begin(third.clone()).unwrap();
    assert_eq!(begins(&mut outbound, &mut line, now), 1);
    outbound.frame(granted, TransportKind::Shm, now, &mut line).unwrap();
    assert_eq!((third.failure(), third.transport()), (None, Some(TransportKind::Shm)));
}
