//! Whole sessions: a script of frames from a malicious peer, sent to either end.
//!
//! A script is a list of (kind u8, body length u16, body). Frames get valid checksums here, since a malicious peer can compute them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_handoff::{
    Access, Core, Done, Effect, Frame, FrameHead, Inbound, JoinTicket, Ledger, Line, Op, Outbound, PREFIX, Parties,
    PayloadTarget, Pools, Quiet, ReceiverEvent, Refusal, TransferError, TransferLimits, TransportKind, WriteBatch,
    WriteHead, parse_body,
};
use baton_types::{BlockId, Epoch, PoolGeometry, WorkerId, digest_block};

use crate::{blocks, geometry, signature, target};

/// Most frames of a script.
const MOST_FRAMES: usize = 64;

fn script(input: &[u8]) -> impl Iterator<Item = Frame> {
    let mut rest = input;
    std::iter::from_fn(move || {
        loop {
            let (&[kind, low, high], after) = rest.split_first_chunk::<3>()?;
            let (body, after) = after.split_at_checked(usize::from(u16::from_le_bytes([low, high])))?;
            rest = after;
            if let Ok(frame) = parse_body(&FrameHead::matching(kind, body), body) {
                return Some(frame);
            }
        }
    })
    .take(MOST_FRAMES)
}

fn scripted(frames: impl IntoIterator<Item = Frame>) -> Vec<u8> {
    let one = |frame: Frame| {
        let bytes = frame.encode();
        let len = (bytes.len() - PREFIX) as u16;
        [&bytes[4..5], &len.to_le_bytes(), &bytes[PREFIX..]].concat()
    };
    frames.into_iter().flat_map(one).collect()
}

/// One frame of every kind that a decode worker receives, in an order that makes sense.
pub(crate) fn frames_to_decode() -> Vec<Frame> {
    let epoch = Epoch(1);
    let write = |group, layer, payload, indexes| Frame::Write(WriteHead { epoch, group, layer, payload, indexes });
    vec![
        Frame::Begin { epoch, key: 7 },
        write(0, 0, 120, vec![0, 1]),
        write(0, 1, 60, vec![1]),
        Frame::Beat,
        write(0, 1, 60, vec![0]),
        write(1, 0, 20, vec![0]),
        write(1, 1, 20, vec![0]),
        write(1, 2, 20, vec![0]),
        Frame::Complete {
            epoch,
            after: vec![0, 1],
            writes: 7,
            digests: vec![vec![digest(0); 2], vec![digest(1)]],
            tail: b"tail".to_vec(),
        },
        Frame::Begin { epoch: Epoch(2), key: 8 },
        Frame::Abort { epoch: Epoch(2) },
        Frame::FenceAck { epoch: Epoch(3) },
        Frame::Join { ticket: JoinTicket { session: 1, token: 2 }, stream: 3 },
    ]
}

/// The byte that every payload consists of.
const FILL: u8 = 0x5a;

/// Digest of a block of a group, all of whose layers hold `FILL`.
fn digest(group: usize) -> u64 {
    let layout = geometry().layout;
    let bytes = vec![FILL; layout.block_bytes(group)];
    let layers = 0..layout.groups[group].layers.len();
    layers.fold(0, |sum, layer| sum.wrapping_add(digest_block(&bytes, layout.first_lane(group, layer))))
}

/// One frame of every kind that a prefill worker receives.
pub(crate) fn frames_to_prefill() -> Vec<Frame> {
    let epoch = Epoch(1);
    let failed = |refusal| Frame::Failed { epoch: Epoch(2), refusal };
    vec![
        Frame::Welcome { blocks: vec![8, 12], ticket: None },
        Frame::Access(Access { base: 4096, bytes: 8192, worker: b"where".to_vec(), key: b"right".to_vec() }),
        Frame::Granted { epoch, blocks: blocks(0..2) },
        Frame::Granted { epoch: Epoch(2), blocks: blocks(2..4) },
        Frame::Beat,
        failed(Refusal::NoReservation("gone".into())),
        failed(Refusal::BadWrite("twice".into())),
        failed(Refusal::Incomplete { written: 1, expected: 2 }),
        failed(Refusal::Verify { group: 0, index: 1, block: BlockId(2), want: 3, got: 4 }),
        Frame::Verified { epoch },
        Frame::Fence { epoch },
        Frame::Reject { reason: "full".into() },
        Frame::Joined,
    ]
}

pub(crate) fn decode_seeds() -> Vec<Vec<u8>> {
    let frames = frames_to_decode();
    vec![
        [vec![0], scripted(frames.clone())].concat(),
        [vec![1], scripted(frames.clone().into_iter().map(without_payload))].concat(),
        [vec![2], scripted(frames.clone().into_iter().rev())].concat(),
        [vec![4], scripted(frames.clone())].concat(),
        [vec![4], scripted(frames.into_iter().rev())].concat(),
    ]
}

/// A frame as sent over shared memory: a write without payload.
fn without_payload(frame: Frame) -> Frame {
    match frame {
        Frame::Write(head) => Frame::Write(WriteHead { payload: 0, ..head }),
        other => other,
    }
}

pub(crate) fn prefill_seeds() -> Vec<Vec<u8>> {
    // The first two, Welcome and Access, belong to opening the connection.
    let frames = frames_to_prefill().split_off(2);
    let honest = [frames[0].clone(), frames[1].clone(), frames[7].clone()];
    vec![scripted(frames.clone()), scripted(honest), scripted(frames.into_iter().rev())]
}

/// Runs a decode worker with two reservations: epoch 1 with key 7, and epoch 2 with key 8. Whatever the peer sends, each ends at
/// most once, no byte goes elsewhere, and a handoff verified over TCP has arrived whole.
pub(crate) fn decode(input: &[u8]) -> u64 {
    let Some((&first, input)) = input.split_first() else { return 0 };
    let kind = if first % 2 == 0 { TransportKind::Tcp } else { TransportKind::Shm };
    let (geometry, limits, start) = (geometry(), TransferLimits::default(), Instant::now());
    let pool = vec![0; geometry.bytes()];
    let mut ledger = Ledger::new(&geometry, limits.clone());
    for (epoch, key) in [(1, 7), (2, 8)] {
        let reserved = ledger.reserve(Epoch(epoch), key, &lent(epoch), start + Duration::from_secs(60));
        assert_eq!(reserved, Ok(()));
    }
    let session = Inbound::new(1, WorkerId(5), kind, geometry.clone(), &limits);
    // Over TCP blocks may come over several connections, in the order of each.
    let streams = if kind == TransportKind::Tcp && first & 4 != 0 { STREAMS } else { 1 };
    let mut arriving = Arriving { session, pool, heads: Default::default() };
    let mut outcome = Vec::new();
    for frame in script(input) {
        let write = if let Frame::Write(head) = &frame { Some(head.clone()) } else { None };
        let stream = write.as_ref().map_or(0, |head| usize::from(head.layer) % streams);
        arriving.payload(stream);
        let taken = arriving.due(start, &mut ledger);
        let taken = taken.and_then(|()| arriving.session.frame(stream, frame, start, &mut ledger));
        arriving.heads[stream] = write;
        if let Err(error) = taken {
            outcome.push(error.to_string());
            break;
        }
        if stream == 0 {
            arriving.payload(stream);
        }
        if first & 2 != 0 {
            arriving.session.fence(Epoch(1), &mut ledger);
        }
        while let Some(answer) = arriving.session.next_answer() {
            outcome.push(format!("{answer:?}"));
        }
    }
    (0..STREAMS).for_each(|stream| arriving.payload(stream));
    outcome.extend(arriving.due(start, &mut ledger).err().map(|error| error.to_string()));
    end(&mut arriving.session, &mut ledger, &arriving.pool, kind, &mut outcome);
    signature(&outcome)
}

/// Most connections of a session that an input uses.
const STREAMS: usize = 3;

/// A session, and the pool that its payload goes to.
struct Arriving {
    session: Inbound,
    pool: Vec<u8>,
    /// The last write of each connection, if its last frame was one.
    heads: [Option<WriteHead>; STREAMS],
}

impl Arriving {
    /// Delivers the rest of a connection's last write.
    fn payload(&mut self, stream: usize) {
        while let Some(payload) = self.session.payload(stream) {
            let count = match payload.target() {
                PayloadTarget::Nowhere(bytes) => bytes,
                PayloadTarget::Pool(ranges) => {
                    let ((offset, len), write) = (ranges[0], &self.heads[stream]);
                    // I3
                    let inside = write.as_ref().is_some_and(|head| is_lent(&geometry(), head, offset..offset + len));
                    assert!(inside, "{len} bytes at {offset} for {write:?}");
                    self.pool[offset..][..len].fill(FILL);
                    len
                }
            };
            payload.advance(count);
            let landed = self.session.landed(stream, &mut self.pool);
            assert_eq!(landed, Ok(()));
        }
    }

    /// Handles the completions that waited for writes which have now arrived.
    fn due(&mut self, now: Instant, ledger: &mut Ledger) -> Result<(), TransferError> {
        while let Some(frame) = self.session.next_due() {
            self.session.frame(0, frame, now, ledger)?;
        }
        Ok(())
    }
}

/// Ends a session whose connection and peer are gone. Every reservation has ended at most once, and none is held any more.
fn end(session: &mut Inbound, ledger: &mut Ledger, pool: &[u8], kind: TransportKind, outcome: &mut Vec<String>) {
    let error = TransferError::Closed;
    session.lost(ledger, &error);
    session.severed(ledger, &error);
    let mut ends = [0; 2];
    while let Some(event) = ledger.next_event() {
        outcome.push(format!("{event:?}"));
        match event {
            ReceiverEvent::Verified { epoch, .. } => {
                ends[epoch.0 as usize - 1] += 1;
                ledger.release(epoch);
                let arrived = kind != TransportKind::Tcp || is_filled(pool, &lent(epoch.0));
                assert!(arrived, "{outcome:?}"); // I2
            }
            ReceiverEvent::Failed { epoch, .. } => ends[epoch.0 as usize - 1] += 1,
            ReceiverEvent::Fenced { .. } => {}
        }
    }
    assert!(ends.iter().all(|n| *n <= 1), "{outcome:?}");
    assert!(!session.holds_any(ledger));
}

fn is_filled(pool: &[u8], blocks: &[Vec<BlockId>]) -> bool {
    let geometry = &geometry();
    blocks.iter().enumerate().all(|(group, list)| {
        let layers = 0..geometry.layout.groups[group].layers.len();
        let mut ranges =
            layers.flat_map(|layer| list.iter().map(move |block| geometry.block_range(group, layer, *block)));
        ranges.all(|range| pool[range].iter().all(|byte| *byte == FILL))
    })
}

/// Blocks lent under epoch 1 or 2: two of group 0 and one of group 1.
fn lent(epoch: u64) -> Vec<Vec<BlockId>> {
    let first = (epoch as u32 - 1) * 2;
    blocks(first..first + 2)
}

/// Whether all these bytes lie, in the write's layer, in blocks that the write names and that are lent under its epoch.
fn is_lent(geometry: &PoolGeometry, head: &WriteHead, mut bytes: std::ops::Range<usize>) -> bool {
    let (group, lent) = (usize::from(head.group), lent(head.epoch.0));
    let named: Vec<_> = head.indexes.iter().filter_map(|index| lent.get(group)?.get(*index as usize)).collect();
    while !bytes.is_empty() {
        let mut ranges = named.iter().map(|block| geometry.block_range(group, usize::from(head.layer), **block));
        let Some(range) = ranges.find(|range| range.contains(&bytes.start)) else { return false };
        bytes.start = range.end.min(bytes.end);
    }
    true
}

/// Runs a prefill worker with two handoffs in flight. Whatever the peer sends, each is reported once, and no batch writes outside
/// the granted blocks.
pub(crate) fn prefill(input: &[u8]) -> u64 {
    let (geometry, limits, start) = (geometry(), TransferLimits::default(), Instant::now());
    let mut pool = vec![0; geometry.bytes()];
    let mut line = Line::new(limits.clone());
    let mut session = Outbound::new(Parties { me: WorkerId(1), peer: WorkerId(2) }, Pools::alike(geometry), &limits);
    let reports = Arc::new(std::sync::Mutex::new(Vec::new()));
    for epoch in [1, 2] {
        let core = Core::new(
            &baton_handoff::Descriptor { epoch: Epoch(epoch), ..target([2, 1]) },
            start + Duration::from_secs(60),
        );
        assert_eq!(line.begin(Arc::new(core)), Ok(()));
        for (group, layers, count) in [(0, 2, 2), (1, 3, 1)] {
            for layer in 0..layers {
                let pairs = (0..count).map(|i| (BlockId(i), i)).collect();
                line.write(Op::Write { epoch: Epoch(epoch), group, layer, pairs, after: 0 });
            }
        }
        let told = reports.clone();
        let done = Done::new(Box::new(move |outcome| {
            told.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((epoch, outcome.is_ok()));
        }));
        assert!(line.complete(Epoch(epoch), vec![], done).is_ok());
    }
    let (mut outcome, mut granted) = (Vec::new(), BTreeMap::new());
    session.expire(start, &mut line);
    for frame in std::iter::once(Frame::Beat).chain(script(input)) {
        if let Frame::Granted { epoch, blocks } = &frame {
            granted.entry(*epoch).or_insert_with(|| blocks.clone());
        }
        if let Err(error) = session.frame(frame, TransportKind::Tcp, start, &mut line) {
            outcome.push(error.to_string());
            break;
        }
        loop {
            let batch = session.next_batch(Some(&mut pool), start);
            if let Ok(Some(batch)) = &batch {
                assert!(is_granted(batch, granted.get(&batch.epoch)), "{batch:?}, granted {granted:?}"); // I3
            }
            let more = matches!(batch, Ok(Some(_))) || session.next_op(start, &mut line);
            session.flushed(Vec::new());
            outcome.extend(carry_out(&mut session));
            if !more {
                break;
            }
        }
    }
    session.end_all(&TransferError::Closed, start, &mut line);
    outcome.extend(carry_out(&mut session));
    session.abort(Epoch(1), Quiet(None), start, &mut line);
    session.abort(Epoch(2), Quiet(None), start, &mut line);
    outcome.extend(carry_out(&mut session));
    drop(line);
    let mut told = reports.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
    told.sort_unstable();
    assert_eq!(told.iter().map(|(epoch, _)| *epoch).collect::<Vec<_>>(), [1, 2], "{told:?}");
    signature(&(outcome, told))
}

/// Whether each block of a batch goes from the block it was queued with to the block that the first grant of its epoch names.
fn is_granted(batch: &WriteBatch, granted: Option<&Vec<Vec<BlockId>>>) -> bool {
    let geometry = geometry();
    let start = |block| geometry.block_range(batch.group, batch.layer, block).start;
    batch.writes.iter().all(|write| {
        let target = granted.and_then(|granted| granted.get(batch.group)?.get(write.index as usize));
        target.is_some_and(|block| write.target == start(*block)) && write.source == start(BlockId(write.index))
    })
}

fn carry_out(session: &mut Outbound) -> Vec<String> {
    let effects = session.take_effects();
    effects
        .into_iter()
        .map(|effect| match effect {
            Effect::Cancel(epoch) => format!("cancel {epoch}"),
            Effect::Send(frame) => format!("{frame:?}"),
            Effect::Report(done, result) => {
                let text = format!("{:?}", result.as_ref().map(|_| ()));
                done.report(result);
                text
            }
            Effect::Hush(quiet) => {
                drop(quiet);
                "quiet".into()
            }
        })
        .collect()
}
