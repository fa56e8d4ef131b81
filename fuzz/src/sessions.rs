//! Whole sessions: a script of frames, as a peer gone mad would send them, to either end.
//!
//! A script is a list of (kind u8, body length u16, body); its frames are sealed here, since a peer gone mad can hash.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_transfer::protocol::{
    Core, Done, Effect, Frame, FrameHead, HeadSlice, Inbound, Ledger, Line, Op, Outbound, PREFIX, Parties, Pools,
    Quiet, Refusal, Target, WriteHead, parse_body,
};
use baton_transfer::{Limits, ReceiverEvent, Segment, TransferError, TransportKind};
use baton_types::{BlockId, Epoch, PoolGeometry, WorkerId, digest_block};

use crate::{blocks, geometry, signature, target};

/// Frames of a script at most.
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

/// One of every kind that a decode worker gets, in an order that makes sense.
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
            writes: 7,
            digests: vec![vec![digest(0); 2], vec![digest(1)]],
            tail: b"tail".to_vec(),
        },
        Frame::Begin { epoch: Epoch(2), key: 8 },
        Frame::Abort { epoch: Epoch(2) },
        Frame::FenceAck { epoch: Epoch(3) },
    ]
}

/// What every payload is made of.
const FILL: u8 = 0x5a;

/// Of a block of a group, all of whose layers were filled.
fn digest(group: usize) -> u64 {
    let layout = geometry().layout;
    let bytes = vec![FILL; layout.block_bytes(group)];
    let layers = 0..layout.groups[group].layers.len();
    layers.fold(0, |sum, layer| sum.wrapping_add(digest_block(&bytes, layout.first_lane(group, layer))))
}

/// One of every kind that a prefill worker gets.
pub(crate) fn frames_to_prefill() -> Vec<Frame> {
    let epoch = Epoch(1);
    let failed = |refusal| Frame::Failed { epoch: Epoch(2), refusal };
    vec![
        Frame::Welcome { blocks: vec![8, 12] },
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
    ]
}

pub(crate) fn decode_seeds() -> Vec<Vec<u8>> {
    let frames = frames_to_decode();
    vec![
        [vec![0], scripted(frames.clone())].concat(),
        [vec![1], scripted(frames.clone().into_iter().map(without_payload))].concat(),
        [vec![2], scripted(frames.into_iter().rev())].concat(),
    ]
}

/// As over shared memory.
fn without_payload(frame: Frame) -> Frame {
    match frame {
        Frame::Write(head) => Frame::Write(WriteHead { payload: 0, ..head }),
        other => other,
    }
}

pub(crate) fn prefill_seeds() -> Vec<Vec<u8>> {
    let frames = frames_to_prefill();
    let honest = [frames[1].clone(), frames[2].clone(), frames[8].clone()];
    vec![scripted(frames.clone().into_iter().skip(1)), scripted(honest), scripted(frames.into_iter().skip(1).rev())]
}

/// A decode worker with two reservations, (1, key 7) and (2, key 8). Whatever the peer says, each ends once, no byte goes
/// elsewhere, and what is verified over TCP has arrived whole.
pub(crate) fn decode(input: &[u8]) -> u64 {
    let Some((&first, input)) = input.split_first() else { return 0 };
    let kind = if first % 2 == 0 { TransportKind::Tcp } else { TransportKind::Shm };
    let (geometry, limits, start) = (geometry(), Limits::default(), Instant::now());
    let Ok(pool) = Segment::create("fuzz", geometry.bytes()) else { return 0 };
    let mut ledger = Ledger::new(&geometry, limits.clone());
    let heads = [3, 1].map(|count| HeadSlice { source: 0, target: 0, count });
    for (epoch, key, range) in [(1, 7, 0..2), (2, 8, 2..4)] {
        let reserved = ledger.reserve(Epoch(epoch), key, &blocks(range), &heads, start + Duration::from_secs(60));
        assert_eq!(reserved, Ok(()));
    }
    let mut session = Inbound::new(1, WorkerId(5), kind, geometry.clone(), &limits);
    let mut outcome = Vec::new();
    for frame in script(input) {
        if let Err(error) = session.frame(frame, start, &mut ledger) {
            outcome.push(error.to_string());
            break;
        }
        while let Some(payload) = session.payload() {
            let count = match payload.target() {
                Target::Nowhere(bytes) => bytes,
                Target::Pool(ranges) => {
                    let (offset, len) = ranges[0];
                    // I3: only blocks 0 to 3 of group 0, 0 and 2 of group 1 are lent, in whichever layer.
                    assert!(lent(&geometry, offset, len), "{len} bytes at {offset}");
                    // SAFETY: nobody else has the pool.
                    unsafe { pool.write(offset, &vec![FILL; len]) };
                    len
                }
            };
            payload.advance(count);
            // SAFETY: nobody else has the pool.
            unsafe { session.landed(&pool) };
        }
        if first & 2 != 0 {
            session.fence(Epoch(1), &mut ledger);
        }
        while let Some(answer) = session.next_answer() {
            outcome.push(format!("{answer:?}"));
        }
    }
    end(&mut session, &mut ledger, &pool, kind, &mut outcome);
    signature(&outcome)
}

/// The connection and the peer are gone: every reservation has ended at most once, and none is held any more.
fn end(session: &mut Inbound, ledger: &mut Ledger, pool: &Segment, kind: TransportKind, outcome: &mut Vec<String>) {
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
                let first = (epoch.0 as u32 - 1) * 2;
                let arrived = kind != TransportKind::Tcp || is_filled(pool, &blocks(first..first + 2));
                assert!(arrived, "{outcome:?}"); // I2
            }
            ReceiverEvent::Failed { epoch, .. } => ends[epoch.0 as usize - 1] += 1,
            ReceiverEvent::Fenced { .. } => {}
        }
    }
    assert!(ends.iter().all(|n| *n <= 1), "{outcome:?}");
    assert!(!session.holds_any(ledger));
}

fn is_filled(pool: &Segment, blocks: &[Vec<BlockId>]) -> bool {
    let geometry = &geometry();
    blocks.iter().enumerate().all(|(group, list)| {
        let layers = 0..geometry.layout.groups[group].layers.len();
        let mut ranges =
            layers.flat_map(|layer| list.iter().map(move |block| geometry.block_range(group, layer, *block)));
        // SAFETY: nobody else has the pool.
        ranges.all(|range| unsafe { pool.read(range.start, range.len()) }.iter().all(|byte| *byte == FILL))
    })
}

fn lent(geometry: &PoolGeometry, offset: usize, len: usize) -> bool {
    let inside = |group: usize, block: u32| {
        (0..geometry.layout.groups[group].layers.len()).any(|layer| {
            let range = geometry.block_range(group, layer, BlockId(block));
            range.contains(&offset) && offset + len <= range.end + range.len()
        })
    };
    (0..4).any(|block| inside(0, block)) || inside(1, 0) || inside(1, 2)
}

/// A prefill worker with two handoffs under way. Whatever the peer says, each is reported once, and no batch goes outside
/// what was granted.
pub(crate) fn prefill(input: &[u8]) -> u64 {
    let (geometry, limits, start) = (geometry(), Limits::default(), Instant::now());
    let Ok(pool) = Segment::create("fuzz", geometry.bytes()) else { return 0 };
    let mut line = Line::new(limits.clone());
    let mut session = Outbound::new(Parties { me: WorkerId(1), peer: WorkerId(2) }, Pools::alike(geometry), &limits);
    let reports = Arc::new(std::sync::Mutex::new(Vec::new()));
    for epoch in [1, 2] {
        let core = Core::new(
            &baton_transfer::protocol::Descriptor { epoch: Epoch(epoch), ..target([2, 1]) },
            start + Duration::from_secs(60),
        );
        assert_eq!(line.begin(Arc::new(core)), Ok(()));
        for (group, layers, count) in [(0, 2, 2), (1, 3, 1)] {
            for layer in 0..layers {
                let pairs = (0..count).map(|i| (BlockId(i), i)).collect();
                line.write(Op::Write { epoch: Epoch(epoch), group, layer, pairs });
            }
        }
        let told = reports.clone();
        let done = Done::new(Box::new(move |outcome| {
            told.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((epoch, outcome.is_ok()));
        }));
        assert!(line.complete(Epoch(epoch), vec![], done).is_ok());
    }
    let mut outcome = Vec::new();
    session.expire(start, &mut line);
    for frame in std::iter::once(Frame::Beat).chain(script(input)) {
        if let Err(error) = session.frame(frame, TransportKind::Tcp, start, &mut line) {
            outcome.push(error.to_string());
            break;
        }
        loop {
            let batch = session.next_batch(&pool, false, start);
            if let Ok(Some(batch)) = &batch {
                assert!(batch.writes.iter().all(|write| (write.index as usize) < 2));
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
