use std::collections::VecDeque;
use std::time::Duration;

use baton_types::testing::{Random, seed, with_seeds};
use baton_types::{BlockId, KvDtype, KvGroup, KvLayout, digest_block};

use super::*;
use crate::inbound::{FenceState, PayloadTarget};

const EPOCH: Epoch = Epoch(1);

/// A session over shared memory whose peer has written all of a handoff, and the handoff's Complete frame.
fn written(now: Instant) -> (Inbound, Ledger, Frame) {
    let group = KvGroup { layers: vec![0], planes: 2, kv_heads: 1, head_dim: 4, window: None, sinks: 0 };
    let layout = KvLayout { version: 1, model: 1, dtype: KvDtype::F16, block_size: 2, groups: vec![group] };
    let geometry = PoolGeometry::uniform(layout.clone(), 4);
    let mut pool = vec![0; geometry.bytes()];
    let limits = TransferLimits::default();
    let mut ledger = Ledger::new(&geometry, limits.clone());
    let blocks = [vec![BlockId(1), BlockId(2)]];
    ledger.reserve(EPOCH, 7, &blocks, now + Duration::from_secs(60)).unwrap();
    let mut session = Inbound::new(1, WorkerId(5), TransportKind::Shm, geometry, &limits);
    let write = WriteHead { epoch: EPOCH, group: 0, layer: 0, payload: 0, indexes: vec![0, 1] };
    for frame in [Frame::Begin { epoch: EPOCH, key: 7 }, Frame::Write(write)] {
        session.frame(0, frame, now, &mut ledger).unwrap();
    }
    session.landed(0, &mut pool).unwrap();
    assert!(matches!(session.next_answer(), Some(Frame::Granted { .. })));
    let digest = digest_block(&vec![0; layout.block_bytes(0)], layout.first_lane(0, 0));
    (
        session,
        ledger,
        Frame::Complete { epoch: EPOCH, after: vec![], writes: 2, digests: vec![vec![digest; 2]], tail: vec![] },
    )
}

#[test]
fn a_handoff_that_is_whole_is_announced_on_both_sides() {
    let now = Instant::now();
    let (mut session, mut ledger, complete) = written(now);
    session.frame(0, complete, now, &mut ledger).unwrap();
    assert!(matches!(ledger.next_event(), Some(ReceiverEvent::Verified { epoch: EPOCH, .. })));
    assert_eq!(session.next_answer(), Some(Frame::Verified { epoch: EPOCH }));
}

#[test]
fn a_handoff_that_was_taken_back_is_not_announced() {
    // I3: the completion is read before the session hears of the fence.
    let now = Instant::now();
    let (mut session, mut ledger, complete) = written(now);
    assert_eq!(ledger.fence(EPOCH), FenceState::Pending);
    session.frame(0, complete, now, &mut ledger).unwrap();
    assert_eq!((ledger.next_event(), session.next_answer()), (None, None));
    session.fence(EPOCH, &mut ledger);
    assert_eq!(session.next_answer(), Some(Frame::Fence { epoch: EPOCH }));
    session.frame(0, Frame::FenceAck { epoch: EPOCH }, now, &mut ledger).unwrap();
    assert_eq!(ledger.next_event(), Some(ReceiverEvent::Fenced { epoch: EPOCH }));
}

const STREAMS: usize = 3;
const HANDOFFS: u64 = 4;

/// Frames that have yet to arrive, each with the byte that fills its payload.
type Queues = [VecDeque<(Frame, u8)>; STREAMS];

/// A session over TCP with several connections. Each connection keeps its order; between them, frames and payload arrive in any order.
/// Tracks by itself, without the ledger, which blocks may be written to.
struct Crossing {
    random: Random,
    session: Inbound,
    ledger: Ledger,
    pool: Vec<u8>,
    geometry: PoolGeometry,
    queues: Queues,
    /// The byte that fills each connection's payload under way.
    fills: [u8; STREAMS],
    /// Epochs whose blocks their owner has not got back.
    lent: Vec<u64>,
    verified: Vec<u64>,
    now: Instant,
}

impl Crossing {
    fn new(seed: u64) -> Crossing {
        let group = KvGroup { layers: vec![0, 1], planes: 2, kv_heads: 1, head_dim: 4, window: None, sinks: 0 };
        let layout = KvLayout { version: 1, model: 1, dtype: KvDtype::F16, block_size: 2, groups: vec![group] };
        let (geometry, now) = (PoolGeometry::uniform(layout, 2 * HANDOFFS as u32), Instant::now());
        let (limits, pool) = (TransferLimits::default(), vec![0; geometry.bytes()]);
        let mut ledger = Ledger::new(&geometry, limits.clone());
        let mut session = Inbound::new(1, WorkerId(5), TransportKind::Tcp, geometry.clone(), &limits);
        for epoch in 1..=HANDOFFS {
            let soon = now + Duration::from_secs(60);
            ledger.reserve(Epoch(epoch), 7, &[blocks(epoch)], soon).unwrap();
            session.frame(0, Frame::Begin { epoch: Epoch(epoch), key: 7 }, now, &mut ledger).unwrap();
        }
        let (queues, fills, lent) = (Queues::default(), [0; STREAMS], (1..=HANDOFFS).collect());
        let random = Random(seed);
        Crossing { random, session, ledger, pool, geometry, queues, fills, lent, verified: vec![], now }
    }

    /// Digest of a block as it was sent: all its bytes are the number of its epoch.
    fn digest(&self, epoch: u64) -> u64 {
        let layout = &self.geometry.layout;
        let of = |layer| digest_block(&vec![epoch as u8; layout.block_bytes(0)], layout.first_lane(0, layer));
        of(0).wrapping_add(of(1))
    }

    /// Queues every frame of the peer's handoffs on random connections. Returns the epochs that must be verified.
    fn say(&mut self) -> Vec<u64> {
        let (mut whole, mut counts) = ((1..=HANDOFFS).collect::<Vec<_>>(), [0; STREAMS]);
        for epoch in 1..=HANDOFFS {
            for part in 0..4 {
                let (layer, indexes) = (part / 2, vec![u32::from(part % 2)]);
                let payload = self.geometry.layout.block_bytes(0) as u32;
                let head = WriteHead { epoch: Epoch(epoch), group: 0, layer, payload, indexes };
                let (stream, fate) = (self.random.index(STREAMS), self.random.index(40));
                // Lost, sent twice, changed, or intact.
                let (times, fill) =
                    ([0, 2, 1].get(fate).copied().unwrap_or(1), if fate == 2 { 99 } else { epoch as u8 });
                counts[stream] += times;
                (0..times).for_each(|_| self.queues[stream].push_back((Frame::Write(head.clone()), fill)));
                if fate <= 2 {
                    whole.retain(|of| *of != epoch);
                }
            }
            let epoch = Epoch(epoch);
            let digests = vec![vec![self.digest(epoch.0); 2]];
            let after = counts[1..].to_vec();
            let complete = Frame::Complete { epoch, after, writes: 4, digests, tail: vec![] };
            if self.random.index(8) > 0 {
                self.queues[0].push_back((complete, 0));
            } else {
                self.queues[0].push_back((Frame::Abort { epoch }, 0));
                whole.retain(|of| *of != epoch.0);
            }
        }
        whole
    }

    /// Delivers a frame, or some payload, on a connection.
    fn arrive(&mut self, stream: usize) {
        if self.session.payload(stream).is_none() {
            let Some((frame, fill)) = self.queues[stream].pop_front() else { return };
            self.fills[stream] = fill;
            self.session.frame(stream, frame, self.now, &mut self.ledger).unwrap();
            return;
        }
        let payload = self.session.payload(stream).unwrap();
        let (count, target) = match payload.target() {
            PayloadTarget::Nowhere(bytes) => (bytes.min(1 + self.random.index(16)), None),
            PayloadTarget::Pool(ranges) => (ranges[0].1.min(1 + self.random.index(16)), Some(ranges[0].0)),
        };
        payload.advance(count);
        if let Some(at) = target {
            let each = self.geometry.layout.block_bytes(0);
            let block = (at / each) as u64 % (2 * HANDOFFS);
            // I3: its blocks are lent. I2: it is not verified yet.
            let epoch = block / 2 + 1;
            assert!(self.lent.contains(&epoch) && !self.verified.contains(&epoch), "{at} of {epoch} is written to");
            self.pool[at..][..count].fill(self.fills[stream]);
        }
        self.session.landed(stream, &mut self.pool).unwrap();
        while let Some(complete) = self.session.next_due() {
            self.session.frame(0, complete, self.now, &mut self.ledger).unwrap();
        }
    }

    /// Takes in the events for the blocks' owner.
    fn look(&mut self) {
        while let Some(event) = self.ledger.next_event() {
            match event {
                ReceiverEvent::Verified { epoch, .. } => {
                    for block in blocks(epoch.0) {
                        for layer in 0..2 {
                            let range = self.geometry.block_range(0, layer, block);
                            assert!(self.pool[range].iter().all(|byte| *byte == epoch.0 as u8), "{epoch} is verified"); // I2
                        }
                    }
                    self.verified.push(epoch.0);
                }
                ReceiverEvent::Failed { .. } => {}
                ReceiverEvent::Fenced { epoch } => self.lent.retain(|of| *of != epoch.0),
            }
        }
    }

    /// The owner takes its blocks back.
    fn fence(&mut self, epoch: u64) {
        if self.ledger.fence(Epoch(epoch)) == FenceState::Clear {
            self.lent.retain(|of| *of != epoch);
        }
        for (_, epoch) in self.ledger.take_fences() {
            self.session.fence(epoch, &mut self.ledger);
        }
    }
}

fn blocks(epoch: u64) -> Vec<BlockId> {
    [2 * epoch - 2, 2 * epoch - 1].map(|block| BlockId(block as u32)).into()
}

#[test]
fn whatever_order_connections_deliver_in_only_what_is_whole_is_verified_and_what_is_given_back_stays_untouched() {
    let mut ends = [0; 2];
    with_seeds(0..3000, |seed| {
        let mut crossing = Crossing::new(seed);
        let mut whole = crossing.say();
        let fenced = crossing.random.index(3 * HANDOFFS as usize) as u64;
        let mut left = 200 + crossing.random.index(400);
        while crossing.queues.iter().any(|queue| !queue.is_empty())
            || (0..STREAMS).any(|stream| crossing.session.payload(stream).is_some())
        {
            let stream = crossing.random.index(STREAMS);
            crossing.arrive(stream);
            crossing.look();
            left = left.saturating_sub(1);
            if left == 150 && (1..=HANDOFFS).contains(&fenced) && !crossing.verified.contains(&fenced) {
                crossing.fence(fenced);
                crossing.look();
                whole.retain(|of| *of != fenced);
            }
        }
        crossing.verified.sort_unstable();
        assert_eq!(crossing.verified, whole);
        ends[0] += whole.len();
        ends[1] += HANDOFFS as usize - whole.len();
    });
    let enough = |count: &usize| *count > 1000;
    assert!(seed().is_some() || ends.iter().all(enough), "{ends:?} verified and not");
}
