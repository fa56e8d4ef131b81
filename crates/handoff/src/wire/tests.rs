//! Every frame survives the wire, changed bytes are refused, and no byte string makes the parser panic.

use baton_types::testing::{Random, with_seeds};

use super::encode::seal;
use super::*;
use crate::limits::TransferLimits;

fn samples() -> Vec<Frame> {
    let epoch = Epoch(0x1122_3344_5566_7788);
    let refusals = [
        Refusal::NoReservation("it expired".into()),
        Refusal::BadWrite("layer 9 of 2".into()),
        Refusal::Incomplete { written: 3, expected: 4 },
        Refusal::Verify { group: 1, index: 2, block: BlockId(3), want: 4, got: 5 },
    ];
    let mut frames = vec![
        Frame::Identify { me: WorkerId(1), you: WorkerId(2), over: Over::Ucx },
        Frame::Identify { me: WorkerId(1), you: WorkerId(2), over: Over::CudaIpc },
        Frame::Handle { bytes: 96, handle: vec![9; 64] },
        Frame::Welcome { blocks: vec![10, 20], ticket: None },
        Frame::Welcome { blocks: vec![], ticket: Some(JoinTicket { session: 3, token: 1 << 63 }) },
        Frame::Join { ticket: JoinTicket { session: 3, token: 9 }, stream: 15 },
        Frame::Joined,
        Frame::Reject { reason: "full".into() },
        Frame::Begin { epoch, key: 9 },
        Frame::Access(Access { base: 1 << 46, bytes: 96, worker: vec![1, 2, 3], key: vec![4] }),
        Frame::Granted { epoch, blocks: vec![vec![BlockId(1), BlockId(2)], vec![]] },
        Frame::Write(WriteHead { epoch, group: 1, layer: 2, payload: 96, indexes: vec![0, 5, 4] }),
        Frame::Complete {
            epoch,
            after: vec![4, 0, 7],
            writes: 12,
            digests: vec![vec![1, u64::MAX], vec![]],
            tail: b"tail".to_vec(),
        },
        Frame::Beat,
        Frame::Abort { epoch },
        Frame::FenceAck { epoch },
        Frame::Verified { epoch },
        Frame::Fence { epoch },
    ];
    frames.extend(refusals.map(|refusal| Frame::Failed { epoch, refusal }));
    frames
}

fn parse(bytes: &[u8]) -> Result<Frame, Malformed> {
    let limits = FrameLimits::new(&TransferLimits::default(), 2);
    let prefix = Fields::new(bytes).array::<PREFIX>("prefix")?;
    let head = parse_prefix(prefix, &limits)?;
    let body = &bytes[PREFIX..];
    if body.len() != head.len {
        return Err(Malformed::new("length", "not the body's"));
    }
    parse_body(&head, body)
}

/// Sets length and checks to those of the kind and body present, as a misbehaving peer can.
fn reseal(bytes: &mut [u8]) {
    seal(bytes[4], bytes);
}

#[test]
fn frames_survive_the_wire() {
    for frame in samples() {
        assert_eq!(parse(&frame.encode()).as_ref(), Ok(&frame));
    }
    let hello = Hello { fingerprint: 77 };
    assert_eq!(Hello::parse(&hello.encode()), Ok(hello));
    assert_eq!(hello.encode().len(), Hello::LEN);
}

#[test]
fn truncated_and_padded_frames_are_refused() {
    for frame in samples() {
        let bytes = frame.encode();
        for end in PREFIX..bytes.len() {
            // Refused as it is, and with length and checks that fit the bytes present.
            let mut cut = bytes[..end].to_vec();
            assert!(parse(&cut).is_err());
            reseal(&mut cut);
            assert!(parse(&cut).is_err(), "{frame:?} cut to {end}");
        }
        let mut padded = bytes.clone();
        padded.push(0);
        reseal(&mut padded);
        assert!(parse(&padded).is_err(), "{frame:?} with a byte more");
    }
}

#[test]
fn random_and_mutated_bytes_never_panic_and_what_parses_encodes_back() {
    with_seeds([1], |seed| {
        let mut random = Random(seed);
        for _ in 0..20_000 {
            let (len, kind) = (random.index(64), random.below(32) as u8);
            let body = random.bytes(len);
            if let Ok(frame) = parse_body(&FrameHead::matching(kind, &body), &body) {
                assert_eq!(&frame.encode()[PREFIX..], &body);
            }
        }
        for frame in samples() {
            let bytes = frame.encode();
            for _ in 0..500 {
                let mut mutated = bytes.clone();
                mutated[random.index(bytes.len())] = random.bits() as u8;
                reseal(&mut mutated);
                if let Ok(frame) = parse(&mutated) {
                    assert_eq!(frame.encode(), mutated);
                }
            }
        }
    });
}

#[test]
fn a_frame_with_any_bit_flipped_is_refused() {
    // I2
    for frame in samples() {
        let bytes = frame.encode();
        for bit in 0..8 * bytes.len() {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            // A changed length is an error at once, not waited for.
            assert_eq!(parse(&flipped).unwrap_err().field, CHECK, "{frame:?} with bit {bit} flipped");
        }
    }
}

#[test]
fn lengths_are_bounded_before_anything_is_allocated() {
    let limits = FrameLimits::new(&TransferLimits::default(), 2);
    let prefix = |len: u32, kind: u8| {
        let (len, [a, b, c]) = (len.to_le_bytes(), head_check_of(kind, len.to_le_bytes()));
        let head = [len[0], len[1], len[2], len[3], kind, a, b, c];
        *[head, [9; 8]].concat().first_chunk::<PREFIX>().unwrap()
    };
    for kind in 0..=255 {
        let field = parse_prefix(prefix(u32::MAX, kind), &limits).unwrap_err().field;
        assert!(matches!(field, "kind" | "length"), "{field}");
    }
    assert!(parse_prefix(prefix(8, ABORT), &limits).is_ok());
    // A count far beyond the body is an error, not an allocation.
    let mut body = Vec::new();
    body.put_u64(1);
    body.put_u16(1);
    body.put_u32(u32::MAX);
    assert_eq!(parse_body(&FrameHead::matching(GRANTED, &body), &body).unwrap_err().field, "blocks");
    assert!(Frame::Reject { reason: "é".repeat(5000) }.encode().len() <= PREFIX + 4 + MAX_TEXT);
}

#[test]
fn the_largest_frames_within_limits_fit() {
    let limits = TransferLimits { blocks_per_handoff: 100, tail_bytes: 50, ..TransferLimits::default() };
    let frame_limits = FrameLimits::new(&limits, 2);
    let fits = |frame: &Frame| {
        let bytes = frame.encode();
        let prefix = Fields::new(&bytes).array::<PREFIX>("prefix").unwrap();
        assert!(parse_prefix(prefix, &frame_limits).is_ok(), "{} bytes", bytes.len());
    };
    let digests = vec![vec![1; 60], vec![2; 40]];
    fits(&Frame::Complete { epoch: Epoch(1), after: vec![1; MAX_STREAMS - 1], writes: 1, digests, tail: vec![0; 50] });
    fits(&Frame::Granted { epoch: Epoch(1), blocks: vec![vec![BlockId(0); 60], vec![BlockId(0); 40]] });
    fits(&Frame::Handle { bytes: 1, handle: vec![1; MAX_OPAQUE] });
    fits(&Frame::Access(Access { base: 1, bytes: 1, worker: vec![1; MAX_OPAQUE], key: vec![2; MAX_OPAQUE] }));
    let indexes = vec![0; MAX_WRITE_BLOCKS];
    fits(&Frame::Write(WriteHead { epoch: Epoch(1), group: 0, layer: 0, payload: 1, indexes }));
    fits(&Frame::Failed { epoch: Epoch(1), refusal: Refusal::BadWrite("x".repeat(9999)) });
}
