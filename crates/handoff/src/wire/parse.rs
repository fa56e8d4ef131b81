//! Bytes to frames. Every byte string yields a frame, or an error that names the field.

use baton_types::{BlockId, Epoch, WorkerId};

use super::*;
use crate::codec::{Fields, Malformed};

/// A frame's prefix, parsed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameHead {
    /// Bytes of the body.
    pub len: usize,
    kind: u8,
    check: u64,
}

impl FrameHead {
    /// The prefix that fits `body`, whatever its bytes, for tests of body parsing.
    #[cfg(feature = "testing")]
    pub fn matching(kind: u8, body: &[u8]) -> FrameHead {
        FrameHead { len: body.len(), kind, check: check_of(kind, body) }
    }
}

/// Parses a prefix and bounds its length, before any of the body is read.
pub fn parse_prefix(prefix: [u8; PREFIX], limits: &FrameLimits) -> Result<FrameHead, Malformed> {
    let [a, b, c, d, kind, e, f, g, check @ ..] = prefix;
    let (len, check) = (u32::from_le_bytes([a, b, c, d]) as usize, u64::from_le_bytes(check));
    if head_check_of(kind, [a, b, c, d]) != [e, f, g] {
        return Err(Malformed::new(CHECK, "the frame changed on its way"));
    }
    let limit = limits.body(kind).ok_or_else(|| Malformed::new("kind", format!("{kind} is no frame")))?;
    if len > limit {
        return Err(Malformed::new("length", format!("{len} bytes, a frame of kind {kind} has at most {limit}")));
    }
    Ok(FrameHead { len, kind, check })
}

/// Parses the frame with this prefix and body.
pub fn parse_body(head: &FrameHead, body: &[u8]) -> Result<Frame, Malformed> {
    if check_of(head.kind, body) != head.check {
        return Err(Malformed::new(CHECK, "the frame changed on its way"));
    }
    let mut f = Fields::new(body);
    let epoch = |f: &mut Fields| f.u64("epoch").map(Epoch);
    let frame = match head.kind {
        IDENTIFY => {
            let (me, you) = (WorkerId(f.u64("me")?), WorkerId(f.u64("you")?));
            Frame::Identify { me, you, over: parse_over(&mut f)? }
        }
        WELCOME => Frame::Welcome { blocks: f.u32s("blocks")?, ticket: parse_offer(&mut f)? },
        REJECT => Frame::Reject { reason: f.text("reason")? },
        JOIN => Frame::Join { ticket: parse_ticket(&mut f)?, stream: parse_stream(&mut f)? },
        JOINED => Frame::Joined,
        BEGIN => Frame::Begin { epoch: epoch(&mut f)?, key: f.u64("key")? },
        ACCESS => Frame::Access(parse_access(&mut f)?),
        HANDLE => Frame::Handle { bytes: f.u64("bytes")?, handle: parse_opaque(&mut f, "handle")? },
        GRANTED => Frame::Granted { epoch: epoch(&mut f)?, blocks: parse_blocks(&mut f)? },
        WRITE => Frame::Write(parse_write(&mut f)?),
        COMPLETE => Frame::Complete {
            epoch: epoch(&mut f)?,
            after: parse_after(&mut f)?,
            writes: f.u64("writes")?,
            digests: parse_groups(&mut f, |f| f.u64s("digests"))?,
            tail: f.blob("tail")?.to_vec(),
        },
        ABORT => Frame::Abort { epoch: epoch(&mut f)? },
        FENCE_ACK => Frame::FenceAck { epoch: epoch(&mut f)? },
        VERIFIED => Frame::Verified { epoch: epoch(&mut f)? },
        FAILED => Frame::Failed { epoch: epoch(&mut f)?, refusal: parse_refusal(&mut f)? },
        FENCE => Frame::Fence { epoch: epoch(&mut f)? },
        BEAT => Frame::Beat,
        kind => return Err(Malformed::new("kind", format!("{kind} is no frame"))),
    };
    f.end()?;
    Ok(frame)
}

fn parse_groups<T>(
    f: &mut Fields,
    mut one: impl FnMut(&mut Fields) -> Result<T, Malformed>,
) -> Result<Vec<T>, Malformed> {
    let groups = f.u16("groups")?;
    (0..groups).map(|_| one(f)).collect()
}

fn parse_blocks(f: &mut Fields) -> Result<Vec<Vec<BlockId>>, Malformed> {
    parse_groups(f, |f| Ok(f.u32s("blocks")?.into_iter().map(BlockId).collect()))
}

fn parse_over(f: &mut Fields) -> Result<Over, Malformed> {
    match f.u8("over")? {
        0 => Ok(Over::Stream),
        1 => Ok(Over::Ucx),
        2 => Ok(Over::CudaIpc),
        other => Err(Malformed::new("over", format!("{other} is none of 0, 1 and 2"))),
    }
}

fn parse_ticket(f: &mut Fields) -> Result<JoinTicket, Malformed> {
    Ok(JoinTicket { session: f.u64("session")?, token: f.u64("token")? })
}

fn parse_offer(f: &mut Fields) -> Result<Option<JoinTicket>, Malformed> {
    match f.u8("ticket")? {
        0 => Ok(None),
        1 => parse_ticket(f).map(Some),
        other => Err(Malformed::new("ticket", format!("{other} is neither 0 nor 1"))),
    }
}

fn parse_stream(f: &mut Fields) -> Result<u8, Malformed> {
    match f.u8("stream")? {
        stream if (1..MAX_STREAMS).contains(&usize::from(stream)) => Ok(stream),
        other => Err(Malformed::new("stream", format!("{other}; further connections are 1 to {}", MAX_STREAMS - 1))),
    }
}

fn parse_after(f: &mut Fields) -> Result<Vec<u64>, Malformed> {
    match f.u64s("after")? {
        after if after.len() < MAX_STREAMS => Ok(after),
        after => Err(Malformed::new("after", format!("{} connections beside the session's own", after.len()))),
    }
}

fn parse_opaque(f: &mut Fields, field: &'static str) -> Result<Vec<u8>, Malformed> {
    match f.blob(field)? {
        bytes if (1..=MAX_OPAQUE).contains(&bytes.len()) => Ok(bytes.to_vec()),
        bytes => Err(Malformed::new(field, format!("{} bytes; it has 1 to {MAX_OPAQUE}", bytes.len()))),
    }
}

fn parse_access(f: &mut Fields) -> Result<Access, Malformed> {
    let (base, bytes) = (f.u64("base")?, f.u64("bytes")?);
    Ok(Access { base, bytes, worker: parse_opaque(f, "worker")?, key: parse_opaque(f, "key")? })
}

fn parse_write(f: &mut Fields) -> Result<WriteHead, Malformed> {
    let head = WriteHead {
        epoch: Epoch(f.u64("epoch")?),
        group: f.u16("group")?,
        layer: f.u16("layer")?,
        payload: f.u32("payload")?,
        indexes: f.u32s("indexes")?,
    };
    match head.indexes.len() {
        1..=MAX_WRITE_BLOCKS => Ok(head),
        n => Err(Malformed::new("indexes", format!("{n} blocks; a write has 1 to {MAX_WRITE_BLOCKS}"))),
    }
}

fn parse_refusal(f: &mut Fields) -> Result<Refusal, Malformed> {
    Ok(match f.u8("refusal")? {
        0 => Refusal::NoReservation(f.text("reason")?),
        1 => Refusal::BadWrite(f.text("reason")?),
        2 => Refusal::Incomplete { written: f.u64("written")?, expected: f.u64("expected")? },
        3 => Refusal::Verify {
            group: f.u32("group")?,
            index: f.u32("index")?,
            block: BlockId(f.u32("block")?),
            want: f.u64("want")?,
            got: f.u64("got")?,
        },
        other => return Err(Malformed::new("refusal", format!("{other} is no refusal"))),
    })
}
