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

mod encode;
mod parse;

use baton_types::{BlockId, Epoch, WorkerId, hash_bytes};

use crate::codec::{Fields, Malformed, Put};
pub use parse::{FrameHead, parse_body, parse_prefix};

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
pub struct JoinTicket {
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
    Welcome { blocks: Vec<u32>, ticket: Option<JoinTicket> },
    /// Decode: go away.
    Reject { reason: String },
    /// Prefill, instead of Identify: this connection is a session's, and its number there, from 1 on.
    Join { ticket: JoinTicket, stream: u8 },
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
    pub(crate) list: usize,
    pub(crate) complete: usize,
}

impl FrameLimits {
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

/// What a frame's prefix must hold, given its body.
fn check_of(kind: u8, body: &[u8]) -> u64 {
    hash_bytes(u64::from(kind), body)
}

/// What a prefix must hold, given what it says: three bytes.
fn head_check_of(kind: u8, len: [u8; 4]) -> [u8; 3] {
    let [a, b, c, ..] = hash_bytes(u64::from(kind), &len).to_le_bytes();
    [a, b, c]
}

#[cfg(test)]
mod tests;
