//! The session protocol's bytes.
//!
//! A session starts with one [`Hello`] from each side, compared before anything else is read; all that follows are
//! frames: a 16-byte prefix (body length u32, kind u8, head check u24, body check u64) and a body of little-endian fields.
//! The checks are hashes, of length and kind and of kind and body, so that a frame that changed on its way is never acted
//! upon (I2), nor waited for when its length changed. Over TCP a
//! Write frame is followed by its payload, the blocks' bytes in the order of its indexes; over the others it says that
//! they were copied. Over TCP a session may have further connections, which carry Write frames and nothing else: each begins
//! with a Hello too, and joins by the ticket that the session's own was welcomed with. Pure functions without I/O: every
//! byte string yields a frame or an error that names the field.

use baton_types::{BlockId, Epoch, WorkerId, hash_bytes};

use crate::codec::{Fields, Malformed, Put};
use crate::options::Limits;

/// Bytes of a frame's prefix.
pub const PREFIX: usize = 16;
/// What a frame is said to be malformed in when it changed on its way.
pub(crate) const CHECK: &str = "check";
/// Connections of a session at most, its own among them.
pub const MAX_STREAMS: usize = 16;
/// Blocks of one Write frame at most.
pub(crate) const MAX_WRITE_BLOCKS: usize = 256;
/// Bytes of a text in a frame at most.
const MAX_TEXT: usize = 1024;
/// Bytes of an address, a key or a handle at most; those of UCX with dozens of devices have a few thousand.
const MAX_OPAQUE: usize = 64 << 10;
const MAGIC: [u8; 8] = *b"baton-kv";

/// The first bytes of a session, in both directions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello {
    /// `KvLayout::fingerprint`, which covers the protocol's version.
    pub fingerprint: u64,
}

impl Hello {
    /// Bytes on the wire.
    pub const LEN: usize = 16;

    /// The bytes.
    pub fn encode(self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.put_u64(self.fingerprint);
        bytes
    }

    /// A peer's, or what is wrong with it.
    pub fn parse(bytes: &[u8]) -> Result<Hello, Malformed> {
        let mut fields = Fields::new(bytes);
        if fields.array::<8>("magic")? != MAGIC {
            return Err(Malformed::new("magic", "not a transfer session"));
        }
        let hello = Hello { fingerprint: fields.u64("fingerprint")? };
        fields.end()?;
        Ok(hello)
    }
}

/// By what further connections join a session over TCP: which one, and a number that only its peer was told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ticket {
    /// The decode worker's number of it.
    pub session: u64,
    /// Cannot be guessed.
    pub token: u64,
}

/// What a caller wants blocks to go over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Over {
    /// What the stream implies: shared memory on one host, else the stream itself.
    Stream,
    /// UCX.
    Ucx,
    /// Copies from device to device.
    CudaIpc,
}

/// Why the decode side will not verify a handoff.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum Refusal {
    /// There is no reservation to write to.
    NoReservation(String),
    /// A write outside the reservation, or twice.
    BadWrite(String),
    /// Holes at completion.
    Incomplete { written: u64, expected: u64 },
    /// A digest differs.
    Verify { group: u32, index: u32, block: BlockId, want: u64, got: u64 },
}

/// One message of a session after the handshake's first step.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum Frame {
    /// Prefill: who calls, whom it means to reach, and what blocks go over.
    Identify { me: WorkerId, you: WorkerId, over: Over },
    /// Decode: come in; over TCP, with the ticket for further connections.
    Welcome { blocks: Vec<u32>, ticket: Option<Ticket> },
    /// Decode: go away.
    Reject { reason: String },
    /// Prefill, instead of Identify: this connection is a session's, and its number there, from 1 on.
    Join { ticket: Ticket, stream: u8 },
    /// Decode: so it is.
    Joined,
    /// Prefill: asks for access under an epoch.
    Begin { epoch: Epoch, key: u64 },
    /// Decode, before the first Granted, over UCX: where the pool is written to.
    Access(Access),
    /// Decode, before the first Granted, from device to device: by what the pool of so many bytes is opened. Opaque.
    Handle { bytes: u64, handle: Vec<u8> },
    /// Decode: access granted to these blocks.
    Granted { epoch: Epoch, blocks: Vec<Vec<BlockId>> },
    /// Prefill: one layer of some blocks follows (tcp) or was copied (shm, ucx, cuda-ipc).
    Write(WriteHead),
    /// Prefill: all writes precede this frame, or are among the first `after[i]` Write frames of connection i + 1.
    Complete { epoch: Epoch, after: Vec<u64>, writes: u64, digests: Vec<Vec<u64>>, tail: Vec<u8> },
    /// Either: nothing to say, but alive.
    Beat,
    /// Prefill: has stopped and gives up.
    Abort { epoch: Epoch },
    /// Prefill: has stopped because it was told to.
    FenceAck { epoch: Epoch },
    /// Decode: every digest matches.
    Verified { epoch: Epoch },
    /// Decode: the handoff failed.
    Failed { epoch: Epoch, refusal: Refusal },
    /// Decode: stop writing under this epoch and say so.
    Fence { epoch: Epoch },
}

/// Where a pool is written to over UCX. All but the sizes is opaque.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Access {
    /// Address of the pool's first byte in the decode worker's process.
    pub base: u64,
    /// Bytes of the pool.
    pub bytes: u64,
    /// Where its UCX worker is reached.
    pub worker: Vec<u8>,
    /// The right to write to the pool.
    pub key: Vec<u8>,
}

/// Which blocks a Write frame's payload holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WriteHead {
    /// The handoff.
    pub epoch: Epoch,
    /// Layer group.
    pub group: u16,
    /// Layer in the group.
    pub layer: u16,
    /// Bytes that follow the frame; 0 but over TCP.
    pub payload: u32,
    /// Positions in the reservation's list of the group.
    pub indexes: Vec<u32>,
}

const IDENTIFY: u8 = 1;
const BEGIN: u8 = 2;
const WRITE: u8 = 3;
const COMPLETE: u8 = 4;
const ABORT: u8 = 5;
const FENCE_ACK: u8 = 6;
const BEAT: u8 = 7;
const JOIN: u8 = 8;
const WELCOME: u8 = 17;
const REJECT: u8 = 18;
const GRANTED: u8 = 19;
const VERIFIED: u8 = 20;
const FAILED: u8 = 21;
const FENCE: u8 = 22;
const ACCESS: u8 = 23;
const HANDLE: u8 = 24;
const JOINED: u8 = 25;

/// The largest body of each kind of frame.
#[derive(Clone, Copy, Debug)]
pub struct FrameLimits {
    list: usize,
    complete: usize,
}

impl FrameLimits {
    /// Bounds for handoffs within `limits` over `groups` layer groups.
    pub fn new(limits: &Limits, groups: usize) -> FrameLimits {
        let lists = 64 + 4 * groups;
        FrameLimits {
            list: lists + 4 * limits.blocks_per_handoff,
            complete: lists + 8 * (MAX_STREAMS + limits.blocks_per_handoff) + limits.tail_bytes,
        }
    }

    fn body(&self, kind: u8) -> Option<usize> {
        match kind {
            IDENTIFY | JOIN => Some(17),
            BEGIN | ABORT | FENCE_ACK | VERIFIED | FENCE => Some(16),
            BEAT | JOINED => Some(0),
            WRITE => Some(32 + 4 * MAX_WRITE_BLOCKS),
            WELCOME | REJECT | FAILED => Some(64 + MAX_TEXT),
            GRANTED => Some(self.list),
            ACCESS => Some(32 + 2 * MAX_OPAQUE),
            HANDLE => Some(16 + MAX_OPAQUE),
            COMPLETE => Some(self.complete),
            _ => None,
        }
    }
}

/// What a prefix says of its frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameHead {
    /// Bytes of the body.
    pub len: usize,
    kind: u8,
    check: u64,
}

impl FrameHead {
    /// That of a frame with this body, whatever it is; for tests of what is made of bodies.
    pub fn matching(kind: u8, body: &[u8]) -> FrameHead {
        FrameHead { len: body.len(), kind, check: check_of(kind, body) }
    }
}

/// What a frame's prefix must hold, given its body.
fn check_of(kind: u8, body: &[u8]) -> u64 {
    hash_bytes(u64::from(kind), body)
}

/// What a prefix must hold, given what it says: three bytes.
fn head_check_of(kind: u8, len: [u8; 4]) -> [u8; 3] {
    let [a, b, c, ..] = hash_bytes(u64::from(kind), &len).to_le_bytes();
    [a, b, c]
}

/// A prefix, before anything of its frame is read.
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

/// The frame with this prefix and body.
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

fn parse_ticket(f: &mut Fields) -> Result<Ticket, Malformed> {
    Ok(Ticket { session: f.u64("session")?, token: f.u64("token")? })
}

fn parse_offer(f: &mut Fields) -> Result<Option<Ticket>, Malformed> {
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

/// Writes the prefix of the body behind it.
fn seal(kind: u8, frame: &mut [u8]) {
    let len = ((frame.len() - PREFIX) as u32).to_le_bytes();
    let check = check_of(kind, &frame[PREFIX..]);
    frame[..4].copy_from_slice(&len);
    frame[4] = kind;
    frame[5..8].copy_from_slice(&head_check_of(kind, len));
    frame[8..PREFIX].copy_from_slice(&check.to_le_bytes());
}

impl Frame {
    /// Prefix and body.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; PREFIX];
        let kind = self.encode_body(&mut out);
        seal(kind, &mut out);
        out
    }

    fn encode_body(&self, out: &mut Vec<u8>) -> u8 {
        match self {
            Frame::Identify { me, you, over } => {
                out.put_u64(me.0);
                out.put_u64(you.0);
                out.put_u8(match over {
                    Over::Stream => 0,
                    Over::Ucx => 1,
                    Over::CudaIpc => 2,
                });
                IDENTIFY
            }
            Frame::Welcome { blocks, ticket } => {
                out.put_u32s(blocks.iter().copied());
                out.put_u8(u8::from(ticket.is_some()));
                ticket.iter().for_each(|ticket| put_ticket(out, ticket));
                WELCOME
            }
            Frame::Reject { reason } => {
                out.put_blob(cut(reason).as_bytes());
                REJECT
            }
            Frame::Join { ticket, stream } => {
                put_ticket(out, ticket);
                out.put_u8(*stream);
                JOIN
            }
            Frame::Joined => JOINED,
            Frame::Begin { epoch, key } => {
                out.put_u64(epoch.0);
                out.put_u64(*key);
                BEGIN
            }
            Frame::Access(Access { base, bytes, worker, key }) => {
                out.put_u64(*base);
                out.put_u64(*bytes);
                out.put_blob(worker);
                out.put_blob(key);
                ACCESS
            }
            Frame::Handle { bytes, handle } => {
                out.put_u64(*bytes);
                out.put_blob(handle);
                HANDLE
            }
            Frame::Granted { epoch, blocks } => {
                out.put_u64(epoch.0);
                out.put_u16(blocks.len() as u16);
                blocks.iter().for_each(|group| out.put_u32s(group.iter().map(|b| b.0)));
                GRANTED
            }
            Frame::Write(head) => {
                out.put_u64(head.epoch.0);
                out.put_u16(head.group);
                out.put_u16(head.layer);
                out.put_u32(head.payload);
                out.put_u32s(head.indexes.iter().copied());
                WRITE
            }
            Frame::Complete { epoch, after, writes, digests, tail } => {
                out.put_u64(epoch.0);
                out.put_u64s(after);
                out.put_u64(*writes);
                out.put_u16(digests.len() as u16);
                digests.iter().for_each(|group| out.put_u64s(group));
                out.put_blob(tail);
                COMPLETE
            }
            Frame::Failed { epoch, refusal } => {
                out.put_u64(epoch.0);
                encode_refusal(refusal, out);
                FAILED
            }
            Frame::Beat => BEAT,
            Frame::Abort { epoch } => only_epoch(out, *epoch, ABORT),
            Frame::FenceAck { epoch } => only_epoch(out, *epoch, FENCE_ACK),
            Frame::Verified { epoch } => only_epoch(out, *epoch, VERIFIED),
            Frame::Fence { epoch } => only_epoch(out, *epoch, FENCE),
        }
    }
}

fn only_epoch(out: &mut Vec<u8>, epoch: Epoch, kind: u8) -> u8 {
    out.put_u64(epoch.0);
    kind
}

fn put_ticket(out: &mut Vec<u8>, ticket: &Ticket) {
    out.put_u64(ticket.session);
    out.put_u64(ticket.token);
}

fn encode_refusal(refusal: &Refusal, out: &mut Vec<u8>) {
    match refusal {
        Refusal::NoReservation(reason) => {
            out.put_u8(0);
            out.put_blob(cut(reason).as_bytes());
        }
        Refusal::BadWrite(reason) => {
            out.put_u8(1);
            out.put_blob(cut(reason).as_bytes());
        }
        Refusal::Incomplete { written, expected } => {
            out.put_u8(2);
            out.put_u64(*written);
            out.put_u64(*expected);
        }
        Refusal::Verify { group, index, block, want, got } => {
            out.put_u8(3);
            out.put_u32(*group);
            out.put_u32(*index);
            out.put_u32(block.0);
            out.put_u64(*want);
            out.put_u64(*got);
        }
    }
}

/// At most [`MAX_TEXT`] bytes of a text, cut between characters.
fn cut(text: &str) -> &str {
    let end = (0..=text.len().min(MAX_TEXT)).rev().find(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or(0)]
}

#[cfg(test)]
mod tests;
